"""The command line: bad input gives one sentence and exit code 1, before a model is loaded."""

import json

import pytest
import yaml
from families import FAMILIES, built
from families.family import SHORT
from PIL import Image, ImageChops
from tiny_run import flowgrpo, write_inputs


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a model, a reward, prompts and a config that trains for one epoch."""
    folder = tmp_path_factory.mktemp("world")
    write_inputs(folder)
    config = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "prompts": {"train": str(folder / "train.txt"), "test": str(folder / "test.txt")},
        "reward": f"{folder}/my_reward.py:redness",
        "sampling": {
            "num_inference_steps": 3,
            "group_size": 4,
            "groups_per_epoch": 2,
            "call": {**SHORT, "guidance_scale": 1.0},
        },
        "train": {"epochs": 1, "lora": {"rank": 4, "alpha": 8}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def finished(world):
    assert flowgrpo("train", world / "config.yaml") == 0
    return world / "run"


def test_the_printed_snippet_gives_the_runs_images(world, finished, capsys):
    """The four lines are run as printed, with only the evaluation's noise added to the last."""
    code = flowgrpo("train", world / "config.yaml", "--resume")
    assert code == 0
    snippet = capsys.readouterr().out.split("Use it with plain diffusers:\n\n")[1].strip()
    lines = snippet.splitlines()
    assert len(lines) == 4

    import torch

    from flowgrpo.core.seeds import initial_noise_seed

    scope = {}
    noise = "torch.Generator().manual_seed(seed)"
    lines[3] = lines[3].replace("pipe('a fox'", f"pipe('a fox', generator={noise}")
    exec("\n".join(lines), {"torch": torch, "seed": initial_noise_seed(0, "a fox", 0)}, scope)
    saved = Image.open(finished / "eval" / "epoch-0001" / "test_prompts" / "0000-seed0.png")
    assert ImageChops.difference(scope["image"], saved).getbbox() is None


def test_compare_draws_a_grid(finished, tmp_path):
    out = tmp_path / "grid.png"
    assert flowgrpo("compare", finished, "--scales", "0,0.5,1", "--seed", 1, "--out", out) == 0
    assert Image.open(out).width > 4 * 100


def test_compare_takes_checkpoints_other_loras_and_several_runs(world, finished):
    from flowgrpo.data.prompts import load_prompts
    from flowgrpo.reporting import model_grid

    second = world / "run2"
    if not second.exists():
        assert flowgrpo("train", world / "config.yaml", f"output_dir={second}", "seed=5") == 0
    columns = model_grid.columns_of_runs(
        [finished, second], checkpoints=True, loras=[finished / "lora"]
    )
    assert [c.label for c in columns] == [
        "base", "run: epoch-0001", "run: tuned", "run2: epoch-0001", "run2: tuned", "lora",
    ]  # fmt: skip
    (line,) = model_grid.sample_columns(columns, load_prompts(["a fox"]), [3])
    base, checkpoint, tuned, _, other, lora = line
    assert ImageChops.difference(checkpoint, tuned).getbbox() is None
    assert ImageChops.difference(lora, tuned).getbbox() is None
    assert ImageChops.difference(base, tuned).getbbox() is not None
    assert ImageChops.difference(other, tuned).getbbox() is not None


def test_the_lora_has_a_record_of_its_settings(finished):
    record = json.loads((finished / "lora" / "generation.json").read_text())
    assert record["pipeline"] == "StableDiffusion3Pipeline"
    assert record["scheduler"]["class"] == "FlowMatchEulerDiscreteScheduler"
    assert record["scheduler"]["shift"] == 3.0
    assert record["evaluation"] == {**SHORT, "guidance_scale": 1.0, "num_inference_steps": 3}
    assert {"torch", "diffusers", "peft", "python"} <= record["versions"].keys()


def test_a_scale_of_zero_is_the_base_and_a_cell_does_not_depend_on_the_grid(finished):
    from flowgrpo.data.prompts import load_prompts
    from flowgrpo.reporting import model_grid

    columns = model_grid.columns_of_runs([finished], scales=[0.0, 1.0])
    rows = load_prompts(["a fox", "an owl"])
    grid = model_grid.sample_columns(columns, rows, [0, 1])
    for base, zero, one in grid:
        assert ImageChops.difference(base, zero).getbbox() is None
        assert base.size == one.size
    ((alone,),) = model_grid.sample_columns(columns[2:], rows[1:], [1])
    assert ImageChops.difference(alone, grid[3][2]).getbbox() is None


def test_plan_loads_no_model(world, capsys):
    assert flowgrpo("plan", world / "config.yaml", "model.path=no/model") == 0
    out = capsys.readouterr().out
    assert "8 (2 prompts x 4)" in out
    assert "optimizer steps" in out


