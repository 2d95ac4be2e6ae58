"""Every family of pipelines passes every check, at guidance off and on, in fp32 and bf16."""

import re

import pytest
import supported
from families import FAMILIES

REPORTS = {}


@pytest.mark.parametrize(
    "case", supported.CASES, ids=[f"{n}-{d}{'-guided' * g}" for n, g, d in supported.CASES]
)
def test_a_family_passes_every_check_with_zeros(case):
    report = REPORTS[case] = supported.check(*case)
    assert report.ok, report.reason
    assert report.stock_difference == 0
    assert report.replay_difference == 0
    assert report.lora_round_trip == 0
    assert report.frozen_unchanged
    assert report.gradient_share > 0.3


def test_the_table_of_supported_pipelines_is_what_these_checks_found():
    if len(REPORTS) < len(supported.CASES):
        pytest.skip("needs the reports of all families: run the complete file")
    document = supported.document(REPORTS)
    assert supported.PATH.read_text() == document, "run python scripts/supported.py"


def test_the_table_of_supported_pipelines_has_a_row_per_family():
    text = supported.PATH.read_text()
    assert text.startswith(supported.HEAD), "run python scripts/supported.py"
    assert f"{len(FAMILIES)} families of" in text
    assert f"{len(supported.CASES)} in all" in text
    labels = re.findall(r"^\| (.*) \| `\w+` \| (.*) \|$", text, re.MULTILINE)
    guidance = {True: "off and on", False: "as it is"}
    expected = [(family.label, guidance[bool(family.guided)]) for family in FAMILIES.values()]
    assert sorted(labels) == sorted(expected), "run python scripts/supported.py"
