"""``python -m megatron.ft_trainer.checkpointing verify FOLDER``: lists checkpoints and checks every file of them."""

import argparse
import sys
from pathlib import Path

from megatron.ft_trainer.checkpointing import inventory


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 0: all checkpoints are valid, 1: some are not, 2: there are none."""
    parser = argparse.ArgumentParser(prog="python -m megatron.ft_trainer.checkpointing", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="list the checkpoints in a folder and check every file of them")
    command.add_argument("folder", type=Path, help="a --save folder")
    options = parser.parse_args(arguments)
    try:
        return _verify(options.folder)
    except OSError as error:
        print(f"error: {error.filename or options.folder}: {error.strerror}", file=sys.stderr)
        return 2


def _verify(folder: Path) -> int:
    entries = inventory.scan(folder)
    if not entries:
        print(f"{folder}: no checkpoints")
        return 2
    newest = inventory.newest_complete(entries)
    bad = 0
    for entry in entries:
        lines = [entry.problem] if entry.problem else []
        size = ""
        if entry.complete:
            files = inventory.read_manifest(folder / entry.name).files
            lines = inventory.problems(folder / entry.name, files)
            size = f", {len(files)} files, {sum(f.bytes for f in files.values()) / 2**20:.1f} MiB"
        bad += bool(lines)
        state = "BROKEN" if lines else "ok"
        print(f"{entry.name}: {state}{size}{', newest' if entry == newest else ''}")
        for line in lines:
            print(f"    {line}")
    for name in sorted(p.name for p in folder.iterdir() if inventory.is_leftover(p.name)):
        print(f"{name}: a save or a removal that is under way or was interrupted")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
