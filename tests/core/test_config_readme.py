"""configs/README.md is what scripts/document_configs.py writes, and misses no setting."""

import document_configs
import pytest
import yaml

from flowgrpo.core.config_file import parse_config


def test_the_readme_of_the_configs_is_up_to_date():
    text = document_configs.README.read_text(encoding="utf-8")
    assert text == document_configs.document(), "run python scripts/document_configs.py"


@pytest.mark.parametrize("name", document_configs.settings())
def test_every_setting_has_a_docstring(name):
    assert document_configs.settings()[name].description


@pytest.mark.parametrize(("prefix", "section"), document_configs.sections())
def test_every_section_has_a_docstring_of_its_own(prefix, section):
    assert "__doc__" in vars(section)
    assert vars(section)["__doc__"]


def test_the_example_of_the_readme_is_a_config():
    example = document_configs.INTRODUCTION.partition("```yaml")[2].partition("```")[0]
    assert parse_config(yaml.safe_load(example)).rewards[0].reward == "ocr"


def test_every_config_has_a_row_that_is_a_sentence():
    rows = [line for line in document_configs.document().splitlines() if ".yaml) |" in line]
    assert len(rows) == len(list(document_configs.CONFIGS.glob("*.yaml")))
    assert all(row.rstrip(" |").endswith((".", '."')) for row in rows)
