"""The mathematics: SDE steps, advantages, objectives. Pure functions of tensors; torch alone."""
