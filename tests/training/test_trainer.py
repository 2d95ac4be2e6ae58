"""A run on a tiny pipeline: exact gradients, an untouched base model, resumes, honest files."""

import gc
import hashlib
import json
import shutil
import sys
import time

import pytest
import torch
from families import built
from families.family import SHORT

from flowgrpo import ConfigError, GRPOConfig, GRPOTrainer
from flowgrpo.core.errors import ReplayError, RewardError
from flowgrpo.data.prompts import Row, evenly_spaced
from flowgrpo.evaluation.statistics import paired_bootstrap
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.weights import reference
from flowgrpo.runs import checkpoint
from flowgrpo.training.metrics import MetricSums
from rewards import reward

PROMPTS = ["a cat", "a dog", "a hen", "a cow", "a pig"]


def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


def settings(folder, **changes):
    sampling = {
        "num_inference_steps": 5,
        "group_size": 4,
        "groups_per_epoch": 4,
        "window": 2,
        "call": {**SHORT, "guidance_scale": 1.5},
        **changes.pop("sampling", {}),
    }
    train = {"epochs": 2, "lr": 1e-2, "lora": {"rank": 4, "alpha": 8}, **changes.pop("train", {})}
    return GRPOConfig(
        output_dir=str(folder), checkpoint_every=1, sampling=sampling, train=train, **changes
    )


def trainer(folder, *, pipe=None, reward=redness, resume=False, test=("a fox",), **changes):
    args = settings(folder, **changes)
    return GRPOTrainer(pipe or built("sd3"), reward, PROMPTS, list(test), args=args, resume=resume)


def metrics(folder, without=("seconds",)):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in without} for line in lines]


def hashes(pipe):
    return {
        f"{name}.{key}": hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, module in modules_of(pipe).items()
        for key, tensor in module.state_dict().items()
        if "lora_" not in key
    }


def optimizer_state(run):
    return {
        f"{name}.{key}": value
        for name, parameter in run.policy.parameters.items()
        for key, value in run.learner.optimizer.state[parameter].items()
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


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    options = {
        "objective": {"kl_weight": 0.01},
        "train": {"epochs": 4, "ema": 0.9},
        "sampling": {"window": {"size": 2}},
    }
    straight = trainer(tmp_path / "straight", **options)
    straight.train()

    class Killed(BaseException):
        pass

    calls = []

    def killing(images, prompts, **columns):
        calls.append(1)
        if len(calls) == 18:  # in the middle of epoch 3
            raise Killed
        return redness(images, prompts)

    killing.__name__ = "redness"
    with pytest.raises(Killed):
        trainer(tmp_path / "resumed", reward=killing, **options).train()
    resumed = trainer(tmp_path / "resumed", resume=True, **options)
    assert 0 < resumed.state.epoch < 4
    resumed.train()

    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")
    for name, parameter in straight.policy.parameters.items():
        assert torch.equal(parameter, resumed.policy.parameters[name]), name
        assert torch.equal(straight.learner.average[name], resumed.learner.average[name])
    assert optimizer_state(straight).keys() == optimizer_state(resumed).keys()
    for name, value in optimizer_state(straight).items():
        assert torch.equal(value, optimizer_state(resumed)[name]), name


def test_a_damaged_newest_checkpoint_is_skipped_with_a_message(tmp_path, capsys):
    trainer(tmp_path / "run").train()
    state = tmp_path / "run" / "checkpoints" / "epoch-0002" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    resumed = trainer(tmp_path / "run", resume=True)
    assert resumed.state.epoch == 1
    assert "epoch-0002 is damaged" in capsys.readouterr().err


def test_evaluation_shows_the_average_and_leaves_training_alone(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 3, "ema": 0.5}, evaluation={"every": 1})
    plain = trainer(tmp_path / "plain", train={"epochs": 3})
    state = torch.get_rng_state()
    run.train()
    assert torch.equal(torch.get_rng_state(), state)
    plain.train()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert sorted(run.folder.evaluations()) == [0, 1, 2, 3]
    for name, parameter in run.policy.parameters.items():
        assert torch.equal(parameter, run.learner.average[name])
    live = plain.policy.parameters
    assert any(not torch.equal(live[n], p) for n, p in run.policy.parameters.items())


