"""A stock pipeline as a policy: rollouts on a tape, and replays with gradients."""
