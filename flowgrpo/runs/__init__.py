"""Everything a run keeps on disk: its folder, checkpoints, and the record of how it was made."""
