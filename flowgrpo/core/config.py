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
"""New names of settings, by the names they had in earlier versions."""


class GRPOConfig(Section):
    """A run: its sections, and settings that belong to none of them."""

    seed: int = 0
    """Seed of every random draw: prompts, windows, noise and the initial LoRA."""
    output_dir: str = "runs/flowgrpo"
    """Path of the run folder."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Number of epochs between checkpoints."""
    checkpoint_keep: int = Field(default=5, ge=1)
    """Number of newest checkpoints to keep. The best evaluated one is kept as well."""
    trackers: list[str] = Field(default_factory=list)
    """Experiment trackers that get a copy of the metrics: `tensorboard`, `wandb`, `trackio` and
    others that accelerate supports, if they are installed."""
    fps: float = Field(default=16, gt=0)
    """Frame rate of saved videos; the pipeline's `frame_rate` argument takes precedence."""
    model: ModelConfig = ModelConfig()
    """The pipeline, and how it uses memory and time."""
    prompts: PromptsConfig = PromptsConfig()
    """Where prompts come from."""
    rewards: list[RewardConfig] = Field(default_factory=list)
    """Rewards to train on, which are scored at evaluation too. At least one is required, unless
    rewards are passed in Python; `reward: ocr` is short for a list of one."""
    held_out: list[RewardConfig] = Field(default_factory=list)
    """Rewards that are scored at evaluation only; the first one is the headline of the run."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are sampled."""
    objective: GRPOObjective = GRPOObjective()
    """The loss."""
    train: TrainConfig = TrainConfig()
    """What is trained, and how."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and how the policy is evaluated."""
    guards: GuardsConfig = GuardsConfig()
    """What ends a run that goes wrong."""

    @property
    def sampling_call(self) -> dict[str, Any]:
        """Arguments of the pipeline's call in rollouts."""
        return {**self.sampling.call, "num_inference_steps": self.sampling.num_inference_steps}

    @property
    def evaluation_call(self) -> dict[str, Any]:
        """Arguments of the pipeline's call at evaluation; those of rollouts unless set."""
        call = self.sampling.call if self.evaluation.call is None else self.evaluation.call
        steps = self.evaluation.num_inference_steps or self.sampling.num_inference_steps
        return {**call, "num_inference_steps": steps}

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, data: Any) -> Any:
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
    def _list_rewards(cls, data: Any) -> Any:
        """Expands `reward: ocr` to a list of one, and a name to `{reward: name}`."""
        if isinstance(data, dict):
            data = dict(data)
            if "reward" in data:
                if data.get("rewards"):
                    raise ConfigError(
                        "reward and rewards are both set, but mean the same; keep rewards."
                    )
                data["rewards"] = data.pop("reward")
            for key in ("rewards", "held_out"):
                if isinstance(data.get(key), (str, dict)):
                    data[key] = [data[key]]
                if isinstance(data.get(key), list):
                    data[key] = [{"reward": r} if isinstance(r, str) else r for r in data[key]]
        return data

    @model_validator(mode="after")
    def _check_shard(self) -> "GRPOConfig":
        if self.train.shard and self.model.compile:
            raise ConfigError(
                "model.compile is true with train.shard, but sharded blocks cannot be compiled; "
                "leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _check_max_kl(self) -> "GRPOConfig":
        if self.guards.max_kl is not None and self.objective.kl_weight == 0:
            raise ConfigError(
                f"guards.max_kl is {self.guards.max_kl:g}, but KL is only measured with "
                "objective.kl_weight above 0; set it, to 1e-6 for example, or leave the bound out."
            )
        return self

    @model_validator(mode="after")
    def _check_update_sizes(self) -> "GRPOConfig":
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
                f"{per_inner_epoch} updates per inner epoch; use {nearest}."
            )
        return self


def frame_rate(config: GRPOConfig, call: Mapping[str, Any] | None = None) -> float:
    """Returns the frame rate of videos made with `call`, which is the evaluation's by default: its
    `frame_rate` argument if it has one, else `config.fps`."""
    return float((call or config.evaluation_call).get("frame_rate", config.fps))
