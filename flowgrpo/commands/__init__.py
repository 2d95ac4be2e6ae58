"""What the command line does, a file per command. They know nothing of typer."""
