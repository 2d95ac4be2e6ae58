"""Groups, windows and seeds of an epoch, and other numbers that follow from a config."""

from flowgrpo.core.config_file import parse_config
from flowgrpo.data.plan import Plan
from flowgrpo.data.row import Row


def plan(**settings):
    rows = [Row(prompt=f"prompt {i}", source=f"line {i}") for i in range(5)]
    return Plan(config=parse_config(settings), rows=rows)


def test_groups_of_an_epoch_do_not_depend_on_what_came_before():
    a, b = plan(seed=3), plan(seed=3)
    a.groups(0), a.groups(1)
    assert a.groups(2) == b.groups(2)
    assert a.groups(2) != plan(seed=4).groups(2)


def test_every_prompt_is_used_once_before_any_is_used_again():
    p = plan(sampling={"groups_per_epoch": 3}, train={"updates_per_epoch": 1})
    prompts = [group.row.prompt for epoch in range(5) for group in p.groups(epoch)]
    for start in range(0, 15, 5):
        assert len(set(prompts[start : start + 5])) == 5
    assert len({tuple(prompts[start : start + 5]) for start in range(0, 15, 5)}) > 1


def test_the_same_line_twice_makes_two_groups():
    twins = [Row(prompt="a cat", source="line 1"), Row(prompt="a cat", source="line 2")]
    groups = Plan(config=parse_config({"sampling": {"groups_per_epoch": 2}}), rows=twins).groups(0)
    assert len(groups) == 2
    assert groups[0].seeds != groups[1].seeds


def test_a_window_lies_within_its_bounds_and_reaches_all_of_them():
    settings = {"num_inference_steps": 10, "window": {"size": 3, "first": 1, "last": 6}}
    p = plan(sampling=settings)
    starts = {g.window.start for epoch in range(40) for g in p.groups(epoch)}
    assert starts == {1, 2, 3, 4}
    assert all(len(g.window) == 3 for g in p.groups(0))


def test_by_default_all_steps_but_the_last_are_trained():
    assert plan(sampling={"num_inference_steps": 6}).groups(0)[0].window == range(0, 5)


def test_shared_noise_is_shared_at_the_start_of_a_group_only():
    group = plan(sampling={"shared_noise": True}).groups(0)[0]
    assert len(set(group.seeds)) == 1
    assert group.noise_key(0, 1, 0) != group.noise_key(1, 1, 0)


def test_updates_cover_every_group_once_per_inner_epoch():
    settings = {
        "sampling": {"groups_per_epoch": 8},
        "train": {"updates_per_epoch": 4, "inner_epochs": 2},
    }
    assert plan(**settings).update_batches() == [range(0, 4), range(4, 8)] * 2


def test_micro_batches_cover_a_group_with_a_smaller_last_one():
    p = plan(sampling={"group_size": 8, "micro_batch_size": 3})
    assert p.micro_batches == [range(0, 3), range(3, 6), range(6, 8)]
