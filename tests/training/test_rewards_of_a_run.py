"""What a run does with its rewards: joined by sample, logged apart, refused by name."""

import sys
import time

import pytest
import torch
from families import built
from tiny_run import PROMPTS, metrics, redness, settings, trainer

from flowgrpo import ConfigError, GRPOTrainer
from flowgrpo.core.errors import RewardError
from rewards import reward


def test_a_reward_that_leaves_the_process_is_named(tmp_path):
    def leaving(images, prompts, **columns):
        sys.exit(0)

    with pytest.raises(RewardError, match=r'leaving failed on prompt "a cat" \(SystemExit'):
        trainer(tmp_path / "run", reward=leaving).train()


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
