"""The report of a pipeline check: its measurements, and a table of them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class CheckReport:
    """Measurements of a pipeline check. A difference is the largest absolute one, and None if the
    check ended before it was measured.

    Latents are compared as the pipeline returns them, log-probs as means over latent dimensions.
    """

    pipeline: str
    stock_difference: float | None = None
    """Latents of a rollout without noise against the untouched pipeline's; must be 0."""
    replay_difference: float | None = None
    """Log-probs at replay against the rollout's, over all trained steps; 0 on a CPU."""
    replay_allowed: float = 0.0
    """Largest `replay_difference` allowed: a tenth of the clip range."""
    calls_per_step: dict[str, list[int]] = field(default_factory=dict)
    """Number of denoiser calls in each iteration of the loop, by module."""
    gradient_share: float | None = None
    """Share of the trained tensors with a nonzero gradient in the window, in [0, 1]."""
    gradient_error: float | None = None
    """Relative error of the gradient against a finite difference, float32 only; for information.

    Well below 0.05 if the model is smooth. It is not with routed experts, which jump, nor with a
    guider's momentum, a state through which no gradient flows.
    """
    frozen_unchanged: bool | None = None
    """Whether an optimizer step left every frozen tensor bit-identical."""
    lora_round_trip: float | None = None
    """Latents of the saved adapter, loaded by plain diffusers, against the trainer's; must be 0."""
    micro_batch_difference: float | None = None
    """Latents of a sample alone against the same sample in a batch of two; for information."""
    seconds: float = 0.0
    peak_memory: int = 0
    """In bytes: of the GPU, or of the process if there is no GPU."""
    reason: str = ""
    """Why the pipeline cannot be trained, in one sentence; empty if it can."""

    @property
    def ok(self) -> bool:
        return not self.reason

    def lines(self) -> list[str]:
        """The report as lines of text for people."""
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
            "result": "can be trained" if self.ok else "refused",
        }
        table = [f"{label:26}{value}" for label, value in rows.items()]
        return [self.pipeline, *table, *([] if self.ok else [self.reason])]


def _shown(value: Any, form: str = "{:.1e}") -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "0" if value == 0 else form.format(value)
