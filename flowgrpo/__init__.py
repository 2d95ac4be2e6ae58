"""GRPO for diffusion image and video models: any diffusers pipeline, any reward.

    from flowgrpo import GRPOConfig, GRPOTrainer

    def redness(images, prompts, **columns):
        return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

    GRPOTrainer("path/to/pipeline", redness, ["a red cube"], args=GRPOConfig()).train()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo.config import ConfigError, GRPOConfig
    from flowgrpo.trainer import GRPOTrainer

__all__ = ["ConfigError", "GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the command line sets threading variables before torch is loaded."""
    if name in ("ConfigError", "GRPOConfig"):
        from flowgrpo import config as module
    elif name == "GRPOTrainer":
        from flowgrpo import trainer as module
    else:
        raise AttributeError(f"module flowgrpo has no attribute {name!r}")
    return getattr(module, name)
