"""Objectives: what the loss of a replayed step is. Each is a file with one pure function.

To add one: write the function against `batch.StepBatch`, enter it here, and give it a config class
in `core.objective_config` whose fields are its keyword arguments.
"""

from flowgrpo.algorithms.objectives.batch import Objective, StepBatch, StepLoss
from flowgrpo.algorithms.objectives.grpo import grpo

OBJECTIVES: dict[str, Objective] = {"grpo": grpo}
"""By the name in the config."""

__all__ = ["OBJECTIVES", "Objective", "StepBatch", "StepLoss"]
