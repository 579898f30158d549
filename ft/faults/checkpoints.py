"""Damage to the newest checkpoint of a run."""

import os
from pathlib import Path


def damage(checkpoint: Path, kind: str) -> Path:
    """Does to the largest file of a checkpoint what ``kind`` says.

    Args:
        checkpoint: the checkpoint's folder.
        kind: "corrupt-checkpoint" (one bit flips), "truncate-checkpoint" (half of it is gone), "remove-checkpoint".

    Returns:
        the file.
    """
    files = [path for path in checkpoint.iterdir() if path.suffix == ".distcp"]
    file = max(files, key=lambda path: (path.stat().st_size, path.name))
    if kind == "remove-checkpoint":
        file.unlink()
    elif kind == "truncate-checkpoint":
        os.truncate(file, file.stat().st_size // 2)
    else:
        with open(file, "r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            byte = stream.read(1)[0]
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte ^ 1]))
    return file
