"""Checks of a replay's gradients: do they reach the weights, and match a finite difference?"""

import torch

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.weights import trained_values

LOG_PROB_CHANGE = 2e-3
"""Change of the summed log-probs that each half of the finite difference aims at: far above
rounding errors, and small enough to be linear."""


def gradient_share(policy: Policy) -> float:
    """Share of the trained tensors whose gradient is not zero, in [0, 1]."""
    gradients = [p.grad for p in policy.parameters.values()]
    return sum(g is not None and bool(g.any()) for g in gradients) / len(gradients)


def gradient_error(policy: Policy, rollout: Rollout) -> float:
    """Relative error of the squared gradient norm against the slope of the log-probs along the
    gradient, from a central difference.

    The gradients in `policy.parameters` must be those of the rollout's summed log-probs. Their
    slope along the gradient g is |g|^2; a part of the model that lets no gradient through makes the
    measured slope differ, and no other check finds it.
    """
    weights = {name: p.detach() for name, p in policy.parameters.items()}
    gradient = {n: p.grad for n, p in policy.parameters.items() if p.grad is not None}
    squared_norm = sum(float(g.double().square().sum()) for g in gradient.values())
    step = LOG_PROB_CHANGE / squared_norm
    sums = []
    for sign in (1, -1):
        moved = {n: weights[n] + sign * step * gradient[n] for n in gradient}
        with trained_values(policy, {**weights, **moved}):
            sums.append(_summed_log_prob(policy, rollout))
    return abs((sums[0] - sums[1]) / (2 * LOG_PROB_CHANGE) - 1)


def _summed_log_prob(policy: Policy, rollout: Rollout) -> float:
    values = []
    policy.replay(
        rollout,
        lambda step, now: values.append(log_prob(step.next_latents, now.mean, now.std)),
        gradients=False,
    )
    return float(torch.stack(values).double().sum())
