"""``python -m megatron.ft_trainer.checkpointing verify FOLDER``: lists checkpoints and checks every file of them."""

import argparse
import sys
from pathlib import Path

from megatron.ft_trainer.checkpointing import inventory


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 0: all checkpoints are valid, 1: some are not, 2: there are none."""
    parser = argparse.ArgumentParser(prog="python -m megatron.ft_trainer.checkpointing", description=__doc__)
    parser.add_argument("command", choices=["verify"], help="list the checkpoints in a folder and check their files")
    parser.add_argument("folder", type=Path, help="a --save folder")
    folder = parser.parse_args(arguments).folder
    try:
        entries = inventory.scan(folder)
    except OSError as error:
        print(f"error: {error.filename or folder}: {error.strerror}", file=sys.stderr)
        return 2
    bad = 0
    for entry in entries:
        path = folder / entry.name
        lines = [entry.problem] if entry.problem else inventory.problems(path, inventory.read_manifest(path).files)
        bad += bool(lines)
        print(f"{entry.name}: {'BROKEN' if lines else 'ok'}", *lines, sep="\n    ")
    print(f"{folder}: {len(entries) - bad} sound checkpoints, {bad} broken ones")
    return 1 if bad else 0 if entries else 2


if __name__ == "__main__":
    sys.exit(main())
