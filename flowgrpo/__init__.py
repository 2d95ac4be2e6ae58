"""GRPO for diffusion image and video models: any diffusers pipeline, any reward.

from flowgrpo import GRPOConfig, GRPOTrainer

def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

GRPOTrainer("path/to/pipeline", redness, ["a red cube"], args=GRPOConfig()).train()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo.core.config import GRPOConfig
    from flowgrpo.core.errors import ConfigError, FlowgrpoError
    from flowgrpo.preflight.pipeline_check import check_pipeline
    from flowgrpo.training.trainer import GRPOTrainer

__all__ = ["ConfigError", "FlowgrpoError", "GRPOConfig", "GRPOTrainer", "check_pipeline"]

_MODULES = {
    "ConfigError": "core.errors",
    "FlowgrpoError": "core.errors",
    "GRPOConfig": "core.config",
    "GRPOTrainer": "training.trainer",
    "check_pipeline": "preflight.pipeline_check",
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use, since `cli` sets variables before torch is imported."""
    if name not in _MODULES:
        raise AttributeError(f"module flowgrpo has no attribute {name!r}")
    return getattr(importlib.import_module(f"flowgrpo.{_MODULES[name]}"), name)
