"""The last checks before the first epoch, on the opened pipeline itself."""

from flowgrpo.core.config import GRPOConfig
from flowgrpo.pipelines.call_checks import call_warnings
from flowgrpo.policy.policy import Policy
from flowgrpo.preflight.inputs import Inputs
from flowgrpo.preflight.replay_check import check_replay
from flowgrpo.scoring.audit import require_varying_scores


def check_start(
    policy: Policy, inputs: Inputs, config: GRPOConfig, *, check_rewards: bool
) -> list[str]:
    """Proves that a replay reproduces its rollout, and that rewards distinguish images.

    Args:
        check_rewards: False on a resumed run, whose rewards have been checked.

    Returns:
        Warnings about settings that work, but are probably mistakes.

    Raises:
        ReplayError: the replay differs; training would be biased.
        RewardError: a reward gives the same score to a black, a white and a noise sample.
    """
    row = inputs.rows[0]
    rollout = check_replay(policy, row, config)
    if check_rewards:
        for reward in inputs.scored:
            require_varying_scores(reward, row, config.sampling.call, videos=policy.makes_videos)
    return call_warnings(policy.pipe, config.model.path, rollout.call, rollout.samples[0])
