"""Replays are exact with joined latents, guidance that counts steps, and inverted sigmas."""

import pytest
import torch
from families import FAMILIES, built

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.seeds import normal
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.tape import Tape

ROW = Row(prompt="a red cube", source="test")
SEEDS = [1, 2]


def rollout(policy, name, steps=4, window=range(3), **call):
    def noise(step, stream, shape):
        return torch.stack([normal(shape[1:], seed, step, stream) for seed in SEEDS])

    call = {**FAMILIES[name].call, **call, "num_inference_steps": steps, "output_type": "latent"}
    tape = Tape(sde="cps", noise_level=0.7, window=window)
    return policy.rollout(ROW, SEEDS, call, tape, noise)


def test_audio_and_video_are_one_log_prob_over_all_their_dimensions():
    policy = Policy(built("ltx-2"), TrainConfig(lora={"rank": 4, "alpha": 8}))
    taken = rollout(policy, "ltx-2")
    video, audio = (taken.tape.steps[1, stream] for stream in (0, 1))
    assert video.next_latents.shape != audio.next_latents.shape
    pairs = [
        (torch.distributions.Normal(step.mean, step.std), step.next_latents)
        for step in (video, audio)
    ]
    expected = torch.cat([normal.log_prob(x).flatten(1) for normal, x in pairs], dim=1).mean(1)
    seen = {}

    def on_step(step, new):
        seen[step.index] = log_prob(step.next_latents, new.mean, new.std)
        assert torch.equal(step.mean, new.mean)
        seen[step.index].sum().backward()

    policy.replay(taken, on_step)
    assert list(seen) == [0, 1, 2]
    assert torch.allclose(seen[1], expected, atol=1e-5)


def test_streams_of_different_std_are_joined_in_units_of_the_first():
    """A different std of the audio shifts the log-prob by a constant, so no ratio changes."""
    from flowgrpo.policy.replay import _joined
    from flowgrpo.policy.tape import Step, Transition

    torch.manual_seed(0)
    x, y, mean_x, mean_y, new_x, new_y = torch.randn(6, 2, 8).unbind()

    def step(latents, mean, std):
        return Step(
            index=0,
            stream=0,
            position=None,
            latents=latents,
            next_latents=latents,
            mean=mean,
            std=std,
        )

    streams = [(step(x, mean_x, 0.5), 0.5), (step(y, mean_y, 2.0), 2.0)]
    news = [new_x, new_y]
    joint, new = _joined(
        [(s, Transition(m, std, m)) for (s, std), m in zip(streams, news, strict=True)]
    )
    ratio = log_prob(joint.next_latents, new.mean, new.std) - log_prob(
        joint.next_latents, joint.mean, joint.std
    )
    each = [
        log_prob(s.next_latents, m, std) - log_prob(s.next_latents, s.mean, std)
        for (s, std), m in zip(streams, news, strict=True)
    ]
    assert torch.allclose(ratio, (each[0] + each[1]) / 2, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("sd3-skip-layers", [1, 2, 2, 1]), ("lumina2-truncated", [2, 2, 1, 1])],
)
def test_guidance_that_counts_steps_makes_the_same_calls_in_a_replay(name, calls):
    """A loop that restarted at each trained step would use the first step's guidance."""
    policy = Policy(built(name), TrainConfig(lora={"rank": 4, "alpha": 8}))
    taken = rollout(policy, name, **FAMILIES[name].guided)
    made = [len(taken.tape.outputs["transformer", step]) for step in range(4)]
    assert made[:3] == calls[:3]
    policy.replay(
        taken, lambda step, new: torch.testing.assert_close(new.mean, step.mean, rtol=0, atol=0)
    )
    assert taken.tape.replayed_forwards == sum(calls[:3])


def test_inverted_sigmas_are_read_as_falling_noise():
    policy = Policy(built("mochi"), TrainConfig(lora={"rank": 4, "alpha": 8}))
    taken = rollout(policy, "mochi")
    sigmas = [step.position.sigma for _, step in sorted(taken.tape.steps.items())]
    assert sigmas == sorted(sigmas, reverse=True)
    assert taken.tape.steps[3, 0].position.sigma_next == 0
    assert policy.pipe.scheduler.config.invert_sigmas
