"""Updates: exact gradients, ratios of 1, an untouched base model, and what is replayed."""

import gc
import hashlib

import pytest
import torch
from families import built
from families.family import SHORT
from tiny_run import metrics, move_weights_after_sampling, redness, trainer

from flowgrpo import ConfigError
from flowgrpo.core.errors import ReplayError
from flowgrpo.data.row import Row
from flowgrpo.pipelines import batching
from flowgrpo.pipelines.call import Batching
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.weights import reference
from flowgrpo.training.metrics import MetricSums


def hashes(pipe):
    return {
        f"{name}.{key}": hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, module in modules_of(pipe).items()
        for key, tensor in module.state_dict().items()
        if "lora_" not in key
    }


def gradients(folder, **sampling):
    run = trainer(
        folder, sampling={"group_size": 8, "window": 3, "groups_per_epoch": 2, **sampling}
    )
    samples = run.sample(run.plan.groups(0))
    advantages = [torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
    run.learner.accumulate(
        [(group.rollouts, a) for group, a in zip(samples, advantages, strict=True)],
        2 * 8 * 3,
        MetricSums(),
    )
    return {name: p.grad.clone() for name, p in run.policy.parameters.items()}


def test_micro_batches_of_any_size_give_the_same_gradients(tmp_path):
    whole = gradients(tmp_path / "8", micro_batch_size=8)
    scale = max(g.abs().max() for g in whole.values())
    assert scale > 1e-5
    for size in (1, 3):
        split = gradients(tmp_path / str(size), micro_batch_size=size)
        for name, gradient in whole.items():
            assert torch.allclose(split[name], gradient, atol=1e-3 * scale), name


def test_before_the_first_update_every_ratio_is_exactly_one(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 1, "updates_per_epoch": 1, "lr": 1e-2})
    run.train()
    (line,) = metrics(tmp_path / "run")
    assert line["ratio_deviation"] == 0
    assert line["clip_fraction_low"] == line["clip_fraction_high"] == 0


def test_after_an_update_ratios_move(tmp_path):
    trainer(tmp_path / "run", train={"updates_per_epoch": 2, "inner_epochs": 2}).train()
    assert all(line["ratio_deviation"] > 0 for line in metrics(tmp_path / "run"))


def test_a_step_at_a_small_rate_changes_every_lora_b(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 1, "lr": 1e-5})
    before = {name: p.detach().clone() for name, p in run.policy.parameters.items()}
    run.train()
    for name, parameter in run.policy.parameters.items():
        assert parameter.dtype == torch.float32
        if "lora_B" in name:
            assert not torch.equal(parameter, before[name]), name


def test_the_base_model_is_untouched_after_three_epochs_with_kl(tmp_path):
    pipe = built("sd3")
    run = trainer(tmp_path / "run", pipe=pipe, objective={"kl_weight": 0.1}, train={"epochs": 3})
    frozen = hashes(pipe)
    flags = {k: p.requires_grad for k, p in pipe.transformer.named_parameters()}
    run.train()
    assert hashes(pipe) == frozen
    assert {k: p.requires_grad for k, p in pipe.transformer.named_parameters()} == flags


def test_the_reference_is_the_base_model_and_kl_starts_at_zero(tmp_path):
    run = trainer(
        tmp_path / "run", objective={"kl_weight": 0.1}, train={"epochs": 1, "updates_per_epoch": 1}
    )
    run.train()
    assert metrics(tmp_path / "run")[0]["kl"] == 0
    call = {**SHORT, "num_inference_steps": 3, "output_type": "latent"}
    row = Row(prompt="a cat", source="test")
    with reference(run.policy):
        latents = torch.stack(run.policy.generate(row, [1, 2], call))
    base = torch.stack(Policy(built("sd3")).generate(row, [1, 2], call))
    assert torch.equal(latents, base)
    assert not torch.equal(latents, torch.stack(run.policy.generate(row, [1, 2], call)))


def test_without_kl_weight_no_reference_forward_is_made(tmp_path):
    counts = {}
    for weight in (0.0, 0.1):
        run = trainer(tmp_path / str(weight), objective={"kl_weight": weight}, train={"epochs": 1})
        run.train()
        counts[weight] = run.state.denoiser_calls["denoiser_forwards"]
        assert ("kl" in metrics(tmp_path / str(weight))[0]) == (weight > 0)
    # 4 groups x (5 sampled + 2 replayed) steps; the reference replays 2 more.
    assert counts == {0.0: 28, 0.1: 36}


