"""Everything that is checked or predicted before a run starts."""
