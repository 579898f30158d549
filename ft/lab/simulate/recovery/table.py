"""Format the results of ``ft simulate recovery`` as text and as JSON values.

The results are the process groups that a hot-swap rebuilds in several parallel layouts, and predicted times.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ft.lab.simulate.recovery.deadpool import RECOVERY_S
from ft.lab.simulate.recovery.fit import Fit, Line
from ft.lab.simulate.recovery.sweep import FULL, NODE, RANK, Entry, Rebuild
from ft.show.text import count, percent, seconds, table

_KIND = {FULL: "all groups", RANK: "a rank", NODE: "a node"}


def as_text(entries: Sequence[Entry], fitted: Fit | None) -> str:
    """Return tables of the groups to rebuild, of the time this takes, and of the time of the planner's decision.

    Args:
        entries: results, one per layout.
        fitted: the fitted model of the rebuild time; None: times are left out.
    """
    parts = [
        "Groups to rebuild. A range is from the case that no other rank is in an operation to the case that all "
        "ranks are blocked in one.",
        "",
    ]
    parts += [_what(entries), "", *_what_notes(entries), ""]
    if fitted is not None:
        parts += [
            "Time to rebuild them if all ranks are blocked.",
            "",
            _times(entries, fitted),
            "",
            *_fit_notes(fitted),
            "",
        ]
    else:
        parts += ["Give --results (of tools/bench/rebuild.py) or --measure to predict how long this takes.", ""]
    parts += [
        "Time of the decision by the production code on one core of this machine (reading: one report, times the "
        "number of reports).",
        "",
    ]
    parts.append(_decisions(entries))
    return "\n".join(parts)


def as_values(entries: Sequence[Entry], fitted: Fit | None) -> list[dict[str, Any]]:
    """Return one mapping per layout and kind of loss."""
    found = []
    for entry in entries:
        for rebuild in entry.rebuilds:
            values = {
                **asdict(entry.sizes),
                "dp": entry.sizes.dp,
                "kind": rebuild.kind,
                "groups_in_all": entry.groups,
                "deferred": rebuild.deferred,
                "most": asdict(rebuild.most),
                "least": asdict(rebuild.least),
            }
            if rebuild.decision is not None:
                values["decision_s"] = rebuild.decision.seconds
                values["reading_s"] = rebuild.decision.read_s * rebuild.decision.survivors
                values["reports_bytes"] = rebuild.decision.report_bytes * rebuild.decision.survivors
            if fitted is not None:
                values["measured_s"] = fitted.measured(entry.sizes.ranks, rebuild.kind, rebuild.most)
                values["fit_here_s"] = fitted.here.at(rebuild.most)
                values["fit_core_per_rank_s"] = fitted.spread_out(rebuild.most)
                values["extrapolated"] = entry.sizes.ranks > fitted.most_ranks
            values["deadpool_recovery_s"] = RECOVERY_S.get(entry.sizes.ranks)
            found.append(values)
    return found


def _what(entries: Sequence[Entry]) -> str:
    head = ("ranks", "layout", "lost", "groups", "of", "deferred", "memberships", "connections", "of one rank")
    rows = []
    for entry, rebuild in _each(entries):
        most, least = rebuild.most, rebuild.least
        rows.append(
            (
                *_place(entry, rebuild),
                _range(least.groups, most.groups),
                f"{entry.groups:,}",
                str(rebuild.deferred),
                f"{most.memberships:,}",
                _range(least.connections, most.connections),
                f"{most.most_connections:,}",
            )
        )
    return table(head, _grouped(rows), right=(0, 3, 4, 5, 6, 7, 8))


def _what_notes(entries: Sequence[Entry]) -> list[str]:
    entry = max(entries, key=lambda entry: entry.sizes.ranks)
    work, over_all = next(((r.most, r.over_all) for r in entry.rebuilds if r.kind == RANK), (None, None))
    if work is None or not work.connections:
        return []
    share = percent(over_all.connections / work.connections)
    return [
        f"On {entry.sizes.ranks:,} ranks {share} of the connections after the loss of a rank are in the "
        f"{count(over_all.groups, 'group')} over all ranks.",
        f"A connection is a socket at both ends: a worker then needs ulimit -n above {work.most_connections:,}.",
    ]


def _times(entries: Sequence[Entry], fitted: Fit) -> str:
    head = ("ranks", "layout", "lost", "measured here", "fit: as here", "fit: a core per rank", "", "DEADPOOL, in all")
    rows = []
    for entry, rebuild in _each(entries):
        theirs = RECOVERY_S.get(entry.sizes.ranks) if rebuild.kind == FULL else None
        rows.append(
            (
                *_place(entry, rebuild),
                seconds(fitted.measured(entry.sizes.ranks, rebuild.kind, rebuild.most)),
                seconds(fitted.here.at(rebuild.most)),
                seconds(fitted.spread_out(rebuild.most)),
                "extrapolated" if entry.sizes.ranks > fitted.most_ranks else "",
                "" if theirs is None else seconds(theirs),
            )
        )
    return table(head, _grouped(rows), right=(0, 3, 4, 5, 7))


def _fit_notes(fitted: Fit) -> list[str]:
    most = fitted.most_ranks
    lines = [
        f"fit: {len(fitted.rows)} measurements on up to {most} ranks and {_cores(fitted)} cores, over loopback, gloo"
    ]
    lines += [f"  {_formula(one)}" for one in (fitted.here, fitted.busiest, fitted.store)]
    lines.append(
        "  a core per rank: busiest_cpu_s + store_cpu_s; it does not include the network, so it is a lower bound"
    )
    if fitted.checked is not None:
        lines.append(f"  a fit to fewer ranks only is {percent(fitted.checked)} off on the rows of {most} ranks (rms)")
    lines.append(
        f"  EXTRAPOLATION beyond {most} ranks: no larger run was made, and none with NCCL or a network between."
    )
    lines.append(
        "  DEADPOOL's figures are whole recoveries on A100s over Slingshot with NCCL, not this code's rebuild."
    )
    return lines


def _formula(line: Line) -> str:
    parts = [f"{line.constant_s * 1e3:.3g} ms"]
    for slope, name in zip(line.slopes_s, line.features, strict=True):
        parts.append(f"{slope * 1e6:.3g} us x {name}")
    errors = f"error {percent(line.typical_error)} rms, {percent(line.largest_error)} at most"
    return f"{line.target} = {' + '.join(parts)}   ({errors})"


def _decisions(entries: Sequence[Entry]) -> str:
    head = ("ranks", "layout", "lost", "a survivor's report", "all reports", "reading them", "decision")
    rows = [
        (
            *_place(entry, rebuild),
            _bytes(rebuild.decision.report_bytes),
            _bytes(rebuild.decision.report_bytes * rebuild.decision.survivors),
            seconds(rebuild.decision.read_s * rebuild.decision.survivors),
            seconds(rebuild.decision.seconds),
        )
        for entry, rebuild in _each(entries)
        if rebuild.decision is not None
    ]
    return table(head, _grouped(rows), right=(0, 3, 4, 5, 6))


def _each(entries: Sequence[Entry]) -> list[tuple[Entry, Rebuild]]:
    return [(entry, rebuild) for entry in entries for rebuild in entry.rebuilds]


def _place(entry: Entry, rebuild: Rebuild) -> tuple[str, str, str]:
    return f"{entry.sizes.ranks:,}", str(entry.sizes), _KIND[rebuild.kind]


def _grouped(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows, with number of ranks and layout only in the first of several rows of one layout."""
    found, last = [], None
    for row in rows:
        found.append(("", "", *row[2:]) if row[:2] == last else row)
        last = row[:2]
    return found


def _range(least: int, most: int) -> str:
    return f"{most:,}" if least == most else f"{least:,} - {most:,}"


def _cores(fitted: Fit) -> str:
    return "/".join(sorted({str(row.get("cores", "?")) for row in fitted.rows}))


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"
