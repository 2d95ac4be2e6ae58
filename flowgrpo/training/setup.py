"""Set-up of a run: checks arguments and config, and opens the policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import config_as_json
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.plan import Plan
from flowgrpo.data.prompts import PromptSource
from flowgrpo.distributed.processes import Processes
from flowgrpo.pipelines.call_checks import check_calls
from flowgrpo.pipelines.compile import compile_blocks
from flowgrpo.pipelines.loading import device_of, open_pipeline
from flowgrpo.policy.policy import Policy
from flowgrpo.preflight.inputs import Inputs, read_inputs, with_paths
from flowgrpo.preflight.sharding import check_sharded_experts, check_sharding
from flowgrpo.runs.folder import RunFolder
from flowgrpo.runs.provenance import unrecorded_arguments
from flowgrpo.runs.trackers import check_trackers
from flowgrpo.training.optimizer import optimizer_class


@dataclass(kw_only=True, frozen=True)
class Arguments:
    """Arguments of the trainer other than the config; None leaves the choice to the config."""

    model: Any = None
    reward_funcs: Any = None
    train_dataset: PromptSource | None = None
    eval_dataset: PromptSource | None = None
    held_out_funcs: Any = None
    reward_weights: Sequence[float] | None = None


@dataclass(kw_only=True, frozen=True)
class Setup:
    """A run that is checked as far as it can be without loading a model."""

    config: GRPOConfig
    inputs: Inputs
    folder: RunFolder
    unrecorded: list[str]
    """Names of arguments that config.yaml cannot hold."""


def set_up(args: GRPOConfig, given: Arguments, processes: Processes, *, resume: bool) -> Setup:
    """Checks everything that can be checked before a model is loaded.

    Raises:
        ConfigError: a setting, prompt or reward that cannot work, or another run in the folder.
    """
    config = with_paths(args, given.model, given.train_dataset, given.eval_dataset)
    check_trackers(config.trackers)
    inputs = read_inputs(
        config,
        reward_funcs=given.reward_funcs,
        reward_weights=given.reward_weights,
        held_out_funcs=given.held_out_funcs,
        train_dataset=given.train_dataset,
        eval_dataset=given.eval_dataset,
    )
    processes.assert_same("the input", inputs.fingerprint)
    processes.assert_same("the config", config_as_json(config))
    processes.assert_same("--resume", resume)
    for warning in check_sharding(config, inputs, processes.world_size):
        processes.warn(warning)
    folder = RunFolder(Path(config.output_dir).expanduser())
    processes.on_main(lambda: folder.check_usable(resume, config, inputs.fingerprint))
    optimizer_class(config.train)
    device_of(config.model)
    unrecorded = unrecorded_arguments(config, **vars(given))
    return Setup(config=config, inputs=inputs, folder=folder, unrecorded=unrecorded)


def open_policy(model: Any, config: GRPOConfig, plan: Plan) -> Policy:
    """The policy on a given pipeline, or on the one that the config names.

    Raises:
        ConfigError: a setting that does not work with this pipeline.
    """
    is_given = isinstance(model, DiffusionPipeline)
    pipe = model if is_given else open_pipeline(config.model, shard=config.train.shard)
    check_calls(pipe, config)
    shard_device = None if is_given else device_of(config.model).type
    policy = Policy(pipe, config.train, seed_for(config.seed, "lora"), shard_device)
    check_sharded_experts(policy, plan)
    if config.model.compile:
        compile_blocks(policy.denoisers)
    return policy
