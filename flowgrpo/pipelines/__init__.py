"""Everything flowgrpo knows about diffusers: opening, calling, patching and reading pipelines."""
