"""Reads and checks everything that a run needs besides models: rewards, prompts and the plan."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sampling_config import require_stochastic_steps
from flowgrpo.data.columns import is_media
from flowgrpo.data.media import digest
from flowgrpo.data.plan import Plan
from flowgrpo.data.prompts import PromptSource, load_prompts
from flowgrpo.data.row import Row
from flowgrpo.scoring.loading import as_rewards, load_rewards, unique, weighted
from flowgrpo.scoring.reward import Reward
from flowgrpo.scoring.validation import validate_rows


@dataclass(kw_only=True, frozen=True)
class Inputs:
    """Rewards, prompts and plan of a run, as `train` and `plan` read them."""

    rewards: Sequence[Reward]
    """The rewards that are trained on; evaluations report them, too."""
    held_out: Sequence[Reward]
    """The rewards that only evaluations compute."""
    rows: Sequence[Row]
    test_rows: Sequence[Row]
    plan: Plan

    @property
    def scored(self) -> list[Reward]:
        """All rewards of an evaluation; the first is its headline."""
        return [*self.held_out, *self.rewards]

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the inputs that a resumed run must share: a hash of the rows with the contents
        of their images, and the names and weights of the rewards."""
        return {
            "train_prompts": _sha256(self.rows),
            "test_prompts": _sha256(self.test_rows),
            "rewards": {reward.name: reward.weight for reward in self.rewards},
            "held_out": [reward.name for reward in self.held_out],
        }

    @property
    def warnings(self) -> list[str]:
        shared = {_plain(row) for row in self.rows} & {_plain(row) for row in self.test_rows}
        if not shared:
            return []
        return [f"{len(shared)} test prompts are training prompts too."]


def read_inputs(
    config: GRPOConfig,
    *,
    reward_funcs: Any = None,
    reward_weights: Sequence[float] | None = None,
    held_out_funcs: Any = None,
    train_dataset: PromptSource | None = None,
    eval_dataset: PromptSource | None = None,
) -> Inputs:
    """Reads what `config` names. Arguments that are given take the place of its entries.

    Raises:
        ConfigError: a reward, a prompt or a setting cannot work.
    """
    rewards = as_rewards(reward_funcs) if reward_funcs else load_rewards(config.rewards)
    if reward_weights is not None:
        rewards = weighted(rewards, reward_weights)
    held_out = as_rewards(held_out_funcs) if held_out_funcs else load_rewards(config.held_out)
    if not rewards:
        raise ConfigError(
            "rewards is empty, but training needs one; for example, add `reward: ocr`."
        )
    unique([*held_out, *rewards])
    offload = config.model.offload
    rewards = [replace(reward, offload=offload) for reward in rewards]
    held_out = [replace(reward, offload=offload) for reward in held_out]
    require_stochastic_steps(config.sampling)
    train = config.prompts.train if train_dataset is None else train_dataset
    test = config.prompts.test if eval_dataset is None else eval_dataset
    if train is None:
        raise ConfigError("prompts.train is missing; name a prompt file.")
    rows, test_rows = load_prompts(train), [] if test is None else load_prompts(test)
    validate_rows([*rewards, *held_out], [*rows, *test_rows])
    return Inputs(
        rewards=rewards,
        held_out=held_out,
        rows=rows,
        test_rows=test_rows,
        plan=Plan(config=config, rows=rows),
    )


def with_paths(config: GRPOConfig, model: Any, train_dataset: Any, eval_dataset: Any) -> GRPOConfig:
    """The config with those arguments that are paths, so that the run folder records them."""
    data = config.model_dump()
    data["model"] |= _as_path("path", model)
    data["prompts"] |= _as_path("train", train_dataset) | _as_path("test", eval_dataset)
    return GRPOConfig.model_validate(data)


def _as_path(key: str, value: Any) -> dict[str, str]:
    return {key: str(value)} if isinstance(value, (str, Path)) else {}


def _sha256(rows: Sequence[Row]) -> str:
    content = [
        [row.prompt, {k: digest(v) if is_media(k) else v for k, v in row.columns.items()}]
        for row in rows
    ]
    return hashlib.sha256(json.dumps(content, default=_stable).encode()).hexdigest()


def _stable(value: Any) -> Any:
    """A stand-in for a value that JSON cannot hold: its contents, without memory addresses, which
    change between runs."""
    if isinstance(value, (Image.Image, bytes)):
        return digest(value)
    return value.tolist() if hasattr(value, "tolist") else re.sub(r" at 0x\w+", "", repr(value))


def _plain(row: Row) -> str:
    """The prompt without the case and spacing in which near-copies differ."""
    return " ".join(row.prompt.lower().split())
