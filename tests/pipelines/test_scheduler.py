"""Every parametrisation is read correctly: the ODE step equals the scheduler's own step."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    SASolverScheduler,
    UniPCMultistepScheduler,
)

from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.pipelines.scheduler import flow_coordinates, position_of
from flowgrpo.pipelines.scheduler_checks import check_scheduler, check_stochastic
from flowgrpo.policy.record import record
from flowgrpo.policy.tape import Tape

STEPS = 7
STABLE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
NO_CLIP = {**STABLE, "clip_sample": False}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
FIRST_ORDER = {
    "flow": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow-inverted": FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    "ddim": DDIMScheduler(**NO_CLIP, set_alpha_to_one=False),
    "ddim-v": DDIMScheduler(**NO_CLIP, prediction_type="v_prediction"),
    "ddim-sample": DDIMScheduler(**NO_CLIP, prediction_type="sample"),
    "ddim-trailing": DDIMScheduler(**NO_CLIP, timestep_spacing="trailing"),
    "ddim-zero-snr": DDIMScheduler(
        **NO_CLIP,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    ),
    "cogvideo": CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    ),
    "euler": EulerDiscreteScheduler(**STABLE),
    "euler-v": EulerDiscreteScheduler(**STABLE, prediction_type="v_prediction"),
    "euler-karras": EulerDiscreteScheduler(**STABLE, use_karras_sigmas=True),
    "edm": EDMEulerScheduler(),
    "edm-v": EDMEulerScheduler(prediction_type="v_prediction"),
    "dpm-1": DPMSolverMultistepScheduler(**STABLE, solver_order=1),
    "deis-1": DEISMultistepScheduler(beta_schedule="scaled_linear", solver_order=1),
}
MULTISTEP = {
    "unipc": UniPCMultistepScheduler(**FLOW),
    "unipc-flow-epsilon": UniPCMultistepScheduler(use_flow_sigmas=True),
    "unipc-epsilon": UniPCMultistepScheduler(**STABLE),
    "dpm": DPMSolverMultistepScheduler(**STABLE),
    "dpm-flow": DPMSolverMultistepScheduler(**FLOW),
}
REFUSED = {
    "ancestral": EulerAncestralDiscreteScheduler(**STABLE),
    "ddpm": DDPMScheduler(**NO_CLIP),
    "clipping": DDIMScheduler(**STABLE, clip_sample=True, clip_sample_range=0.1),
    "lcm": LCMScheduler(**NO_CLIP),
    "flow-stochastic": FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    "sde-dpm": DPMSolverMultistepScheduler(**STABLE, algorithm_type="sde-dpmsolver++"),
    "pndm": PNDMScheduler(**STABLE, skip_prk_steps=True),
    "lms": LMSDiscreteScheduler(**STABLE),
    "sa": SASolverScheduler(**STABLE),
    "heun": HeunDiscreteScheduler(**STABLE),
    "flow-heun": FlowMatchHeunDiscreteScheduler(),
    "cogvideo-dpm": CogVideoXDPMScheduler(),
}


class Loop:
    """A pipeline's denoising loop without a pipeline; the prediction is any function of x and t."""

    def __init__(self, scheduler, steps=STEPS):
        self.scheduler = type(scheduler).from_config(scheduler.config)
        self.scheduler.set_timesteps(steps)
        self.seen = []

    def __call__(self):
        torch.manual_seed(0)
        scale = getattr(self.scheduler, "init_noise_sigma", 1.0)
        x = torch.randn(2, 3, 4, 4) * scale
        for t in self.scheduler.timesteps:
            scaled = (
                self.scheduler.scale_model_input(x, t)
                if hasattr(self.scheduler, "scale_model_input")
                else x
            )
            output = torch.tanh(scaled.roll(1, -1)) + 0.3
            previous = self.scheduler.step(output, t, x, return_dict=False)[0]
            self.seen.append((output, t, x, previous))
            x = previous


def roll(loop, sde, window):
    check_scheduler(loop.scheduler)
    tape = Tape(sde=sde, noise_level=0.7, window=window)
    with record(loop, {}, tape, lambda step, stream, shape: torch.zeros(shape)):
        loop()
    return tape


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_the_ode_step_equals_the_schedulers_own_step(name):
    loop = Loop(FIRST_ORDER[name])
    scheduler, stock = loop.scheduler, type(loop.scheduler).step
    worst = []

    def step(output, t, x, **kwargs):
        result = stock(scheduler, output, t, x, **kwargs)
        at = position_of(scheduler, t)
        assert 0 <= at.sigma_next < at.sigma <= 1
        flow, velocity = flow_coordinates(scheduler, output, x, at)
        mean = flow.float() + velocity.float() * (at.sigma_next - at.sigma)
        worst.append((mean * at.scale_next - result[0]).abs().max() / result[0].abs().max())
        return result

    scheduler.step = step
    loop()
    assert len(worst) == STEPS
    assert max(worst) < 2e-5


@pytest.mark.parametrize("name", [*FIRST_ORDER, *MULTISTEP])
@pytest.mark.parametrize("sde", list(SDE_STEPS))
def test_every_sde_step_but_the_last_is_a_gaussian_of_positive_std(name, sde):
    tape = roll(Loop({**FIRST_ORDER, **MULTISTEP}[name]), sde, range(STEPS - 1))
    assert len(tape.window_steps) == STEPS - 1
    for step in tape.window_steps:
        assert 0 < step.std < float("inf")
        assert step.mean.isfinite().all()


def test_the_ddim_step_has_the_mean_and_std_of_the_ddim_scheduler():
    """Compared with the scheduler's step with eta and the same noise, in its own scale."""
    scheduler = DDIMScheduler(**NO_CLIP)
    scheduler.set_timesteps(STEPS)
    torch.manual_seed(0)
    x, output, noise = torch.randn(3, 2, 4, 4, 4)
    t = scheduler.timesteps[2]
    at = position_of(scheduler, t)
    flow, velocity = flow_coordinates(scheduler, output, x, at)
    for eta in (0.3, 1.0):
        mean, std = SDE_STEPS["ddim"](flow, velocity, at.sigma, at.sigma_next, eta)
        ours = (mean + std * noise) * at.scale_next
        theirs = scheduler.step(output, t, x, eta=eta, variance_noise=noise).prev_sample
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_scheduler_whose_steps_cannot_be_read_is_refused(name):
    with pytest.raises(ValueError, match=r"model\.scheduler|scheduler is .*, but"):
        roll(Loop(REFUSED[name]), "cps", range(2, 4))


def test_inverted_sigmas_give_the_same_sampler():
    """Counting sigma backwards and predicting the negative velocity is the same process."""
    plain = FlowMatchEulerDiscreteScheduler()
    inverted = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    x, output = torch.randn(2, 2, 4, 4, 4)
    results = []
    for scheduler, sign in ((plain, 1), (inverted, -1)):
        scheduler.set_timesteps(STEPS)
        scheduler.step(sign * output, scheduler.timesteps[0], x)
        at = position_of(scheduler, scheduler.timesteps[0])
        flow, velocity = flow_coordinates(scheduler, sign * output, x, at)
        results.append(SDE_STEPS["flow_sde"](flow, velocity, at.sigma, at.sigma_next, 0.7))
    assert torch.allclose(results[0].mean, results[1].mean, atol=1e-6)
    assert results[0].std == pytest.approx(results[1].std)


def test_the_last_step_cannot_be_stochastic():
    with pytest.raises(ValueError, match="last step is always deterministic"):
        check_stochastic(3, SimpleNamespace(sigma=0.2, sigma_next=0.0))
