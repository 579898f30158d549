"""`python -m megatron.patches`: what is replaced in megatron-core and torch, where and why, and whether it fits.

The command compares the records of the patches with the megatron-core and torch that it imports. It also lists what is
replaced on single objects, and the collectives that megatron-core calls only once per process.

Exit status: 0 if everything fits, 1 if something does not, 2 on bad input.
"""

import argparse
import sys
import textwrap
import warnings
from collections import Counter

from ft.base.errors import UserError
from megatron.patches.manifest import ELSEWHERE, ON_OBJECTS, ONCE_PER_PROCESS, SUPPORTED_CORE, SUPPORTED_TORCH
from megatron.patches.registry import PatchFinding, check, core_version, everything


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments), and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron.patches", description=__doc__.split("\n")[0])
    parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # core tells which packages of kernels it does not find
            findings = check([*everything(), *ELSEWHERE])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(as_table(findings))
    return 0 if all(finding.fits for finding in findings) else 1


def as_table(findings: list[PatchFinding]) -> str:
    """Return the table of patches as text: one row for symbols that are replaced for the same reason."""
    rows: dict[tuple[str, ...], list[PatchFinding]] = {}
    for finding in findings:
        patch = finding.patch
        rows.setdefault((finding.status, patch.when, f"{patch.file}.py", patch.why), []).append(finding)
    sizes = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"megatron-core {core_version()}", f"supported: {SUPPORTED_CORE}; {SUPPORTED_TORCH}", ""]
    for (*columns, why), together in rows.items():
        lines.append("  ".join(f"{cell:{size}}" for cell, size in zip(columns, sizes, strict=True)).rstrip())
        lines += [*_wrapped(", ".join(finding.patch.name for finding in together)), *_wrapped(why)]
        for finding in (each for each in together if not each.fits):
            expected = " or ".join(finding.patch.signatures) or "a name of that module"
            found = finding.found or "nothing of that name"
            lines += _wrapped(f"{finding.patch.symbol}: expected {expected}, found {found}")
    lines += ["", "ATTRIBUTES OF SINGLE OBJECTS, AND WHAT IS WRAPPED AROUND THEM"]
    for attribute, around in ON_OBJECTS.items():
        lines += [attribute, *_wrapped(around)]
    lines += ["", "COLLECTIVES THAT MEGATRON-CORE CALLS ONCE PER PROCESS, AND WHY A WORKER MAY JOIN LATER"]
    for function, why in ONCE_PER_PROCESS.items():
        lines += [f"megatron.core.{function}", *_wrapped(why)]
    counts = Counter(finding.status for finding in findings)
    lines += ["", f"{len(findings)} symbols: " + ", ".join(f"{n} {status}" for status, n in counts.items())]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    indent = " " * 8
    return textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
