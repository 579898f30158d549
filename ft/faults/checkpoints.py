"""Damage to a checkpoint on disk, for tests of recovery from an older checkpoint."""

import os
from pathlib import Path


def damage(checkpoint: Path, kind: str) -> Path:
    """Damage the largest file of a checkpoint.

    Args:
        checkpoint: folder of the checkpoint.
        kind: "corrupt-checkpoint" (flip one bit), "truncate-checkpoint" (remove the second half of the file) or
            "remove-checkpoint" (remove the file).

    Returns:
        The path of the file.
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
