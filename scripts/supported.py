"""Writes assets/supported.md: the families of pipelines that pass `check_pipeline`.

python scripts/supported.py                          # all families; takes some minutes
python -m pytest tests/preflight/test_families.py    # the same checks; fails if the file is stale
"""

import sys
from pathlib import Path

import torch

from flowgrpo import check_pipeline
from flowgrpo.core.config_file import parse_config

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
from families import FAMILIES, KINDS, built  # noqa: E402

PATH = ROOT / "assets" / "supported.md"
HEAD = """\
# Supported pipelines

<!-- written by scripts/supported.py -->

No line of `flowgrpo/` names a model. The families below are checked by `check_pipeline` on tiny
random weights, in fp32 and bf16, with guidance off and, if the pipeline's call can switch it, on. A
family is listed if all its checks pass with differences of exactly 0: a rollout without noise gives
the latents of the untouched pipeline, every trained step replays the log-prob of its rollout, and
the saved LoRA, loaded by plain diffusers, gives the trainer's latents. Moreover, gradients reach
more than 30% of the trained tensors, and frozen weights stay as they are. A pipeline that is not
listed may well work: run `flowgrpo check` on it.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [
    (name, guided, dtype)
    for name, family in FAMILIES.items()
    for guided in (False, True)
    for dtype in DTYPES
    if not guided or family.guided
]
"""(name of the family, whether guidance is on, dtype)."""


def check(name, guided, dtype):
    """The report of one case, with four steps."""
    family = FAMILIES[name]
    call = {"num_inference_steps": 4, **family.call, **((guided and family.guided) or {})}
    window = {"last": family.last_step}
    settings = parse_config({"sampling": {"num_inference_steps": 4, "window": window}})
    return check_pipeline(built(name, DTYPES[dtype]), settings=settings, **call)


def passes(report):
    """Whether every difference is exactly 0, and gradients reach the trained tensors."""
    zeros = (report.stock_difference, report.replay_difference, report.lora_round_trip)
    return report.ok and zeros == (0, 0, 0) and report.gradient_share > 0.3


def document(reports):
    """The text of assets/supported.md, with the families that pass in all their cases.

    Args:
        reports: by case, as in CASES.
    """
    failed = {name for (name, *_), report in reports.items() if not passes(report)}
    classes = {report.pipeline for (name, *_), report in reports.items() if name not in failed}
    lines = [
        f"{len(FAMILIES) - len(failed)} families of {len(classes)} pipeline classes pass every "
        f"check, {len(reports)} in all:"
    ]
    for heading, families in KINDS.items():
        lines += ["", f"| {heading} | pipeline | guidance |", "|---|---|---|"]
        for name in sorted(families, key=lambda name: families[name].label.lower()):
            if name in failed:
                continue
            pipeline = reports[name, False, "fp32"].pipeline
            guidance = "off and on" if families[name].guided else "as it is"
            lines.append(f"| {families[name].label} | `{pipeline}` | {guidance} |")
    return "\n".join([HEAD, *lines, ""])


def main():
    reports = {}
    for case in CASES:
        reports[case] = check(*case)
        if not passes(reports[case]):
            print(*case, reports[case].reason, file=sys.stderr)
    PATH.write_text(document(reports))


if __name__ == "__main__":
    main()
