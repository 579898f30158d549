"""`python -m megatron.patches`: what is replaced in megatron-core and torch, where and why, and whether it fits.

The command compares the manifest of patches with the megatron-core and torch that it imports. It also lists what is
replaced on single objects, and the collectives that megatron-core calls only once per process.

Exit status: 0 if everything fits, 1 if something does not, 2 on bad input.
"""

import argparse
import json
import sys
import textwrap
import warnings
from collections import Counter

from ft.base.errors import UserError
from megatron.patches.instances import SEAMS
from megatron.patches.manifest import ELSEWHERE, MANIFEST, ONCE_PER_PROCESS, SUPPORTED_CORE
from megatron.patches.registry import Finding, check, core_version


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments), and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron.patches", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # core tells which packages of kernels it does not find
            findings = check([*MANIFEST, *ELSEWHERE])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(as_json(findings) if options.json else as_table(findings))
    return 0 if all(finding.fits for finding in findings) else 1


def as_json(findings: list[Finding]) -> str:
    """Return one JSON object: the version of core, whether everything fits, one entry per patch, and the collectives
    that core calls once per process, each with the reason why a recovery may.
    """
    patches = [
        {
            "module": finding.patch.module,
            "symbol": finding.patch.symbol,
            "kind": finding.patch.kind,
            "why": finding.patch.why,
            "file": finding.patch.file,
            "when": finding.patch.when,
            "checked_on": finding.patch.checked_on,
            "expected": finding.patch.signatures,
            "found": finding.found,
            "status": finding.status,
        }
        for finding in findings
    ]
    fits = all(finding.fits for finding in findings)
    return json.dumps({"core": core_version(), "fits": fits, "patches": patches, "once": ONCE_PER_PROCESS}, indent=1)


def as_table(findings: list[Finding], width: int = 120) -> str:
    """Return the table of patches as text: one row for each symbol of core; other symbols are grouped by reason."""
    of_core = [finding for finding in findings if finding.patch.kind == "core"]
    of_others = [finding for finding in findings if finding.patch.kind != "core"]
    header = ("STATUS", "WHEN", "FILE")
    sizes = [max(map(len, column)) for column in zip(header, *map(_columns, findings), strict=True)]
    indent = " " * 16

    def row(columns: tuple[str, ...], text: str) -> str:
        return "".join(f"{cell:{size}}  " for cell, size in zip(columns, sizes, strict=True)) + text

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    lines = [f"megatron-core {core_version()}", f"supported: {SUPPORTED_CORE}", ""]
    lines.append(row(header, "SYMBOL OF MEGATRON-CORE, AND WHY"))
    for finding in of_core:
        lines += [row(_columns(finding), finding.patch.name), *wrapped(finding.patch.why)]
        if not finding.fits:
            expected = " or ".join(finding.patch.signatures) or "a name of that module"
            lines += wrapped(f"expected {expected}, found {finding.found or 'nothing of that name'}")
    lines += ["", row(header, "SYMBOLS OF TORCH AND TRANSFORMER ENGINE, AND WHY")]
    groups: dict[tuple, list[str]] = {}
    for finding in of_others:
        groups.setdefault((_columns(finding), finding.patch.why), []).append(finding.patch.name)
    for (columns, why), names in groups.items():
        lines += [row(columns, names[0]), *wrapped(", ".join(names[1:])), *wrapped(why)]
    lines += ["", "ATTRIBUTES OF SINGLE OBJECTS, AND WHAT IS WRAPPED AROUND THEM"]
    for attribute, around in SEAMS.items():
        lines += [attribute, *wrapped(around)]
    lines += ["", "COLLECTIVES THAT MEGATRON-CORE CALLS ONCE PER PROCESS, AND WHY A WORKER MAY JOIN LATER"]
    for function, why in ONCE_PER_PROCESS.items():
        lines += [f"megatron.core.{function}", *wrapped(why)]
    counts = Counter(finding.status for finding in findings)
    lines += ["", f"{len(findings)} symbols: " + ", ".join(f"{n} {status}" for status, n in counts.items())]
    return "\n".join(lines)


def _columns(finding: Finding) -> tuple[str, str, str]:
    return finding.status, finding.patch.when, f"{finding.patch.file}.py"


if __name__ == "__main__":
    sys.exit(main())
