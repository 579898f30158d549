"""`python -m megatron.patches`: what is patched, where and why, and whether patches and calls fit a megatron-core.

The command checks a release of megatron-core (by default the installed one) against the manifest of patches and
against this project's calls. It also lists functions of that release that call a collective only once per process and
that have not been reviewed: after a recovery, a worker that joins later may call the collective alone (``once.py``).

Exit status: 0 if everything fits, 1 if something does not, 2 on bad input.
"""

import argparse
import json
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from ft.base.errors import UserError
from megatron.patches.calls import CallCheck, check_calls
from megatron.patches.check import Finding, check
from megatron.patches.instances import SEAMS
from megatron.patches.manifest import ELSEWHERE, MANIFEST, SUPPORTED_CORE
from megatron.patches.once import OnceOnly, unknown
from megatron.patches.sources import CoreSources, OwnSources, archived_core, installed_core


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments), and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron.patches", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="check against this wheel or source archive instead of the installed core",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        core = archived_core(options.wheel) if options.wheel else installed_core()
        findings = check([*MANIFEST, *ELSEWHERE], core, with_torch=not options.wheel and find_spec("torch") is not None)
        calls, once = check_calls(OwnSources(), core), unknown(core)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(as_json(findings, calls, once, core))
    else:
        print(as_table(findings, core), "", calls_table(calls), once_table(once), sep="\n")
    return 0 if _all_fits(findings, calls, once) else 1


def as_json(findings: list[Finding], calls: CallCheck, once: list[OnceOnly], core: CoreSources) -> str:
    """Return one JSON object with the results.

    The object holds the checked release of core, whether everything fits, one entry per patch, one entry per place in
    this project's sources that does not fit core, and one entry per function whose collectives a worker that joins
    later might call alone.
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
    fits = _all_fits(findings, calls, once)
    called = {"checked": calls.calls, "misfits": [asdict(misfit) for misfit in calls.misfits]}
    summary = {"core": core.version, "origin": core.origin, "fits": fits, "patches": patches, "calls": called}
    return json.dumps({**summary, "once": [asdict(each) for each in once]}, indent=1)


def as_table(findings: list[Finding], core: CoreSources, width: int = 120) -> str:
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

    lines = [f"megatron-core {core.version} at {core.origin}", f"supported: {SUPPORTED_CORE}", ""]
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
    counts = Counter(finding.status for finding in findings)
    lines += ["", f"{len(findings)} symbols: " + ", ".join(f"{n} {status}" for status, n in counts.items())]
    return "\n".join(lines)


def calls_table(calls: CallCheck) -> str:
    """Return a table of the places in this project's sources that do not fit core, followed by a line with counts."""
    lines = ["USES OF MEGATRON-CORE THAT DO NOT FIT IT"] if calls.misfits else []
    for misfit in calls.misfits:
        lines += [f"{misfit.file}:{misfit.line}", f"    {misfit.callee}: {misfit.problem}"]
    return "\n".join([*lines, f"{calls.calls} calls: {len(calls.misfits)} misfits"])


def once_table(once: list[OnceOnly]) -> str:
    """Return a table of the collectives that nobody has reviewed yet, followed by their number."""
    lines = (
        ["COLLECTIVES THAT MEGATRON-CORE CALLS ONCE PER PROCESS AND THAT A RECOVERY DOES NOT REPEAT"] if once else []
    )
    lines += [f"{each.name}, line {each.line}: depends on {', '.join(each.state)}" for each in once]
    return "\n".join([*lines, f"collectives called once per process: {len(once)} not reviewed"])


def _all_fits(findings: list[Finding], calls: CallCheck, once: list[OnceOnly]) -> bool:
    return all(finding.fits for finding in findings) and not calls.misfits and not once


def _columns(finding: Finding) -> tuple[str, str, str]:
    return finding.status, finding.patch.when, f"{finding.patch.file}.py"


if __name__ == "__main__":
    sys.exit(main())