def test_a_part_of_a_prompt_file_is_taken_from_all_over_it():
    assert evenly_spaced(list("abcdefg"), 3) == ["a", "c", "e"]
    assert evenly_spaced(list("abc"), 3) == evenly_spaced(list("abc"), None) == list("abc")


def test_evaluation_does_not_depend_on_the_other_prompts(tmp_path):
    both = trainer(tmp_path / "a", test=["a fox", "an owl"], train={"epochs": 0}).train()
    one = trainer(tmp_path / "b", test=["an owl"], train={"epochs": 0}).train()
    fox = trainer(tmp_path / "c", test=["a fox"], train={"epochs": 0}).train()
    mean = (one["base"]["test_prompts"] + fox["base"]["test_prompts"]) / 2
    assert both["base"]["test_prompts"] == pytest.approx(mean, abs=1e-12)


def test_a_run_folder_holds_what_it_promises(tmp_path):
    summary = trainer(tmp_path / "run").train()
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "curves.png", "compare.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0, name
    for name in ("samples", "eval", "checkpoints", "lora"):
        assert list((tmp_path / "run" / name).iterdir()), name
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    needed = {
        "reward",
        "base",
        "tuned",
        "seconds",
        "images",
        "denoiser_forwards",
        "denoiser_backwards",
    }
    assert needed <= written.keys()
    assert written["base"].keys() == {"train_prompts", "test_prompts"}
    assert written["images"] == 32 == summary["images"]


def test_a_folder_that_holds_another_run_is_refused(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 0}).train()
    with pytest.raises(ConfigError, match="holds another run"):
        trainer(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run to resume"):
        trainer(tmp_path / "new", resume=True)


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(tmp_path):
    def meeting(images, prompts, **columns):
        if second:
            with pytest.raises(ConfigError, match="another process is training there"):
                second.pop().train()
        return redness(images, prompts)

    second = []
    first = trainer(tmp_path / "run", reward=meeting, train={"epochs": 1})
    second.append(trainer(tmp_path / "run", train={"epochs": 1}))
    first.train()
    assert not second
    assert trainer(tmp_path / "run", reward=meeting, resume=True, train={"epochs": 1}).train()


def test_a_folder_with_checkpoints_but_no_evaluation_holds_a_run(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    shutil.rmtree(tmp_path / "run" / "eval")
    with pytest.raises(ConfigError, match="holds another run"):
        trainer(tmp_path / "run", train={"epochs": 1})
    assert trainer(tmp_path / "run", resume=True, train={"epochs": 1}).train()["epochs"] == 1


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_an_output_folder_that_cannot_be_is_refused_before_the_model_loads(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir is .*file"):
        GRPOTrainer("no/model", redness, PROMPTS, args=settings(tmp_path / place))


def test_a_reward_that_leaves_the_process_is_named(tmp_path):
    def leaving(images, prompts, **columns):
        sys.exit(0)

    with pytest.raises(RewardError, match=r'leaving failed on prompt "a cat" \(SystemExit'):
        trainer(tmp_path / "run", reward=leaving).train()


@pytest.mark.parametrize("name", ["inputs.json", "config.yaml"])
def test_a_resume_misses_the_files_that_say_what_the_run_is(tmp_path, name):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    (tmp_path / "run" / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name} cannot be read .* identifies the run to resume"):
        trainer(tmp_path / "run", resume=True, train={"epochs": 2})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda n: [0.5] * (n - 1), "returned 3 rewards for 4 images"),
        (lambda n: [0.5] * (n - 1) + [float("nan")], "1 of 4 rewards are not finite"),
        (lambda n: [None] * n, "4 of 4 rewards are not finite"),
        (lambda n: None, "returned a NoneType"),
        (lambda n: "0123", "returned a str"),
        (lambda n: dict.fromkeys(range(n), 1.0), "returned a dict"),
        (lambda n: [1e300] * n, "4 of 4 rewards are not finite"),
    ],
)
def test_a_reward_that_misbehaves_stops_the_run_by_name(tmp_path, values, message):
    def broken(images, prompts, **columns):
        return values(len(images))

    run = trainer(tmp_path / "run", reward=broken, train={"epochs": 1})
    with pytest.raises(RewardError, match=message):
        run.sample(run.plan.groups(0))


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_tensors_and_arrays_are_scores(tmp_path, shape):
    def of_tensor(images, prompts, **columns):
        return torch.tensor(redness(images, prompts)).reshape(shape)

    run = trainer(tmp_path / "run", reward=of_tensor)
    plain = trainer(tmp_path / "plain")
    (a,), (b,) = run.sample(run.plan.groups(0)[:1]), plain.sample(plain.plan.groups(0)[:1])
    assert torch.allclose(a.rewards["of_tensor"], b.rewards["redness"], atol=1e-6)


