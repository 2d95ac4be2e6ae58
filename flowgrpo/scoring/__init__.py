"""Finding rewards, calling them, and checking what they return."""
