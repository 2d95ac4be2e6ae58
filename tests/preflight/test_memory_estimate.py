"""A memory estimate without weights equals what the run then holds and does, to the byte."""

import itertools
import json
import resource

import pytest
import torch
from families import FAMILIES, built
from families.family import SHORT

from flowgrpo import ConfigError, GRPOConfig, GRPOTrainer
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.preflight.activations import SavedTensors
from flowgrpo.preflight.dry_run import DryRun
from flowgrpo.preflight.inputs import read_inputs
from flowgrpo.preflight.memory import Size, estimate_memory, size_of
from flowgrpo.preflight.memory_report import describe_memory, in_units

CASES = {
    "sd3": {
        "sampling": {"group_size": 3, "micro_batch_size": 2, "window": 2},
        "objective": {"kl_weight": 0.1},
        "train": {"inner_epochs": 2, "updates_per_epoch": 2},
    },
    "flux": {"sampling": {"window": {"size": 1, "last": 1}}, "train": {"updates_per_epoch": 1}},
    "wan-2.1": {"sampling": {"micro_batch_size": 1, "window": 1}},
    "sd-1.5": {"sampling": {"sde": "ddim"}, "objective": {"kl_weight": 0.1}},
    "wan-2.2": {
        "sampling": {"window": 1},
        "objective": {"kl_weight": 0.1},
        "train": {"inner_epochs": 2},
    },
}
"""Guided if the family supports it. Together they cover a group that micro-batches do not divide
evenly, KL, several inner epochs, windows that start anywhere, and two denoisers."""


def all_different():
    count = itertools.count()
    return lambda images, prompts, **columns: [float(next(count)) for _ in images]


def saved(name, folder):
    built(name).save_pretrained(folder / "model")
    return str(folder / "model")


def settings(name, folder, **changes):
    call = {**FAMILIES[name].call, **(FAMILIES[name].guided or {})}
    sampling = {
        "num_inference_steps": 4,
        "group_size": 2,
        "groups_per_epoch": 4,
        "call": call,
        **changes.pop("sampling", {}),
    }
    train = {"epochs": 1, "lora": {"rank": 4, "alpha": 8}, "ema": 0.9, **changes.pop("train", {})}
    model = {"path": saved(name, folder), "device": "cpu", **changes.pop("model", {})}
    return GRPOConfig(
        output_dir=str(folder / "run"), model=model, sampling=sampling, train=train, **changes
    )


def planned(config, processes=1):
    inputs = read_inputs(config, reward_funcs=all_different(), train_dataset=["a fox", "an owl"])
    return estimate_memory(config, inputs.plan, processes)


def trainer(config):
    return GRPOTrainer(reward_funcs=all_different(), train_dataset=["a fox", "an owl"], args=config)