def test_a_reward_that_raises_is_named_with_its_place(tmp_path):
    def broken(images, prompts, **columns):
        return [1 / 0 for _ in images]

    with pytest.raises(RewardError, match=r'broken failed on prompt "a cat" \(ZeroDivisionError'):
        trainer(tmp_path / "run", reward=broken).train()


def test_a_reward_that_does_not_look_at_the_image_is_refused(tmp_path):
    def constant(images, prompts, **columns):
        return [0.5] * len(images)

    with pytest.raises(
        RewardError, match=r"constant is 0.5 for a black, a white and a noise image"
    ):
        trainer(tmp_path / "run", reward=constant).train()


def test_a_resume_with_another_setting_names_it(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    with pytest.raises(ConfigError, match=r"train.lr was 0.01 and is 0.02"):
        trainer(tmp_path / "run", resume=True, train={"epochs": 2, "lr": 2e-2})
    more = trainer(tmp_path / "run", resume=True, train={"epochs": 2})
    assert more.state.epoch == 1


def test_a_resume_before_the_first_checkpoint_refuses_other_settings_too(tmp_path):
    run = trainer(tmp_path / "run")
    run.folder.begin(run.config, run.inputs.fingerprint, 0)
    run.evaluate(0)
    with pytest.raises(ConfigError, match="seed was 0 and is 9"):
        trainer(tmp_path / "run", resume=True, seed=9)
    assert trainer(tmp_path / "run", resume=True).state.epoch == 0


def test_a_resume_with_other_prompts_or_rewards_is_refused(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    with pytest.raises(ConfigError, match="test_prompts was"):
        trainer(tmp_path / "run", resume=True, test=["an owl"], train={"epochs": 2})

    def other(images, prompts, **columns):
        return redness(images, prompts)

    with pytest.raises(ConfigError, match=r"rewards.other was None"):
        trainer(tmp_path / "run", resume=True, reward=other, train={"epochs": 2})


def test_a_run_that_failed_before_its_first_evaluation_does_not_block_the_folder(tmp_path):
    def broken(images, prompts, **columns):
        return [0.5]

    with pytest.raises(RewardError):
        trainer(tmp_path / "run", reward=broken).train()
    trainer(tmp_path / "run", train={"epochs": 0}).train()


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


def test_a_reward_that_draws_on_its_images_spoils_nothing(tmp_path):
    def painting(images, prompts, **columns):
        scores = redness(images, prompts)
        for image in images:
            image.paste("black", (0, 0, 16, 16))
        return scores

    args = settings(tmp_path / "run", train={"epochs": 0})
    run = GRPOTrainer(built("sd3"), [painting, redness], PROMPTS, args=args)
    scores = run.train()["scores"]["train_prompts"]
    assert scores["painting"]["base"] == scores["redness"]["base"] > 0


def test_a_gradient_that_is_not_finite_stops_before_the_weights_move(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 1})
    before = {name: p.detach().clone() for name, p in run.policy.parameters.items()}
    next(iter(run.policy.parameters.values())).register_hook(lambda g: g * float("nan"))
    with pytest.raises(RuntimeError, match="the gradient of an update is nan, which is not finite"):
        run.train()
    assert all(torch.equal(p, before[name]) for name, p in run.policy.parameters.items())


def test_a_metrics_file_that_a_kill_cut_short_is_read_up_to_there(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "rew')
    trainer(tmp_path / "run", resume=True, train={"epochs": 2}).train()
    assert [line["epoch"] for line in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("section", ["sampling", "evaluation"])
def test_an_argument_that_the_pipeline_does_not_take_is_refused(tmp_path, section):
    with pytest.raises(
        ConfigError, match=f'{section}.call.guidance_scal is no .*mean "guidance_scale"'
    ):
        trainer(tmp_path / "run", **{section: {"call": {"guidance_scal": 2}}})


def test_rewards_with_weights_are_logged_apart_and_trained_together(tmp_path):
    def darkness(images, prompts, **columns):
        return [1 - r for r in redness(images, prompts)]

    args = settings(tmp_path / "run", train={"epochs": 1})
    GRPOTrainer(
        built("sd3"), [redness, darkness], PROMPTS, reward_weights=[2.0, 1.0], args=args
    ).train()
    (line,) = metrics(tmp_path / "run")
    red, dark = (line["rewards"][name]["mean"] for name in ("redness", "darkness"))
    assert red + dark == pytest.approx(1)
    assert line["total"]["mean"] == pytest.approx(2 * red + dark)


def test_two_rewards_of_one_name_are_refused_also_across_the_lists(tmp_path):
    with pytest.raises(ConfigError, match='two rewards are called "redness"'):
        GRPOTrainer(
            built("sd3"), redness, PROMPTS, held_out_funcs=redness, args=settings(tmp_path / "run")
        )


def test_a_pipeline_that_has_an_adapter_is_refused(tmp_path):
    pipe = built("sd3")
    trainer(tmp_path / "a", pipe=pipe)
    with pytest.raises(ValueError, match="already has the adapters"):
        trainer(tmp_path / "b", pipe=pipe)


def test_the_number_of_optimizer_steps_is_the_plans(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 3, "updates_per_epoch": 4, "inner_epochs": 2})
    run.train()
    steps = {int(state["step"]) for state in run.learner.optimizer.state.values()}
    assert steps == {run.plan.optimizer_steps} == {12}


def test_paths_given_as_arguments_are_in_the_run_folders_config(tmp_path):
    built("sd3").save_pretrained(tmp_path / "model")
    args = settings(tmp_path / "run", train={"epochs": 0})
    run = GRPOTrainer(str(tmp_path / "model"), redness, PROMPTS, args=args)
    run.train()
    assert f"path: {tmp_path}/model" in (tmp_path / "run" / "config.yaml").read_text()


def test_scores_join_their_images_when_scoring_is_slow_and_overlaps(tmp_path):
    @reward(overlap=True)
    def slow(images, prompts, **columns):
        time.sleep(0.02)
        return redness(images, prompts)

    fast = trainer(tmp_path / "a", sampling={"micro_batch_size": 3})
    late = trainer(tmp_path / "b", reward=slow, sampling={"micro_batch_size": 3})
    for a, b in zip(
        fast.sample(fast.plan.groups(0)), late.sample(late.plan.groups(0)), strict=True
    ):
        assert torch.equal(a.rewards["redness"], b.rewards["slow"])


def test_columns_reach_the_reward_as_lists(tmp_path):
    seen = []

    def watching(images, prompts, target, **columns):
        seen.append((prompts, target, sorted(columns)))
        return redness(images, prompts)

    data = [{"prompt": "a cat", "target": "CAT", "level": 3}]
    GRPOTrainer(
        built("sd3"), watching, data, args=settings(tmp_path / "run", train={"epochs": 0})
    ).train()
    assert seen[-1] == (["a cat"], ["CAT"], ["level"])


def test_a_missing_column_is_refused_before_the_model_loads(tmp_path):
    def needs_target(images, prompts, target, **columns):
        raise AssertionError

    with pytest.raises(ConfigError, match='dataset row 1 has no column "target"'):
        GRPOTrainer(
            "no/such/model",
            needs_target,
            [{"prompt": "a", "target": "A"}, {"prompt": "b"}],
            args=settings(tmp_path / "run"),
        )


def test_a_replay_that_drifts_stops_the_run(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 1})
    sample = run.sample

    def disturbed(*arguments):
        samples = sample(*arguments)
        with torch.no_grad():
            for parameter in run.policy.parameters.values():
                parameter.add_(0.3)
        return samples

    run.sample = disturbed
    with pytest.raises(
        ReplayError, match=r"step \d replays .* away from its rollout before any update"
    ):
        run.train()


@pytest.mark.parametrize("change", [{"noise_level": 0.0}, {"sde": "ode"}])
def test_training_without_noise_is_refused(tmp_path, change):
    with pytest.raises(ConfigError, match="training needs random steps"):
        trainer(tmp_path / "run", sampling=change)


def test_the_bootstrap_interval_covers_a_known_gain():
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(200, 2, generator=generator, dtype=torch.float64)
    gain = 0.1 + 0.05 * torch.randn(200, 1, generator=generator, dtype=torch.float64)
    low, high = paired_bootstrap(base, base + gain)
    assert low < 0.1 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / 200**0.5, rel=0.2)


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