def test_tied_groups_are_counted_and_not_replayed(tmp_path):
    def constant_for_dogs(images, prompts, **columns):
        return [0.5 if p == "a dog" else r for p, r in zip(prompts, redness(images, prompts))]  # noqa: B905

    run = trainer(
        tmp_path / "run",
        reward=constant_for_dogs,
        sampling={"groups_per_epoch": 5},
        train={"epochs": 1, "updates_per_epoch": 1},
    )
    run.train()
    (line,) = metrics(tmp_path / "run")
    assert line["tied_groups"] == pytest.approx(0.2)
    assert line["denoiser_backwards"] == 4 * 2


def test_training_raises_a_reward_that_can_be_raised(tmp_path):
    run = trainer(
        tmp_path / "run",
        sampling={"group_size": 8, "noise_level": 1.0, "window": "all"},
        objective={"clip_range": 1e-2},
        train={"epochs": 12, "lr": 3e-2},
        evaluation={"seeds": 4},
    )
    summary = run.train()
    low, _ = summary["scores"]["train_prompts"]["redness"]["gain_95"]
    assert low > 0.01
    assert summary["tuned"]["test_prompts"] > summary["base"]["test_prompts"]


def test_with_kl_tied_groups_are_pulled_back_too(tmp_path):
    def tied(images, prompts, **columns):
        sizes = {image.size for image in images}
        return [0.0 if len(images) == 3 else 1.0 for _ in images] if sizes else []

    run = trainer(tmp_path / "run", reward=tied, objective={"kl_weight": 1.0}, train={"epochs": 1})
    with torch.no_grad():
        for parameter in run.policy.parameters.values():
            parameter.add_(0.05)
    run.train()
    (line,) = metrics(tmp_path / "run")
    assert line["tied_groups"] == 1
    assert line["kl"] > 0
    assert line["grad_norm"] > 0


def test_latents_that_are_not_finite_stop_the_run(tmp_path):
    run = trainer(tmp_path / "run")
    with torch.no_grad():
        next(iter(run.policy.parameters.values())).fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"latents of prompt .* are not finite; lower train.lr"):
        run.sample(run.plan.groups(0))


def test_a_gradient_that_is_not_finite_stops_before_the_weights_move(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 1})
    before = {name: p.detach().clone() for name, p in run.policy.parameters.items()}
    next(iter(run.policy.parameters.values())).register_hook(lambda g: g * float("nan"))
    with pytest.raises(RuntimeError, match="the gradient of an update is nan, but must be finite"):
        run.train()
    assert all(torch.equal(p, before[name]) for name, p in run.policy.parameters.items())


def test_the_number_of_optimizer_steps_is_the_plans(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 3, "updates_per_epoch": 4, "inner_epochs": 2})
    run.train()
    steps = {int(state["step"]) for state in run.learner.optimizer.state.values()}
    assert steps == {run.plan.optimizer_steps} == {12}


def test_a_replay_that_drifts_stops_the_run(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 1})
    move_weights_after_sampling(run)
    with pytest.raises(
        ReplayError, match=r"step \d replays .* away from its rollout before any update"
    ):
        run.train()


def test_training_without_noise_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="training needs random steps"):
        trainer(tmp_path / "run", sampling={"noise_level": 0.0})


def test_epochs_leave_no_tensors_behind(tmp_path):
    def session():
        gc.collect()
        found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return len(found), sum(tensor.numel() for tensor in found)

    run = trainer(tmp_path / "run", objective={"kl_weight": 0.01}, train={"epochs": 5, "ema": 0.9})
    counts = {}
    run._evaluate_if_due = lambda: counts.update({run.state.epoch: session()})  # after each epoch
    run.train()
    assert counts[5] == counts[2]


def test_a_run_finds_out_once_how_its_pipeline_makes_several_samples(tmp_path, monkeypatch):
    """The replay check, two epochs, and the evaluations before and after use the same answer."""
    found, stock = [], batching._resolve

    def resolve(pipe, row, call):
        found.append(stock(pipe, row, call))
        return found[-1]

    monkeypatch.setattr(batching, "_resolve", resolve)
    trainer(tmp_path / "run").train()
    assert found == [Batching(by_count=True)]
