"""A sound pipeline passes every check; each seeded fault is found and named."""

import functools
import re

import pytest
import torch
from families import FAMILIES, built
from families.family import SHORT
from families.video_t5 import cosmos
from peft import LoraConfig

from flowgrpo import ConfigError, GRPOConfig, check_pipeline
from flowgrpo.algorithms import sde
from flowgrpo.core.errors import ReplayError
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.pipelines import lora_files
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.pipelines.seams import patched
from flowgrpo.policy import record, replay
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.weights import load_weights, reference
from flowgrpo.preflight.replay_check import check_replay

STEPS = {**SHORT, "num_inference_steps": 4}
SD3 = type(built("sd3"))


def check(pipe=None, **call):
    return check_pipeline(pipe or built("sd3"), **{**STEPS, **call})


def test_a_sound_pipeline_passes_with_zeros():
    report = check(guidance_scale=4.5)
    assert report.ok, report.reason
    assert report.stock_difference == report.replay_difference == report.lora_round_trip == 0
    assert report.calls_per_step == {"transformer": [1, 1, 1, 1]}
    assert report.gradient_share == 1
    assert report.gradient_error < 1e-2
    assert report.frozen_unchanged
    assert report.micro_batch_difference < 1e-4
    assert report.seconds > 0
    assert report.peak_memory > 2**20


