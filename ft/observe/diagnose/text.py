"""Format the result of ``ft diagnose compare``, a bitwise comparison of runs' checkpoints, as text or JSON values."""

import math
from collections.abc import Sequence
from typing import Any

from ft.observe.diagnose.compare import Comparison
from ft.observe.diagnose.stored import COMMON
from ft.observe.diagnose.verdict import RankShare, Row, outliers, rank_place, ranks, rows, suspects
from ft.show.text import count, table
from megatron.ft_trainer.checkpointing.writer import bytes_in_words

_GATHERED = "fully_reshardable"


def as_text(found: Comparison, shown: int) -> str:
    """Return the verdict, a table of the first ``shown`` subjects that differ, a table of ranks, and notes."""
    parts = [_headline(found)]
    if found.findings:
        made, wrote = rows(found), ranks(found)
        parts = ["\n".join([_headline(found), *_verdict(found, made)]), _rows(found, made, shown)]
        parts += [_ranks(found, wrote), "\n".join(_where(found, wrote))]
    parts.append("\n".join(f"note: {note}" for note in found.notes))
    return "\n\n".join(part for part in parts if part)


def _headline(found: Comparison) -> str:
    steps = ", ".join(map(str, found.steps if len(found.steps) <= 8 else [found.steps[0], "...", found.steps[-1]]))
    size = f"{count(found.pieces, 'piece')}, {bytes_in_words(found.bytes)} each"
    what = f"{len(found.runs)} runs, {count(len(found.steps), 'step')} ({steps}), {size}"
    return what if found.findings else f"equal, bit for bit: {what}"


def _verdict(found: Comparison, made: Sequence[Row]) -> list[str]:
    share = f"{sum(f.piece.file != COMMON for f in found.findings)} of {count(found.pieces, 'piece')} differ"
    lines = [f"first difference: step {found.step}{_span(found)}: {share}"]
    names, guilty = [run.name for run in found.runs], outliers(found)
    lone = sum(not row.majority for row in made)
    if guilty:
        rest = len(names) - len(guilty)
        agree = "the others agree where each deviates" if rest < 2 or lone else f"the other {rest} agree on all of it"
        lines.append(f"outlier: {', '.join(names[run] for run in guilty)} ({agree})")
    if len(names) == 2:
        lines.append(
            "outlier: unknown, because two runs have no majority; a third run would show which of them is wrong"
        )
    elif lone:
        lines.append(f"no majority: {count(lone, 'line')} below, in which no more than half of the runs agree")
    return lines + [line for run in sorted({row.run for row in made}) if (line := _accused(found, run))]


def _accused(found: Comparison, run: int) -> str:
    """Return a line about the ranks suspected in ``run``, or "" where that would be most of its ranks."""
    manifest, among = found.stored[run].manifest, suspects(found, run)
    if not among or 2 * len(among) > max(2, manifest.layout["world_size"]):
        return ""
    places = [rank_place(manifest, rank) for rank in among]
    shared = {name: at for name, at in places[0].items() if all(place[name] == at for place in places)}
    what = f"{among[0]}" if len(among) == 1 else f"one or more of {', '.join(map(str, among))}"
    return f"rank: {what} ({_shown_place(shared)}) in {found.runs[run].name}"


def _span(found: Comparison) -> str:
    """Return text that says in which step or steps the difference must have arisen, given the last equal step."""
    if len(found.steps) < 2:
        return ", the first one compared"
    last = found.steps[-2]
    at = f"in step {found.step}" if found.step == last + 1 else f"in one of the steps {last + 1} to {found.step}"
    return f"; step {last} is equal, so it happened {at}"


def _rows(found: Comparison, made: Sequence[Row], shown: int) -> str:
    head = ("run", "what", "of", "differ", "elements", "ULP", "absolute", "first at", "values there", "bit", "rank")
    cells = [_cells(found, row) for row in made[:shown]]
    more = f"\n... and {count(len(made) - shown, 'more line')} (--show, --json)" if len(made) > shown else ""
    return table(head, cells, right=(3, 4, 5, 6)) + more


