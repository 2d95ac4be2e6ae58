"""The algorithm, and a run's life around it."""