def test_the_pipeline_is_left_as_it_was():
    pipe = built("sd3")
    pipe.transformer.pos_embed.requires_grad_(False)
    pipe.vae.train()
    flags = [p.requires_grad for m in modules_of(pipe).values() for p in m.parameters()]
    weights = [p.clone() for m in modules_of(pipe).values() for p in m.parameters()]
    assert check(pipe).ok
    assert [p.requires_grad for m in modules_of(pipe).values() for p in m.parameters()] == flags
    now = [p for m in modules_of(pipe).values() for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert pipe.vae.training
    assert not pipe.transformer.training
    assert not hasattr(pipe.transformer, "peft_config")
    for part, method in (
        (pipe, "encode_prompt"),
        (pipe.scheduler, "step"),
        (pipe.transformer, "forward"),
        (pipe.vae, "decode"),
    ):
        assert method not in vars(part)


def wrong_sign(monkeypatch):
    stock = sde.flow_sde
    monkeypatch.setitem(sde.SDE_STEPS, "flow_sde", lambda x, v, *rest: stock(x, -v, *rest))


def lost_in_replay(monkeypatch):
    stock = Policy.replay

    def replay(self, *args, **kwargs):
        with reference(self):
            stock(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "replay", replay)


def lost_in_saving(monkeypatch):
    stock = lora_files.get_peft_model_state_dict

    def half(*args, **kwargs):
        tensors = stock(*args, **kwargs)
        return {k: v for k, v in tensors.items() if ".0." in k}

    monkeypatch.setattr(lora_files, "get_peft_model_state_dict", half)


def swapped_order(monkeypatch):
    stock = Policy.replay

    def replay(self, rollout, *args, **kwargs):
        rollout.seeds.reverse()
        stock(self, rollout, *args, **kwargs)

    monkeypatch.setattr(Policy, "replay", replay)


def rounded_after_log_prob(monkeypatch):
    stock = Policy.rollout

    def rollout(self, *args, **kwargs):
        taken = stock(self, *args, **kwargs)
        for step in taken.tape.window_steps:
            step.mean = step.mean.bfloat16().float()
        return taken

    monkeypatch.setattr(Policy, "rollout", rollout)


def rebuilt_schedule(monkeypatch):
    stock = replay.position_of
    calls = []

    def drifting(scheduler, timestep):
        calls.append(timestep)
        return stock(scheduler, timestep + 1e-3 * len(calls))

    for module in (record, replay):
        monkeypatch.setattr(module, "position_of", drifting)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (wrong_sign, "away from the deterministic one"),
        (lost_in_replay, "away from its rollout"),
        (lost_in_saving, "saved LoRA"),
        (swapped_order, "starts .* away from its rollout's latents"),
        (rounded_after_log_prob, "away from its rollout"),
        (rebuilt_schedule, "the schedule must not change"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_seeded_fault_is_found(fault, reason, monkeypatch):
    fault(monkeypatch)
    report = check(guidance_scale=4.5)
    assert not report.ok
    assert re.search(reason, report.reason), report.reason


def test_a_run_starts_with_the_replay_part(monkeypatch):
    policy = Policy(built("sd3"))
    settings = GRPOConfig(sampling={"call": SHORT, "num_inference_steps": 4})
    row = Row(prompt="a cat", source="test")
    before = {name: p.clone() for name, p in policy.parameters.items()}
    calls = dict(policy.denoiser_calls)
    check_replay(policy, row, settings)
    assert all(torch.equal(before[name], p) for name, p in policy.parameters.items())
    assert policy.denoiser_calls == calls
    lost_in_replay(monkeypatch)
    with pytest.raises(ReplayError, match=r"step \d replays .* away from its rollout"):
        check_replay(policy, row, settings)


def test_audio_counts_as_well_as_video(monkeypatch):
    """A fault in the last audio step, on which no video depends, is found."""
    family = FAMILIES["ltx-2"]
    pipe = built("ltx-2")
    scheduler, calls = type(pipe.scheduler), []

    def step(self, *args, **kwargs):
        calls.append(self)
        result = scheduler_step(self, *args, **kwargs)
        return (result[0] + 1e-3 * (len(calls) == 16), *result[1:])

    scheduler_step = scheduler.step
    monkeypatch.setattr(scheduler, "step", functools.wraps(scheduler.step)(step))
    report = check_pipeline(pipe, num_inference_steps=4, **family.call)
    assert "differs from itself" in report.reason


def test_fully_trained_denoisers_are_restored():
    pipe = built("sd3")
    before = {name: p.clone() for name, p in pipe.transformer.named_parameters()}
    report = check(pipe, settings=GRPOConfig(train={"lora": None}))
    assert report.ok, report.reason
    assert all(torch.equal(before[n], p) for n, p in pipe.transformer.named_parameters())


def test_an_existing_adapter_is_refused_and_kept():
    pipe = built("sd3")
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "mine")
    settings = GRPOConfig(train={"gradient_checkpointing": True})
    assert "already has the adapters" in check(pipe, settings=settings).reason
    assert list(pipe.transformer.peft_config) == ["mine"]


def test_gradient_checkpointing_is_switched_off_again():
    pipe = built("sd3")
    assert check(pipe, settings=GRPOConfig(train={"gradient_checkpointing": True})).ok
    assert not pipe.transformer.gradient_checkpointing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_lora_to_continue_from_is_part_of_the_stock_pipeline(tmp_path, dtype):
    small = {"rank": 4, "alpha": 8}
    first = Policy(built("sd3"), TrainConfig(lora=small))
    load_weights(first, {name: p + 0.05 for name, p in first.parameters.items()})
    first.save(tmp_path)
    settings = GRPOConfig(train={"lora": {**small, "start": str(tmp_path)}})
    report = check(built("sd3", dtype), settings=settings)
    assert report.ok, report.reason
    assert report.lora_round_trip == 0


def test_a_replay_that_is_not_a_number_is_refused(monkeypatch):
    stock = sde.flow_sde
    calls = []

    def broken(*args):
        calls.append(1)
        mean, std = stock(*args)
        return sde.Gaussian(mean * float("nan") if len(calls) == 8 else mean, std)

    monkeypatch.setitem(sde.SDE_STEPS, "flow_sde", broken)
    policy = Policy(built("sd3"))
    settings = GRPOConfig(sampling={"call": SHORT, "num_inference_steps": 4})
    # 3 steps of the rollout, 4 checks of the scheduler, then the first replayed step.
    with pytest.raises(ReplayError, match="replays nan away"):
        check_replay(policy, Row(prompt="a cat", source="test"), settings)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"settings": GRPOConfig(sampling={"noise_level": 0})}, "training needs random steps"),
        ({"generator": None}, "call.generator is set, but the sampler sets it"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
    ],
    ids=["no noise", "own argument", "one step"],
)
def test_settings_that_cannot_be_trained_are_one_sentence(call, reason):
    assert reason in check(**call).reason