def tensors_in(value):
    """Every tensor that can be reached from an object."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = getattr(value, "__dict__", value)
    inner = list(inner.values()) if isinstance(inner, dict) else inner
    return [t for v in inner for t in tensors_in(v)] if isinstance(inner, (list, tuple)) else []


def saved_by_autograd(policy, rollout):
    """Bytes of the storages, except weights, that autograd saves in a replay's largest step."""
    weights = {
        t.untyped_storage().data_ptr()
        for module in modules_of(policy.pipe).values()
        for t in itertools.chain(module.parameters(), module.buffers())
    }
    saved, steps = {}, []

    def save(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def on_step(step, now):
        steps.append(sum(t.untyped_storage().nbytes() for t in saved.values()))
        saved.clear()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        policy.replay(rollout, on_step)
    return max(steps)


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_without_weights_equals_what_the_run_holds_and_does(name, tmp_path):
    config = settings(name, tmp_path, **CASES[name])
    plan = planned(config)
    assert plan.missing == {}
    run = trainer(config)
    in_adapters = {id(p) for p in run.policy.parameters.values()}
    for part, module in modules_of(run.policy.pipe).items():
        assert plan.parts[part] == size_of(
            p for p in module.parameters() if id(p) not in in_adapters
        )
    assert plan.trained == size_of(run.policy.parameters.values())
    run.train()
    assert plan.gradients == plan.trained.bytes
    state = [t for values in run.learner.optimizer.state.values() for t in values.values()]
    assert plan.optimizer == size_of(state).bytes
    assert plan.average == size_of(run.learner.average.values()).bytes
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["tied_groups"] == 0
    assert plan.forwards(0) == line["denoiser_forwards"]
    assert plan.backwards(0) == line["denoiser_backwards"]
    steps = {int(values["step"]) for values in run.learner.optimizer.state.values()}
    assert steps <= {plan.plan.optimizer_steps}

    samples = run.sample(run.plan.groups(0))
    rollouts = [rollout for sampled in samples for rollout in sampled.rollouts]
    assert plan.tape_bytes(0) == size_of(tensors_in([r.tape for r in rollouts])).bytes
    assert plan.max_tape_bytes() >= plan.tape_bytes(0)
    largest = max(len(rollout.seeds) for rollout in rollouts)
    measured = [saved_by_autograd(run.policy, r) for r in rollouts if len(r.seeds) == largest]
    everywhere = DryRun(run.policy, run.plan).activations()
    assert (plan.activations, plan.activations_checkpointed) == everywhere
    assert plan.activations == max(measured)


def test_separated_blocks_save_what_real_gradient_checkpointing_saves(tmp_path):
    run = trainer(settings("sd3", tmp_path))
    taken = run.sample(run.plan.groups(0)[:1])[0].rollouts[0]
    saved, found = SavedTensors(run.policy.pipe), []
    with saved.separating_blocks(run.policy.denoisers) as has_blocks, saved.counting():
        run.policy.replay(
            taken,
            lambda *_: (
                found.append((saved.checkpointed_bytes, saved.largest_block)),
                saved.clear(),
            ),
        )
    assert has_blocks
    run.policy.pipe.transformer.enable_gradient_checkpointing()
    assert max(total - block for total, block in found) == saved_by_autograd(run.policy, taken)
    assert all(block > 0 for _, block in found)


@pytest.mark.parametrize("name", ["wan-2.1", "sd3"])
def test_parts_that_stay_in_float32_are_counted_in_float32(name, tmp_path):
    config = settings(name, tmp_path, model={"dtype": "bfloat16"})
    plan, run = planned(config), trainer(config)
    adapters = {id(p) for p in run.policy.parameters.values()}
    sizes = {
        part: size_of(p for p in module.parameters() if id(p) not in adapters)
        for part, module in modules_of(run.policy.pipe).items()
    }
    assert plan.parts == sizes
    halves = [2 * size.parameters == size.bytes for size in sizes.values()]
    assert all(halves) is (name == "sd3")


def test_full_weights_and_a_continued_adapter_need_a_copy_as_the_reference(tmp_path):
    config = settings("sd3", tmp_path, train={"lora": None})
    plan, run = planned(config), trainer(config)
    assert plan.trained == plan.parts["transformer"] == size_of(run.policy.parameters.values())
    assert plan.reference == plan.trained.bytes == size_of(run.policy.start_weights.values()).bytes
    assert "adapter" not in describe_memory(plan)

    lora = settings("sd3", tmp_path)
    assert planned(lora).reference == 0
    trainer(lora).policy.save(tmp_path / "lora")
    train = {"lora": {"rank": 4, "alpha": 8, "start": str(tmp_path / "lora")}}
    again = planned(settings("sd3", tmp_path, train=train))
    assert again.trained == planned(lora).trained
    assert again.reference == again.trained.bytes


def test_processes_divide_groups_always_and_weights_if_sharded(tmp_path):
    single = planned(settings("sd3", tmp_path))
    replicated = planned(settings("sd3", tmp_path), processes=2)
    sharded = planned(settings("sd3", tmp_path, train={"shard": True}), processes=2)
    assert replicated.groups_per_process == sharded.groups_per_process == 2
    assert 2 * replicated.max_tape_bytes() == single.max_tape_bytes()
    assert single.total() - replicated.total() == replicated.max_tape_bytes()
    weights = [sharded.parts["transformer"].bytes, sharded.trained.bytes]
    divided = [*weights, sharded.gradients, sharded.optimizer, sharded.average]
    assert replicated.total() - sharded.total() == sum(count // 2 for count in divided)
    assert sharded.forwards() == single.forwards()


def test_moments_in_eight_bits_are_an_estimate(tmp_path):
    plan = planned(settings("sd3", tmp_path, train={"optimizer": "adamw_8bit"}))
    assert plan.optimizer == 2 * plan.trained.parameters
    assert "estimate" in describe_memory(plan)["optimizer state"]


def test_tapes_on_the_cpu_are_not_in_the_sum_of_the_device(tmp_path):
    here = planned(settings("sd3", tmp_path))
    there = planned(settings("sd3", tmp_path, sampling={"tape_on_cpu": True}))
    assert here.total() - there.total() == here.max_tape_bytes()
    assert "on the CPU" in describe_memory(there)["tapes per epoch"]


def test_a_missing_model_leaves_a_line_with_the_reason(tmp_path, monkeypatch):
    config = settings("sd3", tmp_path, model={"path": str(tmp_path / "no"), "device": "cpu"})
    plan = planned(config)
    assert plan.parts == {}
    assert plan.total() is plan.forwards() is plan.max_tape_bytes() is None
    assert describe_memory(plan) == {"model": f"not predicted ({plan.missing['model']})"}
    assert str(tmp_path / "no") in plan.missing["model"]


def test_an_argument_that_the_pipeline_does_not_take_is_refused_without_weights(tmp_path):
    config = settings("sd3", tmp_path, sampling={"call": {**SHORT, "guidance_scal": 2}})
    with pytest.raises(ConfigError, match='did you mean "guidance_scale"'):
        planned(config)


def test_twelve_billion_parameters_need_neither_files_nor_memory(tmp_path):
    folder = tmp_path / "model"
    config = settings("flux", tmp_path, model={"dtype": "bfloat16"})
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    path = folder / "transformer" / "config.json"
    real = {"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128}
    real |= {"num_attention_heads": 24, "axes_dims_rope": [16, 56, 56]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **real}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = planned(config)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert plan.parts["transformer"].parameters > 11.8e9
    assert plan.activations > 20 * plan.activations_checkpointed / 10 > 0
    assert grown < 2**20


def test_bytes_are_shown_in_the_largest_fitting_unit():
    assert [in_units(n) for n in (12, 3 * 2**9, 2**20, 5 * 2**29)] == [
        "12 bytes",
        "1.50 KiB",
        "1.00 MiB",
        "2.50 GiB",
    ]
    weight = torch.zeros(3, dtype=torch.bfloat16)
    assert size_of([weight, weight]) == Size(tensors=1, parameters=3, bytes=6)
