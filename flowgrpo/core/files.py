"""Atomic writes of files and folders, which a crash leaves either old or new; folders of epochs."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file; a crash leaves the old file or the new one, never part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def atomic_folder(target: Path, *, write: bool = True) -> Iterator[Path]:
    """Yields a temporary folder to fill in the block, which then replaces `target`.

    Everything in it is synced before it is renamed. After an error `target` is unchanged.

    Args:
        write: False on processes that enter the block without writing files: then nothing is made
            or replaced.
    """
    temporary = target.with_name(f".{target.name}.partial")
    if not write:
        yield temporary
        return
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def rename_aside(path: Path, suffix: str) -> Path:
    """Renames a folder `NAME` to the hidden `.NAME.suffix`, which it replaces."""
    aside = path.with_name(f".{path.name}.{suffix}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return aside


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def epoch_folders(parent: Path) -> list[Path]:
    """Folders of checkpoints or evaluations in `parent`, oldest first, complete or not."""
    found = [path for path in parent.glob("epoch-*") if path.name.partition("-")[2].isdigit()]
    return sorted(found, key=epoch_of)


def epoch_of(path: Path) -> int:
    """Epoch in the name of a folder of a checkpoint or an evaluation."""
    return int(path.name.partition("-")[2])


def _replace(temporary: Path, target: Path) -> None:
    for path in [*files_in(temporary), temporary, *_folders_in(temporary)]:
        _sync(path)
    former = target.with_name(f".{target.name}.removed")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        os.replace(target, former)
    os.replace(temporary, target)
    _sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _folders_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_dir()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
