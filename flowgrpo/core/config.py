"""The config of a run: everything a user chooses, as validated pydantic models."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.objective_config import GRPOObjective
from flowgrpo.core.sampling_config import EvaluationConfig, SamplingConfig
from flowgrpo.core.sections import ModelConfig, PromptsConfig, RewardConfig, Section
from flowgrpo.core.train_config import GuardsConfig, TrainConfig

RENAMED_KEYS = {
    "sampling.kind": "sampling.sde",
    "train.clip_range": "objective.clip_range",
    "train.kl_weight": "objective.kl_weight",
    "train.optimiser": "train.optimizer",
    "train.passes": "train.inner_epochs",
}
"""Keys of earlier versions, with what they are called now."""


class GRPOConfig(Section):
    """A whole run. Field by field in the classes of its sections."""

    seed: int = 0
    output_dir: str = "runs/flowgrpo"
    """The run folder itself."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Epochs."""
    checkpoint_keep: int = Field(default=5, ge=1)
    """Newest checkpoints that are kept, and the best evaluated one beside them."""
    trackers: list[str] = Field(default_factory=list)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, ..., where installed."""
    fps: float = Field(default=16, gt=0)
    """Frames a second of saved videos; where the pipeline's call has a frame_rate, that."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: list[RewardConfig] = Field(default_factory=list)
    held_out: list[RewardConfig] = Field(default_factory=list)
    """Scored at evaluation only; the first is the run's headline."""
    sampling: SamplingConfig = SamplingConfig()
    objective: GRPOObjective = GRPOObjective()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    guards: GuardsConfig = GuardsConfig()

    @property
    def sampling_call(self) -> dict[str, Any]:
        """The pipeline's arguments when sampling."""
        return {**self.sampling.call, "num_inference_steps": self.sampling.num_inference_steps}

    @property
    def evaluation_call(self) -> dict[str, Any]:
        """The pipeline's arguments at evaluation; where not set, those of sampling."""
        call = self.sampling.call if self.evaluation.call is None else self.evaluation.call
        steps = self.evaluation.num_inference_steps or self.sampling.num_inference_steps
        return {**call, "num_inference_steps": steps}

    @model_validator(mode="before")
    @classmethod
    def _renamed_keys(cls, data: Any) -> Any:
        sections = data if isinstance(data, dict) else {}
        for name, new_name in RENAMED_KEYS.items():
            section, _, key = name.partition(".")
            if isinstance(sections.get(section), dict) and key in sections[section]:
                raise ConfigError(f"{name} is now called {new_name}; rename it.")
        sampling = sections.get("sampling")
        if isinstance(sampling, dict) and sampling.get("sde") == "exact":
            raise ConfigError("sampling.sde is exact, which is now called exact_sde; rename it.")
        return data

    @model_validator(mode="before")
    @classmethod
    def _lone_reward(cls, data: Any) -> Any:
        """`reward: ocr` stands for a list of one; a bare name stands for its mapping."""
        if isinstance(data, dict):
            data = dict(data)
            if "reward" in data:
                if data.get("rewards"):
                    raise ConfigError(
                        "reward and rewards are both set, but one of them is meant; keep rewards."
                    )
                data["rewards"] = data.pop("reward")
            for key in ("rewards", "held_out"):
                if isinstance(data.get(key), (str, dict)):
                    data[key] = [data[key]]
                if isinstance(data.get(key), list):
                    data[key] = [{"reward": r} if isinstance(r, str) else r for r in data[key]]
        return data

    @model_validator(mode="after")
    def _sharded(self) -> "GRPOConfig":
        if self.train.shard and self.model.compile:
            raise ConfigError(
                "model.compile is true with train.shard, but blocks are compiled whole; leave one "
                "of them out."
            )
        return self

    @model_validator(mode="after")
    def _measured(self) -> "GRPOConfig":
        if self.guards.max_kl is not None and self.objective.kl_weight == 0:
            raise ConfigError(
                f"guards.max_kl is {self.guards.max_kl:g}, but KL is only measured with "
                "objective.kl_weight above 0; set it, to 1e-6 for example, or leave the bound out."
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> "GRPOConfig":
        train, groups = self.train, self.sampling.groups_per_epoch
        if train.updates_per_epoch % train.inner_epochs:
            raise ConfigError(
                f"train.updates_per_epoch is {train.updates_per_epoch}, but must be a multiple "
                f"of the {train.inner_epochs} inner epochs; use "
                f"{train.inner_epochs * max(1, train.updates_per_epoch // train.inner_epochs)}."
            )
        per_inner_epoch = train.updates_per_epoch // train.inner_epochs
        if groups % per_inner_epoch:
            below = groups - groups % per_inner_epoch
            nearest = " or ".join(str(n) for n in (below, below + per_inner_epoch) if n)
            raise ConfigError(
                f"sampling.groups_per_epoch is {groups}, but must be a multiple of the "
                f"{per_inner_epoch} updates per inner epoch; "
                f"use {nearest}."
            )
        return self


def frame_rate(config: GRPOConfig, call: Mapping[str, Any] | None = None) -> float:
    """Of videos made with `call`, or evaluated ones: what the pipeline was told, where its call has
    a frame_rate."""
    return float((call or config.evaluation_call).get("frame_rate", config.fps))
