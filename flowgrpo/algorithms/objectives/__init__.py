"""Objectives: losses of a replayed step. Each is a file with one pure function.

To add one, write a function of a `batch.StepBatch`, enter it here, and add a config class to
`core.objective_config` whose fields are the function's keyword arguments.
"""

from flowgrpo.algorithms.objectives.batch import Objective, StepBatch, StepLoss
from flowgrpo.algorithms.objectives.grpo import grpo

OBJECTIVES: dict[str, Objective] = {"grpo": grpo}
"""Objectives by the name in the config."""

__all__ = ["OBJECTIVES", "Objective", "StepBatch", "StepLoss"]
