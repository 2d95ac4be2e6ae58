"""What lies on disk: the run folder, checkpoints, and the record of how a run was made."""
