"""A rollout without noise is the stock pipeline, and a replay reproduces what was recorded."""

from dataclasses import replace

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from families import built
from families.family import SHORT

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.errors import ReplayError
from flowgrpo.core.seeds import normal
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.pipelines.seams import patched
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.tape import Tape

DTYPES = [torch.float32, torch.bfloat16]
GUIDANCE = [1.0, 1.5, 4.5]
SEEDS = [11, 12, 13]
SMALL = TrainConfig(lora={"rank": 4, "alpha": 8})
ROW = Row(prompt="a cat", source="test")


def step_noise(seeds=SEEDS):
    def noise(step, stream, shape):
        return torch.stack([normal(shape[1:], seed, step, stream) for seed in seeds])

    return noise


def roll(policy, *, window=range(1, 4), noise_level=0.7, sde="flow_sde", output="pil", **call):
    call = {**SHORT, "num_inference_steps": 5, "output_type": output, **call}
    tape = Tape(sde=sde, noise_level=noise_level, window=window)
    return policy.rollout(ROW, SEEDS, call, tape, step_noise())


def stock_latents(pipe, steps=5, **call):
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    return pipe(
        prompt="a cat",
        num_images_per_prompt=len(SEEDS),
        generator=generators,
        num_inference_steps=steps,
        output_type="latent",
        **{**SHORT, **call},
    ).images


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_zero_noise_is_the_stock_pipeline(family, guidance, dtype):
    stock = stock_latents(built(family, dtype), guidance_scale=guidance)
    policy = Policy(built(family, dtype), SMALL)
    samples = roll(policy, noise_level=0.0, output="latent", guidance_scale=guidance).samples
    assert torch.equal(torch.stack(samples), stock)
    assert torch.equal(stock_latents(policy.pipe, guidance_scale=guidance), stock)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("sde", ["flow_sde", "cps", "dance_sde"])
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_replay_reproduces_log_prob(family, sde, guidance, dtype):
    policy = Policy(built(family, dtype), SMALL)
    rollout = roll(policy, sde=sde, guidance_scale=guidance, window=range(0, 4))
    seen = []

    def compare(step, gaussian):
        assert torch.equal(gaussian.mean, step.mean)
        assert gaussian.std == step.std
        now = log_prob(step.next_latents, gaussian.mean, gaussian.std)
        before = log_prob(step.next_latents, step.mean, step.std)
        assert torch.equal(torch.exp(now - before), torch.ones(len(SEEDS)))
        now.sum().backward()
        seen.append(step.index)

    policy.replay(rollout, compare)
    assert seen == [0, 1, 2, 3]
    gradients = [parameter.grad for parameter in policy.parameters.values()]
    assert any(g is not None and g.abs().sum() > 0 for g in gradients)
    assert torch.equal(
        stock_latents(policy.pipe, guidance_scale=guidance),
        stock_latents(built(family, dtype), guidance_scale=guidance),
    )


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_every_lora_b_receives_a_gradient(family):
    policy = Policy(built(family), SMALL)
    rollout = roll(policy, guidance_scale=4.5)
    policy.replay(rollout, lambda step, g: (g.mean * torch.randn_like(g.mean)).sum().backward())
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_replay_leaves_gradient_mode_as_it_was():
    policy = Policy(built("sd3"), SMALL)
    rollout = roll(policy)
    policy.replay(rollout, lambda step, gaussian: None)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        policy.replay(rollout, lambda step, gaussian: None)
        assert not torch.is_grad_enabled()


def test_replay_without_gradients_builds_no_graph():
    policy = Policy(built("sd3"), SMALL)
    rollout = roll(policy)
    means = []
    policy.replay(rollout, lambda step, gaussian: means.append(gaussian.mean), gradients=False)
    assert len(means) == 3
    assert not any(mean.requires_grad for mean in means)


def test_the_last_step_is_the_schedulers_own():
    policy = Policy(built("sd3"), SMALL)
    rollout = roll(policy, output="latent")
    last = rollout.tape.steps[4, 0]
    assert last.position.sigma_next == 0
    assert last.mean is None
    assert torch.equal(torch.stack(rollout.samples), last.next_latents)


def test_the_noise_that_was_drawn_has_the_std_of_the_step():
    policy = Policy(built("sd3"), SMALL)
    rollout = roll(policy)
    for step in rollout.tape.window_steps:
        expected = step_noise()(step.index, 0, step.mean.shape)
        drawn = (step.next_latents - step.mean) / step.std
        assert torch.allclose(drawn, expected, atol=1e-5)


def test_a_changed_schedule_is_an_error_at_replay():
    policy = Policy(built("sd3"), SMALL)
    rollout = roll(policy)
    step = rollout.tape.steps[2, 0]
    step.position = replace(step.position, sigma=step.position.sigma + 1e-6)
    with pytest.raises(ReplayError, match="step 2 has"):
        policy.replay(rollout, lambda step, gaussian: None)


def test_changed_latents_are_an_error_at_replay():
    policy = Policy(built("sd3"), SMALL)
    rollout = roll(policy)
    rollout.tape.steps[1, 0].next_latents += 1e-4
    with pytest.raises(ReplayError, match="step 2 starts"):
        policy.replay(rollout, lambda step, gaussian: None)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (range(3, 5), "step 4 goes from sigma"),
        (range(3, 8), "step 4 goes"),
        (range(6, 8), "step 7 is in the window"),
    ],
)
def test_a_window_that_holds_the_last_step_or_runs_past_it_is_refused(window, message):
    with pytest.raises(ValueError, match=message):
        roll(Policy(built("sd3"), SMALL), window=window)


def test_a_multistep_solver_starts_afresh_after_the_window():
    """After the window its steps are those of a fresh solver: injected noise is not corrected."""
    pipe = built("sd3")
    pipe.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    policy = Policy(pipe, SMALL)
    predictions, forward = [], pipe.transformer.forward

    def watched(*args, **kwargs):
        predictions.append(forward(*args, **kwargs))
        return predictions[-1]

    with patched(pipe.transformer, "forward", watched):
        rollout = roll(policy, window=range(1, 2), noise_level=0.3, guidance_scale=1.0)
    fresh = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    fresh.set_timesteps(5)
    fresh.set_begin_index(2)
    after = rollout.tape.steps[2, 0]
    expected = fresh.step(predictions[-3][0], fresh.timesteps[2], after.latents).prev_sample
    assert torch.equal(after.next_latents, expected)


def test_the_pipeline_is_restored_when_its_call_fails():
    policy = Policy(built("sd3"), SMALL)
    before = dict(vars(policy.pipe.scheduler))
    with pytest.raises(TypeError):
        roll(policy, no_such_argument=1)
    assert "step" not in vars(policy.pipe.scheduler)
    assert "forward" not in vars(policy.pipe.transformer)
    assert vars(policy.pipe.scheduler).keys() == before.keys()
