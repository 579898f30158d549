"""From pieces that differ to an answer: which run, which parameter, which rank. Pure functions."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft.observe.diagnose.compare import Comparison, Finding
from ft.observe.diagnose.difference import Difference, merged
from ft.observe.diagnose.grid import coordinates, copies
from ft.observe.diagnose.stored import COMMON, Piece
from megatron.training.checkpointing.manifest import Manifest

_OBJECT = re.compile(r"(.*)/shard_[\d.]+_[\d.]+")
_STATE = re.compile(r"optimizer(?:\.\d+)?\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"optimizer(?:\.\d+)?\.distributed\.(.+)\.([^.]+)")
_STACKED = re.compile(r"\.layers\.(?!\d)")
_KINDS = {"param": "master weight"}


@dataclass(frozen=True)
class Subject:
    """What a piece is a part of.

    Args:
        kind: ``weight``, ``master weight``, the optimizer's name of a state (``exp_avg``), ``generators``, ``extra
            state`` or ``value`` (of the part that is the same on all ranks).
        name: of the parameter, with the number of its layer.
        stacked: the checkpoint's first dimension counts layers; it is in the name and not in ``index``.
    """

    kind: str
    name: str
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """One subject in one run.

    Args:
        run: number of the run that deviates; ``reference`` that of a run it is held against.
        elements: of the whole subject.
        difference: over all shards; its places are in the first shard that differs.
        index: of the first differing element in the whole subject; ``()`` without an order.
        ranks: logical ranks that wrote shards that differ.
        majority: most runs agree on the reference.
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
    """What ``piece`` is a part of, by the names that megatron-core gives to what it stores."""
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
    """What differs, by run and subject: the largest distance first, and before it what is not finite.

    Not by ULP: once a fault has spread, the numbers around zero are the farthest apart by that.
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
    """The place of a shard's element number ``flat`` in the whole tensor."""
    if piece.offsets is None or flat is None:
        return ()
    place = []
    for size, offset in zip(reversed(piece.sizes), reversed(piece.offsets), strict=True):
        flat, at = divmod(flat, size)
        place.append(at + offset)
    return tuple(reversed(place))[1 if stacked else 0 :]


def outliers(found: Comparison) -> tuple[int, ...]:
    """The runs that deviate from a majority of runs, wherever there is one."""
    runs = len(found.runs)
    return tuple(sorted({run for f in found.findings if f.has_majority(runs) for run in f.differences}))


@dataclass(frozen=True)
class RankShare:
    """What one logical rank wrote of a run that deviates.

    Args:
        place: its coordinates; ``copies``: the ranks with copies of its parameters, none of which was stored.
        pieces: that it wrote; ``differing`` those that differ; ``elements`` that differ in them.
        ulp: the largest distance.
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
    """Every rank that wrote something that differs, by run; what is the same on all ranks is left out."""
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
    """Coordinates of a rank in the run that wrote a checkpoint."""
    return coordinates(rank, manifest.layout, _pipeline_first(manifest.run))


def suspects(found: Comparison, run: int) -> tuple[int, ...]:
    """The ranks of which at least one went wrong in ``run``, as narrow as what is stored allows.

    A piece that differs convicts the rank that wrote it where every rank stores its own: shards of the optimizer's
    state as they lie in memory, generators, and anything that no other rank has a copy of. Parameters are the work of
    that data-parallel rank whose optimizer shard they are in, and are written by another one: they do not count
    beside pieces that convict, and alone leave all of these ranks suspect.
    """
    mine = _sharded(found, run)
    own = {_writer(found, run, f) for f in mine if _is_own(found, run, f)}
    groups = ({_writer(found, run, f), *_copies(found, run, [f])} for f in mine)
    return tuple(sorted(own or set().union(*groups)))


def _is_own(found: Comparison, run: int, finding: Finding) -> bool:
    """Whether ``finding`` is about the state of the rank that wrote it, and not of one it has it from."""
    stored = found.stored[run].manifest.optimizer
    in_memory = stored != "fully_reshardable" and _BUCKET.fullmatch(finding.piece.name) is not None
    generators = subject(finding.piece).kind == "generators"
    return in_memory or generators or stored in ("replicated", None) or not _copies(found, run, [finding])


def _sharded(found: Comparison, run: int) -> list[Finding]:
    return [f for f in found.findings if run in f.differences and f.piece.file != COMMON]


def _writer(found: Comparison, run: int, finding: Finding) -> int:
    """The rank of ``run`` that wrote its piece; runs that were saved in different ways may differ in that."""
    return found.stored[run].pieces.get(finding.piece.key, finding.piece).rank


def _copies(found: Comparison, run: int, findings: Sequence[Finding]) -> tuple[int, ...]:
    """The other ranks that hold what one rank of ``run`` wrote."""
    manifest = found.stored[run].manifest
    expert = all(".experts." in f.piece.name for f in findings)
    return tuple(copies(_writer(found, run, findings[0]), manifest.layout, _pipeline_first(manifest.run), expert))


def _pipeline_first(run: Mapping[str, Any]) -> bool:
    """Whether a run, as its manifest describes it, had --use-tp-pp-dp-mapping."""
    return bool(run.get("options", {}).get("parallel", {}).get("use_tp_pp_dp_mapping"))
