"""Data sets as prompts: an object, or the name of a folder, a .parquet file or a Hub repository."""

import sys

import pytest
from PIL import Image

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.media import open_media
from flowgrpo.data.prompts import load_prompts

datasets = pytest.importorskip("datasets", reason="pip install datasets")


def test_a_dataset_object_gives_rows():
    data = datasets.Dataset.from_dict({"prompt": ["a cat", "a dog"], "target": ["CAT", "DOG"]})
    assert load_prompts(data)[1].columns == {"target": "DOG"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a data set with two splits, each with one prompt and its image."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "signs"
    path.mkdir()
    for split, colour in (("train", "red"), ("test", "blue")):
        rows = {"prompt": [f"a {split}"], "image": [Image.new("RGB", (8, 8), colour)]}
        datasets.Dataset.from_dict(rows).to_parquet(path / f"{split}.parquet")
    return path


def test_a_folder_names_a_data_set_and_a_split_of_it(folder):
    (row,) = load_prompts(f"{folder}:test")
    assert row.prompt == "a test"
    assert row.source == f"{folder}:test row 0"
    assert open_media(row.columns)["image"].getpixel((0, 0)) == (0, 0, 255)
    with pytest.raises(
        ConfigError, match=r"splits are train, test; name one, for example .*signs:train"
    ):
        load_prompts(folder)
    with pytest.raises(ConfigError, match="splits are train, test"):
        load_prompts(f"{folder}:tset")


def test_a_parquet_file_and_a_saved_data_set_need_no_split(folder):
    (row,) = load_prompts(folder / "train.parquet")
    datasets.Dataset.from_dict({"prompt": ["a cat"]}).save_to_disk(folder.parent / "saved")
    assert row.prompt == "a train"
    assert load_prompts(folder.parent / "saved")[0].prompt == "a cat"


def test_a_hub_name_is_loaded_with_datasets(monkeypatch):
    splits = {"train": datasets.Dataset.from_dict({"prompt": ["a cat"], "target": ["CAT"]})}
    loaded = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: loaded.append(name) or splits)
    (row,) = load_prompts("someone/signs-v1.5:train")
    assert (loaded, row.columns) == (["someone/signs-v1.5"], {"target": "CAT"})
    with pytest.raises(ConfigError, match="there is no such file"):
        load_prompts("nowhere/signs.txt")


def test_a_data_set_that_cannot_be_loaded_is_refused_in_one_sentence(monkeypatch):
    def fail(name):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(no network at all\)"):
        load_prompts("someone/signs")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="run `pip install datasets`"):
        load_prompts("someone/signs")
