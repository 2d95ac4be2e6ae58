"""Every family of pipelines passes every check, at guidance off and on, in fp32 and bf16.

What passes here is the README's table: `python scripts/supported.py` writes it.
"""

import pytest
import torch
from families import FAMILIES, built

from flowgrpo import check_pipeline

CASES = [
    (name, guided)
    for name, family in FAMILIES.items()
    for guided in (False, True)
    if not guided or family.guided
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "guided"), CASES, ids=[f"{n}{'-guided' if g else ''}" for n, g in CASES]
)
def test_a_family_passes_every_check_with_zeros(name, guided, dtype):
    family = FAMILIES[name]
    call = {**family.call, **((guided and family.guided) or {}), "num_inference_steps": 4}
    report = check_pipeline(built(name, dtype), **call)
    assert report.ok, report.reason
    assert report.stock_difference == 0
    assert report.replay_difference == 0
    assert report.lora_round_trip == 0
    assert report.frozen_unchanged
    assert report.gradient_share > 0.3
    calls = report.calls_per_step.values()
    assert all(sum(counts) > 0 for counts in zip(*calls, strict=True))
