"""Summaries, figures and grids of a run, and the code that loads its result."""
