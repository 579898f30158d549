"""Starts ``ft run`` in a process that dies with the one that started it. ``sys.argv[1:]`` is its command line."""

import runpy
import sys


def main() -> None:
    """Run the command ``ft`` as ``python -m ft`` does."""
    sys.argv = ["ft", *sys.argv[1:]]
    runpy.run_module("ft", run_name="__main__")
