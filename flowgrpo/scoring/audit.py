"""Checks of a reward before a run."""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image

from flowgrpo.core.errors import RewardError
from flowgrpo.data.prompts import Row
from flowgrpo.data.samples import Sample
from flowgrpo.scoring.reward import Reward


def require_varying_scores(
    reward: Reward, row: Row, call: Mapping[str, Any], *, videos: bool | None = None
) -> None:
    """Stops before training where a reward cannot tell black, white and noise apart.

    The pictures and clips have the size and number of frames that `call` asks for. A reward of text
    rightly gives 0 to all three, so equal zeros pass.

    Args:
        videos: whether the pipeline makes videos; None where that is not known.

    Raises:
        RewardError: the three scores are one number other than 0, or the reward takes videos and
            there are none.
    """
    size = (int(call.get("width") or 512), int(call.get("height") or 512))
    # A reward of images scores the frames of a video one by one, so pictures tell enough.
    clips = reward.takes_videos and (not reward.takes_images or videos) and videos is not False
    count = int(call.get("num_frames") or 8) if clips else 1
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (count, size[1], size[0], 3), generator=generator)
    plain = [[Image.new("RGB", size, colour)] * count for colour in ("black", "white")]
    three = [*plain, [Image.fromarray(frame) for frame in noise.to(torch.uint8).numpy()]]
    samples: list[Sample] = [*three] if clips else [frames[0] for frames in three]
    scores = reward(samples, [row] * 3)
    if bool((scores == scores[0]).all()) and scores[0] != 0:
        kind = "video" if clips else "image"
        raise RewardError(
            f"{reward.name} is {scores[0]:g} for a black, a white and a noise {kind}, but must "
            f"depend on the {kind}; check the function."
        )