def test_the_newest_checkpoints_and_the_best_evaluated_one_are_kept(tmp_path):
    run = trainer(
        tmp_path / "run",
        train={"epochs": 5, "lr": 3e-2},
        evaluation={"every": 1},
        checkpoint_keep=2,
    )
    run.train()
    scores = run.folder.headlines("redness", range(1, 6))
    best = max((1, 2, 3, 4, 5), key=lambda epoch: scores[epoch])
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"epoch-{epoch:04d}" for epoch in {best, 4, 5}}


@pytest.mark.parametrize(
    ("scores", "saved", "best"),
    [
        ({0: 0.9, 1: 0.2, 2: 0.5}, {1, 2, 3}, 2),
        ({0: 0.9}, {1, 2}, None),
        ({4: 0.5, 2: 0.5}, {2, 4}, 4),
    ],
)
def test_the_best_checkpoint_is_among_those_that_were_saved_and_evaluated(scores, saved, best):
    assert checkpoint.best_epoch(scores, saved) == best


def test_rotation_spares_the_best_however_old(tmp_path):
    for epoch in (1, 2, 3, 10000):
        (tmp_path / f"epoch-{epoch:04d}").mkdir()
    checkpoint.rotate(tmp_path, 2, best=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch-0001", "epoch-0003", "epoch-10000"]


def test_a_damaged_checkpoint_is_put_aside_and_evicts_no_new_one(tmp_path):
    options = {"train": {"epochs": 2}, "checkpoint_keep": 1}
    trainer(tmp_path / "run", **options).train()
    folder = tmp_path / "run" / "checkpoints"
    (folder / "epoch-0002" / "state.safetensors").write_bytes(b"")
    run = trainer(tmp_path / "run", resume=True, **options)
    assert [path.name for path in folder.iterdir()] == [".epoch-0002.aside"]
    run.run.begin()
    run.state.epoch = 1
    run.run.save()
    assert (folder / "epoch-0001" / "manifest.json").is_file()
    run.train()
    assert [path.name for path in folder.iterdir()] == ["epoch-0002"]
