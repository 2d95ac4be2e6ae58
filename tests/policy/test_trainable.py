"""Training of all weights, of an existing LoRA and of one expert; opening a pipeline."""

import json

import pytest
import torch
from families import FAMILIES, built
from families.family import SHORT

from flowgrpo import ConfigError, GRPOConfig, GRPOTrainer
from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.sections import ModelConfig
from flowgrpo.core.seeds import normal
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.pipelines.loading import open_pipeline
from flowgrpo.pipelines.lora_files import load_lora, saved_modules
from flowgrpo.pipelines.seams import patched
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.tape import Tape
from flowgrpo.policy.weights import inference_weights, reference

ROW = Row(prompt="a cat", source="test")
SEEDS = [1, 2]
LATENTS = {**SHORT, "num_inference_steps": 3, "output_type": "latent"}


def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


def run(folder, pipe=None, resume=False, objective=None, **train):
    settings = GRPOConfig(
        output_dir=str(folder),
        checkpoint_every=1,
        sampling={
            "num_inference_steps": 4,
            "group_size": 4,
            "groups_per_epoch": 2,
            "call": {**SHORT, "guidance_scale": 1.0},
        },
        objective=objective or {},
        train={"epochs": 2, "lr": 1e-3, **train},
    )
    trainer = GRPOTrainer(
        pipe or built("sd3"), redness, ["a cat", "a dog"], args=settings, resume=resume
    )
    trainer.train()
    return trainer


def latents(pipe):
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    return pipe("a cat", num_images_per_prompt=2, generator=generators, **LATENTS).images


def rollout(policy, call=LATENTS):
    def noise(step, stream, shape):
        return torch.stack([normal(shape[1:], seed, step, stream) for seed in SEEDS])

    tape = Tape(sde="flow_sde", noise_level=0.7, window=range(2))
    return policy.rollout(ROW, SEEDS, call, tape, noise)


def gradients(policy, taken):
    policy.replay(
        taken, lambda step, new: log_prob(step.next_latents, new.mean, new.std).sum().backward()
    )
    return {name: p.grad for name, p in policy.parameters.items()}


def test_all_weights_can_be_trained_and_load_in_plain_diffusers(tmp_path):
    trainer = run(tmp_path / "run", lora=None, objective={"kl_weight": 0.1})
    pipe = built("sd3")
    base = latents(pipe)
    cls = type(pipe.transformer)
    pipe.transformer = cls.from_pretrained(tmp_path / "run" / "lora" / "transformer")
    assert torch.equal(latents(pipe), torch.stack(trainer.policy.generate(ROW, SEEDS, LATENTS)))
    with reference(trainer.policy):
        assert torch.equal(torch.stack(trainer.policy.generate(ROW, SEEDS, LATENTS)), base)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert lines[1]["kl"] > 0
    assert not torch.equal(latents(pipe), base)


def test_a_run_of_all_weights_resumes_as_if_it_had_never_stopped(tmp_path):
    uninterrupted = run(tmp_path / "uninterrupted", lora=None, ema=0.9)
    run(tmp_path / "resumed", lora=None, ema=0.9, epochs=1)
    resumed = run(tmp_path / "resumed", lora=None, ema=0.9, resume=True)
    for name, parameter in uninterrupted.policy.parameters.items():
        assert torch.equal(parameter, resumed.policy.parameters[name])


def test_training_all_weights_requires_float32():
    mixed = built("wan-2.1", torch.bfloat16)
    with pytest.raises(ConfigError, match="all weights are trained in float32"):
        Policy(mixed, TrainConfig(lora=None))
    with pytest.raises(ConfigError, match="all weights are trained in float32"):
        Policy(built("sd3", torch.bfloat16), TrainConfig(lora=None))


def test_a_run_can_start_from_a_lora_which_is_then_the_reference(tmp_path):
    small = {"rank": 4, "alpha": 8}
    first = run(tmp_path / "first", lora=small)
    start = {name: p.detach().clone() for name, p in first.policy.parameters.items()}
    lora = str(tmp_path / "first" / "lora")
    second = run(tmp_path / "second", lora={**small, "start": lora}, objective={"kl_weight": 0.1})
    moved = second.policy.parameters
    assert any(not torch.equal(start[name], moved[name]) for name in start)
    pipe = built("sd3")
    pipe.load_lora_weights(lora)
    with reference(second.policy):
        samples = torch.stack(second.policy.generate(ROW, SEEDS, LATENTS))
    assert torch.equal(samples, latents(pipe))
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").open()]
    assert 0 <= lines[0]["kl"] < lines[1]["kl"]
    with pytest.raises(ConfigError, match="has rank 4 and alpha 8; set these"):
        Policy(built("sd3"), TrainConfig(lora={"rank": 8, "alpha": 8, "start": lora}))


