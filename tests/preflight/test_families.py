"""Every family of pipelines passes every check, at guidance off and on, in fp32 and bf16."""

import pytest
import supported

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


def test_the_readmes_table_is_what_these_checks_found():
    if len(REPORTS) < len(supported.CASES):
        pytest.skip("needs the reports of all families: run the whole file")
    assert supported.in_readme() == supported.table(REPORTS), "run python scripts/supported.py"