def test_one_sample_per_call_is_refused_before_anything_is_evaluated():
    settings = GRPOConfig(
        sampling={"call": FAMILIES["wan-vace"].call, "num_inference_steps": 4, "group_size": 2}
    )
    policy = Policy(built("wan-vace"))
    with pytest.raises(ConfigError, match=r"set sampling\.micro_batch_size to 1"):
        check_replay(policy, Row(prompt="a cat", source="test"), settings)


def test_active_dropout_is_named():
    pipe = built("sd3")
    pipe.transformer.transformer_blocks[0].attn.to_out[1] = torch.nn.Dropout(0.1)
    pipe.transformer.train()
    assert "transformer of StableDiffusion3Pipeline is in training mode" in check(pipe).reason


def test_a_denoiser_that_keeps_state_between_calls_is_refused():
    pipe = built("sd3")
    stock, calls = pipe.transformer.forward, []

    def forward(*args, **kwargs):
        calls.append(1)
        return (stock(*args, **kwargs)[0] + 1e-3 * len(calls),)

    with patched(pipe.transformer, "forward", forward):
        assert "differs from itself" in check(pipe).reason


class WithoutLoop(SD3):
    @functools.wraps(SD3.__call__)
    def __call__(self, prompt, generator, **kwargs):
        return ([torch.randn(4, 8, 8, generator=g) for g in generator],)


class OneCall(SD3):
    """Calls its denoiser once and uses that prediction in every step."""

    @functools.wraps(SD3.__call__)
    def __call__(self, *args, **kwargs):
        stock, kept = self.transformer.forward, []

        def forward(*a, **k):
            if not kept:
                kept.append(stock(*a, **k))
            return kept[0]

        with patched(self.transformer, "forward", forward):
            return super().__call__(*args, **kwargs)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (WithoutLoop, "never calls its scheduler's step"),
        (OneCall, "called in fewer than two steps"),
    ],
    ids=["no standard loop", "one call"],
)
def test_a_pipeline_without_a_standard_loop_is_refused(cls, reason):
    pipe = built("sd3")
    pipe.__class__ = cls
    assert reason in check(pipe).reason


def test_unknown_arguments_are_named():
    assert 'did you mean "guidance_scale"?' in check(guidance_scal=1).reason


def test_a_key_value_cache_between_steps_is_named():
    family = FAMILIES["qwen-image-2.1"]
    call = {**family.call, "use_kv_cache": True, "num_inference_steps": 4}
    reason = check_pipeline(built("qwen-image-2.1"), **call).reason
    assert "keeps state between steps; set use_kv_cache to false" in reason


def test_a_loop_that_steps_twice_is_named():
    call = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 0.0}
    assert "steps twice" in check_pipeline(cosmos(), **call).reason


class Experts(torch.nn.Linear):
    """Like routed experts, takes another path in evaluation mode, without gradients."""

    def forward(self, x):
        return super().forward(x) if self.training else self.fast(x)

    @torch.no_grad()
    def fast(self, x):
        return super().forward(x)


def test_gradients_flow_through_a_layer_without_gradients_in_evaluation_mode():
    pipe = built("sd3")
    out = pipe.transformer.transformer_blocks[1].attn.to_out
    stock = out[0]
    experts = Experts(stock.in_features, stock.out_features)
    experts.load_state_dict(stock.state_dict())
    out[0] = experts
    report = check(pipe, settings=GRPOConfig(train={"lora": {"targets": ["to_q", "to_k"]}}))
    assert report.ok, report.reason
    assert report.gradient_share == 1
    assert report.gradient_error < 1e-2
