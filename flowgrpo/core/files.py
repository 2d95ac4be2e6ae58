"""Files that a crash leaves either old or new, and the folders of epochs."""

import os
from pathlib import Path


def epoch_folders(parent: Path) -> list[Path]:
    """Folders of checkpoints or evaluations, oldest first; whether they are whole is not said."""
    found = [path for path in parent.glob("epoch-*") if path.name.partition("-")[2].isdigit()]
    return sorted(found, key=epoch_of)


def epoch_of(path: Path) -> int:
    """Of a checkpoint or an evaluation."""
    return int(path.name.partition("-")[2])


def write_atomically(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