def test_test_prompts_that_are_training_prompts_are_reported(world, capsys, tmp_path):
    (tmp_path / "test.txt").write_text("an owl\nA  cat\na dog\n")
    flowgrpo("plan", world / "config.yaml", f"prompts.test={tmp_path}/test.txt")
    assert "warning: 2 test prompts are training prompts too." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.group_sise=4"], 'did you mean "group_size"?'),
        (["sampling.group_size=1"], "sampling.group_size is 1"),
        (["sampling.groups_per_epoch=many"], "sampling.groups_per_epoch is 'many'"),
        (["reward=ocrr"], 'reward "ocrr" is unknown; did you mean "ocr"?'),
        (["reward=ocr"], "train.txt line 1"),
        (["reward=nowhere.py:f"], "there is no such file"),
        (["reward=no_such_package.module:f"], "cannot be imported"),
        (["reward=math:no_such_function"], 'has no function "no_such_function"'),
        (["prompts.train=nowhere.txt"], "there is no such file"),
        (["prompts.train=null"], "prompts.train is missing"),
        (["model.path=./nowhere"], 'model.path is "./nowhere", but there is no such folder'),
        (["model.path=."], "that folder is no pipeline"),
        (["model.path=null"], "model.path is missing"),
        (["reward={reward: ocr, params: {skore: exact}}"], 'did you mean "score"?'),
        (["sampling.call.guidance_scal=2"], 'did you mean "guidance_scale"?'),
        (["sampling.call.generator=2"], "sampling.call.generator is set"),
        (["evaluation.call={return_dict: false}"], "evaluation.call.return_dict is set"),
        (["evaluation.seeds=0"], "evaluation.seeds is"),
        (["train.lr=.inf"], "train.lr is inf"),
        (["model.path=configs/nowhere"], "there is no such folder"),
        (["prompts.train.x=1"], "override train as a whole"),
    ],
)
def test_bad_input_is_reported_in_one_sentence_with_exit_code_1(
    world, capsys, tmp_path, overrides, message
):
    out = f"output_dir={tmp_path}/run"
    assert flowgrpo("train", world / "config.yaml", out, *overrides) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("flowgrpo: ")
    assert message in error
    assert not (tmp_path / "run").exists()


def test_a_folder_with_another_run_is_refused(world, finished, capsys):
    assert flowgrpo("train", world / "config.yaml") == 1
    assert "it holds another run; use --resume" in capsys.readouterr().err


def test_a_reward_that_returns_the_wrong_count_stops_by_name(world, capsys, tmp_path):
    (tmp_path / "bad.py").write_text("def bad(images, prompts, **columns):\n    return [1.0]\n")
    overrides = [f"output_dir={tmp_path}/run", f"reward={tmp_path}/bad.py:bad"]
    assert flowgrpo("train", world / "config.yaml", *overrides) == 1
    assert 'bad returned 1 rewards for 3 images (prompt "a cat")' in capsys.readouterr().err


def test_a_missing_config_and_a_missing_run_are_reported_in_a_sentence(capsys):
    assert flowgrpo("train", "nowhere.yaml") == 1
    assert "there is no such file" in capsys.readouterr().err
    assert flowgrpo("compare", "nowhere") == 1
    assert "holds no config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "compare", "plan"])
def test_every_command_has_help(command, capsys):
    assert flowgrpo(command, "--help") == 0
    assert len(capsys.readouterr().out.splitlines()) > 8


def test_check_takes_a_config_or_a_folder_and_fails_with_a_reason(world, capsys):
    assert flowgrpo("check", world / "config.yaml", "guidance_scale=4.5") == 0
    report = capsys.readouterr().out
    assert "StableDiffusion3Pipeline" in report
    assert "can be trained" in report
    arguments = [f"{key}={value}" for key, value in SHORT.items()]
    settings = ["train.lora.targets=[to_z]", "num_inference_steps=3"]
    assert flowgrpo("check", world / "model", *arguments, *settings) == 1
    assert "train.lora.targets has to_z" in capsys.readouterr().out
    assert flowgrpo("check", world / "model", "hight=16") == 1
    assert 'did you mean "height"' in capsys.readouterr().out


def test_check_opens_the_images_it_is_given(capsys, tmp_path):
    built("sd3-img2img").save_pretrained(tmp_path / "model")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    call = [f"{k}={v}" for k, v in FAMILIES["sd3-img2img"].call.items() if k != "image"]
    common = ["check", tmp_path / "model", *call, "num_inference_steps=4", "sampling.window.last=1"]
    assert flowgrpo(*common, f"image={tmp_path / 'red.png'}") == 0
    assert "can be trained" in capsys.readouterr().out
    assert flowgrpo(*common, f"image={tmp_path / 'blue.png'}") == 1
    assert "there is no such file" in capsys.readouterr().err
