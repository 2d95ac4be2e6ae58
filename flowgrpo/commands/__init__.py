"""The commands of the command line, one file each. None of them imports typer."""
