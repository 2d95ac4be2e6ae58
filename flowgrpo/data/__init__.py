"""Prompts with their images and videos, samples as files, and the groups of each epoch."""
