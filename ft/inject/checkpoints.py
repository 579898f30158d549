"""Damage to the newest checkpoint of a run."""

import os
from pathlib import Path

from megatron.training.checkpointing import naming, verify


def damage(folder: str | Path, kind: str) -> Path | None:
    """Does to the largest file of the newest complete checkpoint in ``folder`` what ``kind`` says.

    Args:
        kind: "corrupt-checkpoint" (one bit flips), "truncate-checkpoint" (half of it is gone), "remove-checkpoint".

    Returns:
        the file; None where there is no checkpoint yet.
    """
    folder = Path(folder)
    newest = naming.newest_complete(verify.scan(folder)) if folder.is_dir() else None
    if newest is None:
        return None
    files = [path for path in (folder / newest.name).iterdir() if path.suffix == ".distcp"]
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
