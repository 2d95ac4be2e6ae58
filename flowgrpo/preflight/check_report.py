"""What a check of a pipeline found, as fields and as a table."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class CheckReport:
    """What a check found; differences are the largest absolute ones, None where not reached.

    Latents are compared as the pipeline returns them, log-probs as means over latent dimensions.
    """

    pipeline: str
    stock_difference: float | None = None
    """Latents without noise against the untouched pipeline; must be 0."""
    replay_difference: float | None = None
    """Log-prob at replay against the rollout's, over all trained steps; 0 on a CPU."""
    replay_allowed: float = 0.0
    """A tenth of the clip range."""
    calls_per_step: dict[str, list[int]] = field(default_factory=dict)
    """Denoiser calls in each iteration of the loop, by module."""
    gradient_share: float | None = None
    """Share of the trained tensors that got a gradient other than 0 in the window."""
    gradient_error: float | None = None
    """The gradient's slope along itself against a finite difference, relative; for information.

    In float32 only. Well below 0.05 where the model is smooth: routed experts jump, and a guider's
    momentum is state, through which no gradient goes.
    """
    frozen_unchanged: bool | None = None
    """Whether every frozen tensor is the same, bit for bit, after an optimizer step."""
    lora_round_trip: float | None = None
    """Latents of the saved adapter, loaded by plain diffusers, against the trainer's; must be 0."""
    micro_batch_difference: float | None = None
    """Latents of a sample alone against the same in a batch of two; for information."""
    seconds: float = 0.0
    peak_memory: int = 0
    """In bytes: of the GPU, or of the process on a CPU."""
    reason: str = ""
    """Why it cannot be trained, in one sentence."""

    @property
    def ok(self) -> bool:
        return not self.reason

    def lines(self) -> list[str]:
        """A table for people."""
        calls = ", ".join(
            f"{name} {min(counts)}" if len({*counts}) == 1 else f"{name} {counts}"
            for name, counts in self.calls_per_step.items()
        )
        rows = {
            "stock difference": _shown(self.stock_difference),
            "replay difference": f"{_shown(self.replay_difference)} (allowed "
            f"{self.replay_allowed:.0e})",
            "denoiser calls per step": calls or "-",
            "tensors with a gradient": _shown(self.gradient_share, "{:.0%}"),
            "gradient error": _shown(self.gradient_error) + " (information)",
            "frozen weights unchanged": _shown(self.frozen_unchanged),
            "LoRA round trip": _shown(self.lora_round_trip),
            "micro-batch difference": _shown(self.micro_batch_difference) + " (information)",
            "seconds": f"{self.seconds:.1f}",
            "peak memory": f"{self.peak_memory / 2**30:.2f} GiB",
            "verdict": "can be trained" if self.ok else "refused",
        }
        table = [f"{label:26}{value}" for label, value in rows.items()]
        return [self.pipeline, *table, *([] if self.ok else [self.reason])]


def _shown(value: Any, form: str = "{:.1e}") -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "0" if value == 0 else form.format(value)
