"""Writes the README's table of supported models: what the test of families finds, not typed.

python scripts/supported.py                    # all families; some minutes
python -m pytest tests/test_families.py        # the same checks; fails if the table is old
"""

import sys
from pathlib import Path

import torch

from flowgrpo import check_pipeline
from flowgrpo.core.config_file import parse_config

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
from families import FAMILIES, KINDS, built  # noqa: E402

BEGIN, END = "<!-- written by scripts/supported.py -->", "<!-- end of the table -->"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [
    (name, guided, dtype)
    for name, family in FAMILIES.items()
    for guided in (False, True)
    for dtype in DTYPES
    if not guided or family.guided
]


def check(name, guided, dtype):
    """The report of one family, with four steps at guidance off or on."""
    family = FAMILIES[name]
    call = {"num_inference_steps": 4, **family.call, **((guided and family.guided) or {})}
    window = {"last": family.last_step}
    settings = parse_config({"sampling": {"num_inference_steps": 4, "window": window}})
    return check_pipeline(built(name, DTYPES[dtype]), settings=settings, **call)


def passes(report):
    """Whether every difference is exactly 0, gradients arrive, and samples are independent."""
    zeros = (report.stock_difference, report.replay_difference, report.lora_round_trip)
    return report.ok and zeros == (0, 0, 0) and report.gradient_share > 0.3


def table(reports):
    """Markdown of the families that pass in all their cases.

    Args:
        reports: by (name, guided, dtype), as in CASES.
    """
    failed = {name for (name, *_), report in reports.items() if not passes(report)}
    classes = {report.pipeline for (name, *_), report in reports.items() if name not in failed}
    lines = [
        f"{len(FAMILIES) - len(failed)} families of {len(classes)} pipeline classes pass every "
        f"check, {len(reports)} in all:"
    ]
    for kind, families in KINDS.items():
        lines += ["", f"| {kind} | pipeline | guidance |", "|---|---|---|"]
        for name in sorted(families, key=lambda name: families[name].label.lower()):
            if name in failed:
                continue
            pipeline = reports[name, False, "fp32"].pipeline
            guidance = "off and on" if families[name].guided else "as it is"
            lines.append(f"| {families[name].label} | `{pipeline}` | {guidance} |")
    return "\n".join(lines)


def in_readme():
    """The table that the README holds now."""
    return (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main():
    reports = {}
    for case in CASES:
        reports[case] = check(*case)
        if not passes(reports[case]):
            print(*case, reports[case].reason, file=sys.stderr)
    before, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    (ROOT / "README.md").write_text(f"{before}{BEGIN}\n{table(reports)}\n{END}{after}")


if __name__ == "__main__":
    main()
