"""Scores of a policy on prompt sets, with the stock sampler."""
