"""What a run has done so far."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TrainerState:
    """What a run has done so far; with the weights and the optimizer, all that a resume needs.

    Prompts, windows and noise are pure functions of the epoch, so there is no state of theirs.
    """

    epoch: int = 0
    """Epochs that are finished."""
    images: int = 0
    seconds: float = 0.0
    """Wall time of training and evaluation, over all starts."""
    denoiser_calls: dict[str, int] = field(
        default_factory=lambda: {"denoiser_forwards": 0, "denoiser_backwards": 0}
    )
    """Denoiser calls of rollouts and replays, over all processes."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint, each with a lower learning rate."""
