"""What a run leaves in its folder, and which folders it refuses."""

import json
import shutil

import pytest
from families import built
from tiny_run import PROMPTS, redness, settings, trainer

from flowgrpo import ConfigError, GRPOTrainer
from flowgrpo.core.errors import RewardError


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


def test_a_run_that_failed_before_its_first_evaluation_does_not_block_the_folder(tmp_path):
    def broken(images, prompts, **columns):
        return [0.5]

    with pytest.raises(RewardError):
        trainer(tmp_path / "run", reward=broken).train()
    trainer(tmp_path / "run", train={"epochs": 0}).train()


@pytest.mark.parametrize("section", ["sampling", "evaluation"])
def test_an_argument_that_the_pipeline_does_not_take_is_refused(tmp_path, section):
    with pytest.raises(
        ConfigError, match=f'{section}.call.guidance_scal is not .*mean "guidance_scale"'
    ):
        trainer(tmp_path / "run", **{section: {"call": {"guidance_scal": 2}}})


def test_a_pipeline_that_has_an_adapter_is_refused(tmp_path):
    pipe = built("sd3")
    trainer(tmp_path / "a", pipe=pipe)
    with pytest.raises(ValueError, match="already has the adapters"):
        trainer(tmp_path / "b", pipe=pipe)


def test_paths_given_as_arguments_are_in_the_run_folders_config(tmp_path):
    built("sd3").save_pretrained(tmp_path / "model")
    args = settings(tmp_path / "run", train={"epochs": 0})
    run = GRPOTrainer(str(tmp_path / "model"), redness, PROMPTS, args=args)
    run.train()
    assert f"path: {tmp_path}/model" in (tmp_path / "run" / "config.yaml").read_text()
