"""Checks of configs with several processes, and of denoisers that are sharded among them."""

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError
from flowgrpo.data.plan import Plan
from flowgrpo.pipelines.parts import find_denoisers
from flowgrpo.policy.policy import Policy
from flowgrpo.preflight.inputs import Inputs


def check_sharded_experts(policy: Policy, plan: Plan) -> None:
    """Checks that all processes replay the same denoiser at the same time.

    A sharded denoiser is gathered by all processes together; which of several denoisers is called
    depends on the step.

    Raises:
        ConfigError: the window moves, so that processes would need different denoisers at once.
    """
    first, last = plan.window_bounds
    experts = find_denoisers(policy.pipe)
    if policy.is_sharded and len(experts) > 1 and last - first + 1 > plan.window_size:
        raise ConfigError(
            f"train.shard is true with {' and '.join(experts)}, but sampling.window moves, so that "
            "processes would need different ones at once; set sampling.window.last to "
            f"{first + plan.window_size - 1}."
        )


def check_sharding(config: GRPOConfig, inputs: Inputs, processes: int) -> list[str]:
    """Returns warnings about how the groups of an update are divided among processes.

    Raises:
        ConfigError: the processes of a sharded denoiser would have unequal work.
    """
    size, groups = len(inputs.plan.update_batches()[0]), config.sampling.groups_per_epoch
    if config.train.shard and processes == 1:
        raise ConfigError(
            "train.shard is true, but there is only one process; launch several with torchrun, or "
            "set it to false."
        )
    if config.train.shard and size % processes:
        updates = groups // size
        raise ConfigError(
            f"sampling.groups_per_epoch is {groups}, which makes {size} groups per update, but "
            f"with train.shard these must be a multiple of the {processes} processes; use "
            f"{updates * processes * max(1, round(size / processes))}."
        )
    columns = {tuple(sorted(k for k, v in r.columns.items() if v is not None)) for r in inputs.rows}
    if config.train.shard and len(columns) > 1:
        raise ConfigError(
            "prompts.train has rows with different columns, but with train.shard all processes "
            "must call the denoiser equally often; give every row the same columns."
        )
    if size < processes:
        return [
            f"an update has {size} groups, so {processes - size} of the {processes} processes "
            "wait; make sampling.groups_per_epoch larger."
        ]
    return []
