"""What people look at: summaries, curves, grids, and the code that loads a result."""