def _cells(found: Comparison, row: Row) -> list[str]:
    d = row.difference
    ulp = f"{d.ulp}" if d.ulp is not None else "-"
    values = f"{d.values[0]:.7g} -> {d.values[1]:.7g}" if d.values else "-"
    return [
        found.runs[row.run].name,
        row.subject.kind,
        row.subject.name,
        str(d.differing),
        str(row.elements),
        ulp if not d.not_finite else f"{d.not_finite} not finite",
        f"{d.absolute:.3g}" if d.absolute is not None else "-",
        f"[{', '.join(map(str, row.index))}]" if row.index else "-",
        values,
        str(_bit(d.mask)) if _bit(d.mask) is not None else "-",
        ", ".join(map(str, row.ranks[:4])) + (", ..." if len(row.ranks) > 4 else ""),
    ]


def _bit(mask: int) -> int | None:
    """Return the number of the only bit that differs, from 0; None if several bits or none differ."""
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _ranks(found: Comparison, wrote: Sequence[RankShare]) -> str:
    if len(wrote) < 2:
        return ""
    head = ("run", "rank", "place", "pieces", "differ", "elements", "ULP")
    cells = []
    for s in wrote:
        numbers = (s.pieces, s.differing, s.elements, "-" if s.ulp is None else s.ulp)
        cells.append([found.runs[s.run].name, str(s.rank), _shown_place(s.place), *map(str, numbers)])
    return table(head, cells, right=(1, 3, 4, 5, 6))


def _shown_place(place: dict[str, int]) -> str:
    return " ".join(f"{name} {at}" for name, at in place.items())


def _where(found: Comparison, wrote: Sequence[RankShare]) -> list[str]:
    """Return sentences about what the ranks in the tables mean, and how to locate a fault more precisely."""
    lines = []
    if copied := [share for share in wrote if share.copies]:
        one = copied[0]
        others = ", ".join(map(str, one.copies[:8])) + (", ..." if len(one.copies) > 8 else "")
        lines.append(
            "The rank in the tables is the rank that wrote the shard. Of parameters that several ranks hold, only one "
            f"copy is stored (those of rank {one.rank} are also on {others})."
        )
    if found.stored[0].manifest.optimizer == _GATHERED and found.stored[0].manifest.layout.get("dp", 1) > 1:
        lines.append(
            "The optimizer states were gathered over data-parallel ranks for the checkpoint. With "
            "--no-dist-ckpt-optim-fully-reshardable, the rank of each state is known."
        )
    if len(found.steps) > 1 and found.steps[-1] > found.steps[-2] + 1:
        lines.append(
            f"Differences spread with every step: repeat the runs from step {found.steps[-2]} with --save-interval 1."
        )
    return lines


def as_values(found: Comparison) -> dict[str, Any]:
    """Return everything that differs as JSON values; numbers that JSON lacks (NaN, infinities) become texts."""
    names = [run.name for run in found.runs]
    guilty = outliers(found)
    made = rows(found)
    return {
        "equal": not found.findings,
        "runs": names,
        "steps": found.steps,
        "steps_not_reached": found.left,
        "first_different_step": found.step,
        "pieces": found.pieces,
        "bytes": found.bytes,
        "last_equal_step": found.steps[-1 - bool(found.findings)] if len(found.steps) > bool(found.findings) else None,
        "outliers": [names[run] for run in guilty],
        "suspects": {names[run]: list(suspects(found, run)) for run in sorted({row.run for row in made})},
        "majority": all(row.majority for row in made) if made else None,
        "differences": [_row_values(names, row) for row in made],
        "ranks": [{**vars(share), "run": names[share.run]} for share in ranks(found)],
        "notes": found.notes,
    }


def _row_values(names: Sequence[str], row: Row) -> dict[str, Any]:
    d = row.difference
    return {
        "run": names[row.run],
        "reference": names[row.reference],
        "majority": row.majority,
        "kind": row.subject.kind,
        "name": row.subject.name,
        "elements": row.elements,
        "differing": d.differing,
        "not_finite": d.not_finite,
        "ulp": d.ulp,
        "absolute": _number(d.absolute),
        "first": list(row.index),
        "consecutive": d.first is not None and d.last is not None and d.last - d.first + 1 == d.differing,
        "values": [_number(value) for value in d.values] if d.values else None,
        "bit": _bit(d.mask),
        "ranks": list(row.ranks),
    }


def _number(value: float | int | None) -> float | int | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
