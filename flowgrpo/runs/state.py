"""The progress of a run."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TrainerState:
    """The progress of a run; with the weights and the optimizer, all that a resume needs.

    Prompts, windows and noise are pure functions of the epoch, so they have no state of their own.
    """

    epoch: int = 0
    """Number of finished epochs."""
    images: int = 0
    """Number of images or videos sampled for training, over all processes."""
    seconds: float = 0.0
    """Wall time of training and evaluation, over all starts."""
    denoiser_calls: dict[str, int] = field(
        default_factory=lambda: {"denoiser_forwards": 0, "denoiser_backwards": 0}
    )
    """Number of denoiser calls of rollouts and replays, over all processes."""
    rollbacks: int = 0
    """Number of times the run went back to a checkpoint, each time with a lower learning rate."""
