"""Checks a reward on plain and noisy samples before a run."""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image

from flowgrpo.core.errors import RewardError
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample
from flowgrpo.scoring.reward import Reward


def require_varying_scores(
    reward: Reward, row: Row, call: Mapping[str, Any], *, videos: bool | None = None
) -> None:
    """Refuses a reward that gives black, white and noise the same score.

    A reward that looks for text correctly gives 0 to all three, so equal zeros pass.

    Args:
        row: data row of the three samples.
        call: arguments of the pipeline's call; its size and number of frames are used.
        videos: whether the pipeline generates videos; None if unknown.

    Raises:
        RewardError: the three scores are one number other than 0, or the reward takes videos but
            the pipeline generates images.
    """
    size = (int(call.get("width") or 512), int(call.get("height") or 512))
    # A reward of images scores the frames of a video one by one, so images are enough for it.
    as_videos = reward.takes_videos and (not reward.takes_images or videos) and videos is not False
    num_frames = int(call.get("num_frames") or 8) if as_videos else 1
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (num_frames, size[1], size[0], 3), generator=generator)
    clips = [[Image.new("RGB", size, colour)] * num_frames for colour in ("black", "white")]
    clips.append([Image.fromarray(frame) for frame in noise.to(torch.uint8).numpy()])
    samples: list[Sample] = [*clips] if as_videos else [frames[0] for frames in clips]
    scores = reward(samples, [row] * 3)
    if bool((scores == scores[0]).all()) and scores[0] != 0:
        modality = "video" if as_videos else "image"
        raise RewardError(
            f"{reward.name} is {scores[0]:g} for a black, a white and a noise {modality}, but must "
            f"depend on the {modality}; check the function."
        )