@pytest.mark.parametrize("full", [False, True], ids=["lora", "all weights"])
def test_gradient_checkpointing_changes_neither_log_prob_nor_gradients(full):
    found = []
    for flag in (False, True):
        lora = None if full else {"rank": 4, "alpha": 8}
        policy = Policy(built("sd3"), TrainConfig(lora=lora, gradient_checkpointing=flag))
        taken = rollout(policy)
        found.append((taken.tape.window_steps[0].mean, gradients(policy, taken)))
        recomputes = policy.pipe.transformer.gradient_checkpointing
        assert recomputes is flag
    (mean, plain), (mean_again, saved) = found
    assert torch.equal(mean, mean_again)
    assert all(torch.equal(plain[name], saved[name]) for name in plain)


def test_one_of_two_experts_can_be_trained_and_each_is_saved_under_its_own_name(tmp_path):
    for modules, saved in ((["transformer_2"], ["transformer_2"]), (None, None)):
        folder = tmp_path / str(modules)
        policy = Policy(built("wan-2.2"), TrainConfig(modules=modules))
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.add_(0.05)
        with inference_weights(policy):
            policy.save(folder)
        assert saved_modules(folder) == (saved or ["transformer", "transformer_2"])
        fresh = built("wan-2.2")
        assert load_lora(fresh, folder) == saved_modules(folder)
        assert bool(getattr(fresh.transformer, "peft_config", None)) is (modules is None)
        assert fresh.transformer_2.peft_config
    with pytest.raises(ConfigError, match=r"train\.modules names unet, but the denoisers of"):
        Policy(built("wan-2.2"), TrainConfig(modules=["unet"]))


def test_the_scheduler_of_a_config_replaces_that_of_the_pipeline(tmp_path):
    built("sd-1.5").save_pretrained(tmp_path)
    path = str(tmp_path)
    other = open_pipeline(ModelConfig(path=path, scheduler="EulerDiscreteScheduler"))
    assert type(other.scheduler).__name__ == "EulerDiscreteScheduler"
    assert other.scheduler.config.beta_end == 0.012
    changed = open_pipeline(ModelConfig(path=path, scheduler_kwargs={"eta": 1, "beta_end": 0.02}))
    assert changed.scheduler.config.beta_end == 0.02
    with pytest.raises(ConfigError, match='did you mean "DDIMScheduler"'):
        open_pipeline(ModelConfig(path=path, scheduler="DDIMSheduler"))


def test_the_vae_decodes_in_float32_if_its_config_has_force_upcast(tmp_path):
    built("sd3").save_pretrained(tmp_path)
    half = open_pipeline(ModelConfig(path=str(tmp_path), dtype="bfloat16"))
    assert half.vae.config.force_upcast
    stock, seen = half.vae.decode, []

    def watched(latents, *args, **kwargs):
        seen.append((latents.dtype, half.vae.dtype))
        return stock(latents, *args, **kwargs)

    with patched(half.vae, "decode", watched):
        Policy(half).generate(ROW, [1], {**SHORT, "num_inference_steps": 2})
    assert seen == [(torch.float32, torch.float32)]
    assert half.vae.dtype == half.transformer.dtype == torch.bfloat16


def test_an_input_image_is_encoded_in_half_precision_as_in_the_stock_pipeline():
    family = FAMILIES["flux-kontext"]
    call = {**family.call, "num_inference_steps": 2}
    pipe = built("flux-kontext", torch.bfloat16)
    assert pipe.vae.config.force_upcast
    samples = Policy(pipe).generate(ROW, SEEDS, call)
    assert len(samples) == 2


def test_vae_flags_reach_the_vae(tmp_path):
    built("sd-1.5").save_pretrained(tmp_path)
    pipe = open_pipeline(ModelConfig(path=str(tmp_path), vae_slicing=True, vae_tiling=True))
    assert pipe.vae.use_slicing
    assert pipe.vae.use_tiling
