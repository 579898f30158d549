"""Attribute the differences between runs' checkpoints to a run, a parameter and a logical rank; format the result.

All functions are pure. The parallel grid has the dimensions of megatron-core: tensor (tp), context (cp), data (dp) and
pipeline parallelism (pp), and for experts expert-tensor (etp), expert (ep) and expert-data parallelism (edp).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ft.observe.diagnose.compare import Comparison, Difference, Finding, merged
from ft.observe.diagnose.stored import COMMON, Piece
from ft.show.text import count, table
from megatron.ft_trainer.checkpointing.inventory import Manifest
from megatron.ft_trainer.checkpointing.writer import bytes_in_words


def coordinates(rank: int, layout: Mapping[str, int | None], pipeline_first: bool) -> dict[str, int]:
    """Return the coordinates of ``rank``: ``tp``, ``cp``, ``dp``, ``pp``, and with expert parallelism ``etp``, ``ep``,
    ``edp``.

    Args:
        layout: sizes as in a checkpoint (``tp``, ``cp``, ``ep``, ``etp``, ``pp``, ``world_size``); 1 if absent.
        pipeline_first: --use-tp-pp-dp-mapping: the pipeline dimension varies faster than data parallelism.
    """
    size = {name: layout.get(name) or 1 for name in ("tp", "cp", "ep", "pp")}
    size["etp"] = layout.get("etp") or size["tp"]
    place = _place(rank, (("tp", size["tp"]), ("cp", size["cp"])), "dp", size["pp"], layout, pipeline_first)
    if size["ep"] > 1:
        place |= _place(rank, (("etp", size["etp"]), ("ep", size["ep"])), "edp", size["pp"], layout, pipeline_first)
    return place


def _place(
    rank: int, inner: tuple[tuple[str, int], ...], replicas: str, pp: int, layout: Mapping, pipeline_first: bool
) -> dict[str, int]:
    """Decode a rank in mixed radix: the first dimension varies fastest, as in megatron-core's ``RankGenerator``."""
    held = pp
    for _, size in inner:
        held *= size
    outer = ((replicas, max(1, layout["world_size"] // held)), ("pp", pp))
    place = {}
    for name, size in (*inner, *(reversed(outer) if pipeline_first else outer)):
        rank, place[name] = divmod(rank, size)
    return place


def copies(rank: int, layout: Mapping[str, int | None], pipeline_first: bool, expert: bool) -> list[int]:
    """Return the other ranks that hold the same shard of a parameter as ``rank``: its data-parallel replicas.

    Args:
        layout: sizes as for ``coordinates``.
        pipeline_first: as for ``coordinates``.
        expert: whether the parameter belongs to an expert; with expert parallelism its replicas are other ranks.
    """
    spread = expert and (layout.get("ep") or 1) > 1
    group = _groups(tuple(sorted(layout.items())), pipeline_first, spread)
    return [other for other in group[rank] if other != rank]


@lru_cache
def _groups(layout: tuple[tuple[str, int | None], ...], pipeline_first: bool, spread: bool) -> list[list[int]]:
    """Return for every rank the list of its replicas, itself included."""
    sizes, names = dict(layout), ("etp", "ep", "pp") if spread else ("tp", "pp")
    groups: dict[tuple, list[int]] = {}
    held = []
    for rank in range(sizes["world_size"]):
        place = coordinates(rank, sizes, pipeline_first)
        group = groups.setdefault(tuple(place[name] for name in names), [])
        group.append(rank)
        held.append(group)
    return held


_OBJECT = re.compile(r"(.*)/shard_[\d.]+_[\d.]+")
_STATE = re.compile(r"optimizer(?:\.\d+)?\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"optimizer(?:\.\d+)?\.distributed\.(.+)\.([^.]+)")
_STACKED = re.compile(r"\.layers\.(?!\d)")
_KINDS = {"param": "master weight"}


@dataclass(frozen=True)
class Subject:
    """The parameter, optimizer state or other value that a piece is part of.

    Attributes:
        kind: ``weight``, ``master weight``, the optimizer's name of a state (such as ``exp_avg``), ``generators``
            (states of random number generators), ``extra state``, or ``value`` (in the checkpoint's part that is not
            sharded).
        name: name of the parameter, with the number of its layer.
        stacked: whether the checkpoint's first dimension counts layers; the layer is then in ``name`` and not in
            ``Row.index``.
    """

    kind: str
    name: str
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """The difference of one subject in one run.

    Attributes:
        run: number of the run that deviates.
        reference: number of a run that it is compared with.
        elements: number of elements of the whole subject.
        difference: the differences of all shards merged; its positions are in the first shard that differs.
        index: index of the first differing element in the whole subject; ``()`` where elements have no order.
        ranks: logical ranks that wrote shards that differ.
        majority: whether most runs agree with the reference.
    """

    run: int
    reference: int
    subject: Subject
    elements: int
    difference: Difference
    index: tuple[int, ...]
    ranks: tuple[int, ...]
    majority: bool


def subject(piece: Piece) -> Subject:
    """Return what ``piece`` is part of, derived from megatron-core's names in checkpoints."""
    if piece.file == COMMON:
        return Subject("value", piece.name)
    if piece.offsets is None:
        match = _OBJECT.fullmatch(piece.name)
        name = match.group(1) if match else piece.name
        return Subject("generators" if name == "rng_state" else "extra state", name)
    kind, name = "weight", piece.name
    if match := _STATE.fullmatch(name):
        kind, name = match.groups()
    elif match := _BUCKET.fullmatch(name):
        name, kind = match.groups()
    stacked = bool(_STACKED.search(name)) and piece.sizes[:1] == (1,)
    if stacked:
        name = _STACKED.sub(f".layers.{piece.offsets[0]}.", name, count=1)
    return Subject(_KINDS.get(kind, kind), name, stacked)


def rows(found: Comparison) -> list[Row]:
    """Return one row for each deviating run and subject, those with the largest differences first.

    Rows with values that are not finite come first; the others are sorted by absolute distance. Sorting does not use
    the distance in ULP, because once a fault has spread, numbers around zero have the largest distance in ULP.
    """
    together: dict[tuple[int, Subject], list[tuple[Finding, Difference]]] = {}
    for finding in found.findings:
        for run, difference in finding.differences.items():
            together.setdefault((run, subject(finding.piece)), []).append((finding, difference))
    made = [_row(found, *key, parts) for key, parts in together.items()]
    return sorted(made, key=lambda row: (-row.difference.not_finite, -(row.difference.absolute or 0.0), row.run))


def _row(found: Comparison, run: int, about: Subject, parts: Sequence[tuple[Finding, Difference]]) -> Row:
    parts = sorted(parts, key=lambda part: part[0].piece.offsets or ())
    total = parts[0][1]
    for _, difference in parts[1:]:
        total = merged(total, difference)
    finding = parts[0][0]
    if len(parts) > 1:
        total = replace(total, last=None)
    elements = sum(each.elements for _, each in parts)
    if finding.piece.offsets is not None:
        elements = math.prod(finding.piece.whole[1:] if about.stacked else finding.piece.whole)
    return Row(
        run=run,
        reference=finding.classes[0][0],
        subject=about,
        elements=elements,
        difference=total,
        index=_index(finding.piece, total.first, about.stacked),
        ranks=tuple(sorted({_writer(found, run, each) for each, _ in parts})),
        majority=all(each.has_majority(len(found.runs)) for each, _ in parts),
    )


def _index(piece: Piece, flat: int | None, stacked: bool) -> tuple[int, ...]:
    """Return the index in the whole tensor of a shard's element number ``flat``."""
    if piece.offsets is None or flat is None:
        return ()
    place = []
    for size, offset in zip(reversed(piece.sizes), reversed(piece.offsets), strict=True):
        flat, at = divmod(flat, size)
        place.append(at + offset)
    return tuple(reversed(place))[1 if stacked else 0 :]


def outliers(found: Comparison) -> tuple[int, ...]:
    """Return the runs that deviate from a majority of runs in at least one piece."""
    runs = len(found.runs)
    return tuple(sorted({run for f in found.findings if f.has_majority(runs) for run in f.differences}))


@dataclass(frozen=True)
class RankShare:
    """The pieces that one logical rank of a deviating run wrote.

    Attributes:
        place: coordinates of the rank in the parallel grid.
        copies: ranks that hold copies of the rank's parameters, which were not stored.
        pieces: number of pieces that the rank wrote.
        differing: number of those pieces that differ.
        elements: number of elements that differ in them.
        ulp: largest distance in ULP, or None.
    """

    run: int
    rank: int
    place: dict[str, int]
    copies: tuple[int, ...]
    pieces: int
    differing: int
    elements: int
    ulp: int | None


def ranks(found: Comparison) -> list[RankShare]:
    """Return one entry for each deviating run and each rank of it that wrote a differing piece, ordered by run.

    Pieces in the part of the checkpoint that is not sharded are ignored.
    """
    shares = []
    for run, stored in enumerate(found.stored):
        by_rank: dict[int, list[Finding]] = {}
        for finding in _sharded(found, run):
            by_rank.setdefault(_writer(found, run, finding), []).append(finding)
        wrote = Counter(piece.rank for piece in stored.pieces.values())
        shares += [_share(found, run, rank, wrote[rank], by_rank[rank]) for rank in sorted(by_rank)]
    return shares


def _share(found: Comparison, run: int, rank: int, pieces: int, mine: Sequence[Finding]) -> RankShare:
    differences = [finding.differences[run] for finding in mine]
    return RankShare(
        run=run,
        rank=rank,
        place=rank_place(found.stored[run].manifest, rank),
        copies=_copies(found, run, mine),
        pieces=pieces,
        differing=len(mine),
        elements=sum(each.differing for each in differences),
        ulp=max((each.ulp for each in differences if each.ulp is not None), default=None),
    )


def rank_place(manifest: Manifest, rank: int) -> dict[str, int]:
    """Return the coordinates of a rank in the run that wrote a checkpoint."""
    return coordinates(rank, manifest.layout, _pipeline_first(manifest.run))


def suspects(found: Comparison, run: int) -> tuple[int, ...]:
    """Return the smallest set of ranks, as far as the checkpoint shows, of which at least one failed in ``run``.

    A piece that differs identifies the rank that wrote it if each rank stores the state that it computed itself. This
    holds for optimizer shards stored as they are in memory, for random number generators, and for everything of which
    no other rank has a copy. A parameter, in contrast, is computed by the data-parallel rank whose optimizer shard
    contains it, and may be written by another rank. Parameters are therefore ignored if other pieces identify a rank;
    otherwise all ranks with a copy of a differing parameter are suspects.
    """
    mine = _sharded(found, run)
    own = {_writer(found, run, f) for f in mine if _is_own(found, run, f)}
    groups = ({_writer(found, run, f), *_copies(found, run, [f])} for f in mine)
    return tuple(sorted(own or set().union(*groups)))


def _is_own(found: Comparison, run: int, finding: Finding) -> bool:
    """Return whether the rank that wrote the piece of ``finding`` computed the piece itself.

    Otherwise the rank may have received it from another rank.
    """
    stored = found.stored[run].manifest.optimizer
    in_memory = stored != "fully_reshardable" and _BUCKET.fullmatch(finding.piece.name) is not None
    generators = subject(finding.piece).kind == "generators"
    return in_memory or generators or stored in ("replicated", None) or not _copies(found, run, [finding])


def _sharded(found: Comparison, run: int) -> list[Finding]:
    return [f for f in found.findings if run in f.differences and f.piece.file != COMMON]


def _writer(found: Comparison, run: int, finding: Finding) -> int:
    """Return the rank of ``run`` that wrote the piece; it may differ between runs with different checkpoint flags."""
    return found.stored[run].pieces.get(finding.piece.key, finding.piece).rank


def _copies(found: Comparison, run: int, findings: Sequence[Finding]) -> tuple[int, ...]:
    """Return the other ranks that hold what one rank of ``run`` wrote."""
    manifest = found.stored[run].manifest
    expert = all(".experts." in f.piece.name for f in findings)
    return tuple(copies(_writer(found, run, findings[0]), manifest.layout, _pipeline_first(manifest.run), expert))


def _pipeline_first(run: Mapping[str, Any]) -> bool:
    """Return whether the run that a manifest describes used --use-tp-pp-dp-mapping."""
    return bool(run.get("options", {}).get("parallel", {}).get("use_tp_pp_dp_mapping"))


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
