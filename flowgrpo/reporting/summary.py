"""summary.json and the figures of a finished run."""

import json
from typing import Any

from flowgrpo.core.files import write_atomically
from flowgrpo.evaluation.scores import SCORES
from flowgrpo.evaluation.statistics import paired_bootstrap
from flowgrpo.reporting.curves import draw_curves
from flowgrpo.reporting.sheets import draw_before_after
from flowgrpo.runs.folder import RunFolder


def summarize(
    folder: RunFolder, headline: str, epoch: int, totals: dict[str, Any]
) -> dict[str, Any]:
    """Base against tuned, by prompt set; writes summary.json, curves.png and compare.png.

    `reward`, `base` and `tuned` are about the headline reward; `scores` has every reward, with the
    gain and its 95 % interval.
    """
    evaluations = folder.evaluations()
    base, tuned = evaluations[0], evaluations[epoch]
    summary = {
        "reward": headline,
        "base": {name: float(scores[headline].mean()) for name, scores in base.items()},
        "tuned": {name: float(scores[headline].mean()) for name, scores in tuned.items()},
        "epochs": epoch,
        **totals,
        "scores": {
            name: {
                reward: {
                    "base": float(scores[reward].mean()),
                    "tuned": float(tuned[name][reward].mean()),
                    "gain": float((tuned[name][reward] - scores[reward]).mean()),
                    "gain_95": paired_bootstrap(scores[reward], tuned[name][reward]),
                }
                for reward in scores
            }
            for name, scores in base.items()
        },
    }
    write_atomically(folder.path / "summary.json", json.dumps(summary, indent=1))
    draw_curves(folder.path / "curves.png", folder.metrics(), evaluations, headline)
    data = json.loads((folder.evaluation(0) / SCORES).read_text())
    shown = "test_prompts" if "test_prompts" in base else "train_prompts"
    before, after = (
        (folder.evaluation(e) / shown, evaluations[e][shown][headline]) for e in (0, epoch)
    )
    sheet = draw_before_after(before, after, data["prompts"][shown], data["seeds"])
    sheet.save(folder.path / "compare.png")
    return summary
