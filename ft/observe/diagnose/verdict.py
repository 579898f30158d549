"""Attribute the differences between runs' checkpoints to a run, a parameter and a logical rank. All functions are pure.

The parallel grid has the dimensions of megatron-core: tensor (tp), context (cp), data (dp) and pipeline parallelism
(pp), and for experts expert-tensor (etp), expert (ep) and expert-data parallelism (edp).
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
from megatron.ft_trainer.checkpointing.manifest import Manifest


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
