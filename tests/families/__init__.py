"""Tiny, randomly initialised pipelines of real diffusers classes: one small builder a family."""
