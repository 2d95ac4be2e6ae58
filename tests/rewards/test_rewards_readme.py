"""The README of the rewards follows the code."""

import re
from dataclasses import fields
from pathlib import Path

import document_rewards

from rewards import RewardOptions

ROOT = Path(__file__).parents[2]


def test_the_table_of_built_in_rewards_is_current():
    text = document_rewards.README.read_text()
    assert document_rewards.updated(text) == text, "run python scripts/document_rewards.py"


def test_the_custom_reward_is_that_of_its_file():
    assert (ROOT / "configs" / "saturation.py").read_text() in document_rewards.README.read_text()


def test_every_option_has_its_row():
    section = document_rewards.README.read_text().partition("| option |")[2].partition("##")[0]
    rows = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert rows == [field.name for field in fields(RewardOptions)]
