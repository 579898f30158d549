"""Compare the checkpoints of several runs of the same training bit for bit, up to the first step that differs.

The differences are attributed to a run, a parameter and a logical rank. ULP (unit in the last place) is the distance of
two floating-point numbers, counted in representable numbers. The parallel grid has the dimensions of megatron-core:
tensor (tp), context (cp), data (dp) and pipeline parallelism (pp), and for experts expert-tensor (etp), expert (ep) and
expert-data parallelism (edp).
"""

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy
import torch

from ft.observe.diagnose.stored import COMMON, Piece, SavedRun, Stored, check_alike, common_steps, notes, read
from ft.show.text import count, table
from ft.systems.dmr.digest.definition import integers
from megatron.core.parallel_state import RankGenerator
from megatron.ft_trainer.checkpointing.inventory import Manifest, bytes_in_words

_BLOCK = 1 << 20
"""Elements compared at a time: beyond both tensors, a comparison needs some tens of bytes for each of these elements.
"""


@dataclass(frozen=True)
class Difference:
    """The difference between a value and its reference.

    Attributes:
        not_finite: number of differing elements that are NaN or infinite on one side; ``ulp`` and ``absolute`` ignore
            them.
        ulp: largest distance of floating-point elements in ULP; None where there are none to compare.
        first: flat index of the first differing element; None where elements have no order.
        values: the values of the reference and of this value at ``first``, where they are numbers.
        mask: bit mask of the bit positions that differ in any element.
    """

    elements: int
    differing: int
    not_finite: int = 0
    ulp: int | None = None
    absolute: float | None = None
    first: int | None = None
    last: int | None = None
    values: tuple[float | int, float | int] | None = None
    mask: int = 0


def of_tensors(reference: torch.Tensor, found: torch.Tensor) -> Difference | None:
    """Return the difference of two CPU tensors; None where all bits are equal (so NaN is equal to itself).

    Tensors of different dtype or shape differ in every element.
    """
    if reference.dtype != found.dtype or reference.shape != found.shape:
        return Difference(found.numel(), found.numel())
    ours, theirs = integers(reference), integers(found)
    total = None
    for start in range(0, ours.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        at = (ours[block] != theirs[block]).nonzero().reshape(-1)
        if at.numel():
            part = _of_elements(reference, ours[block][at], theirs[block][at], at + start)
            total = part if total is None else merged(total, part)
    return total


def _of_elements(like: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, at: torch.Tensor) -> Difference:
    """Return the difference of the differing elements, given by their bits on both sides and their flat indices."""
    a, b = ours.view(like.dtype), theirs.view(like.dtype)
    ulp, absolute, finite = None, None, torch.ones(len(at), dtype=torch.bool)
    if like.is_floating_point():
        a, b = a.double(), b.double()
        finite = a.isfinite() & b.isfinite()
        if finite.any():
            ulp = int(_ulps(ours[finite], theirs[finite]).max())
    if finite.any():
        absolute = float((a[finite].double() - b[finite].double()).abs().max())
    xor = (ours ^ theirs).numpy()
    return Difference(
        elements=like.numel(),
        differing=len(at),
        not_finite=int((~finite).sum()),
        ulp=ulp,
        absolute=absolute,
        first=int(at[0]),
        last=int(at[-1]),
        values=(a[0].item(), b[0].item()),
        mask=int(numpy.bitwise_or.reduce(xor)) & ((1 << 8 * xor.itemsize) - 1),
    )


def _ulps(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the distances in ULP of floating-point numbers given by their bits, which IEEE formats order by magnitude.

    Distances beyond int64, which only float64 numbers of different signs can have, are clamped to its maximum.
    """
    most = torch.iinfo(torch.int64).max
    magnitude = torch.iinfo(ours.dtype).max if ours.dtype != torch.uint8 else 0x7F
    signs = [(bits < 0) if ours.dtype != torch.uint8 else bits > magnitude for bits in (ours, theirs)]
    a, b = ((bits & magnitude).long() for bits in (ours, theirs))
    across = torch.where(a > most - b, most, a + b)
    return torch.where(signs[0] == signs[1], (a - b).abs(), across)


def merged(a: Difference, b: Difference) -> Difference:
    """Merge the differences of two parts of one value, given in order; ``elements`` is taken from the first."""
    return Difference(
        elements=a.elements,
        differing=a.differing + b.differing,
        not_finite=a.not_finite + b.not_finite,
        ulp=_larger(a.ulp, b.ulp),
        absolute=_larger(a.absolute, b.absolute),
        first=a.first,
        last=b.last,
        values=a.values,
        mask=a.mask | b.mask,
    )


def _larger(a: Any, b: Any) -> Any:
    return max((each for each in (a, b) if each is not None), default=None)


def of_values(reference: Any, found: Any) -> Difference | None:
    """Return the difference of two values: numbers, texts, arrays, tensors, and containers of them; None if equal."""
    kinds = {type(reference), type(found)}
    if kinds == {float} or (kinds == {int} and max(abs(reference), abs(found)) < 2**63):
        kind = torch.float64 if kinds == {float} else torch.int64
        return of_tensors(torch.tensor(reference, dtype=kind), torch.tensor(found, dtype=kind))
    if isinstance(reference, torch.Tensor) and isinstance(found, torch.Tensor):
        return of_tensors(reference, found)
    ours, theirs = leaves(reference), leaves(found)
    keys = ours.keys() | theirs.keys()
    different = [k for k in keys if k not in ours or k not in theirs or not _same(ours[k], theirs[k])]
    return Difference(len(keys), len(different)) if different else None


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values inside of nested containers by their path, such as ``optimizer.param_groups[0].lr``."""
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "fiub":
        return {name: torch.from_numpy(numpy.array(value))}
    if isinstance(value, Mapping):
        inside = {f"{name}.{key}" if name else str(key): each for key, each in value.items()}
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inside = {f"{name}[{i}]": each for i, each in enumerate(value)}
    else:
        return {name: value}
    return {path: leaf for key, each in inside.items() for path, leaf in leaves(each, key).items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return of_tensors(a, b) is None
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and repr(a) == repr(b)


Classes = tuple[tuple[int, ...], ...]
"""Equivalence classes of runs (by number) with equal bits: the largest class first, ties in the order of the first run.
"""

_DESCRIBES = ("args", "options", "content_metadata")
"""Keys in the common part of a checkpoint (the part that is not sharded) that describe the run's inputs, not its
results. They are not compared.
"""


@dataclass(frozen=True)
class DifferingPiece:
    """A piece of a checkpoint that is not the same in all runs.

    Attributes:
        classes: the runs, grouped by equal content of the piece.
        differences: run -> its difference from the first class, for every run outside of that class.
    """

    piece: Piece
    classes: Classes
    differences: dict[int, Difference]

    def has_majority(self, runs: int) -> bool:
        """Return whether more than half of all runs, whose number is ``runs``, agree on the piece."""
        return 2 * len(self.classes[0]) > runs


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        steps: the steps that were compared, in order; the last one differs if ``findings`` is not empty.
        left: further common steps after the one that differs, which were not compared.
        stored: the checkpoints of the last compared step, one for each run.
    """

    runs: list[SavedRun]
    steps: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    pieces: int = 0
    bytes: int = 0
    findings: list[DifferingPiece] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Return the first step that differs, or None."""
        return self.steps[-1] if self.findings else None


def compare(runs: list[SavedRun], asked: Sequence[int] | None = None) -> Comparison:
    """Compare ``runs`` up to the first step at which they differ.

    Files with the same name, size and CRC-32 in the manifests are equal, and are not read. Of the others, one piece at
    a time is held in memory for all runs.

    Args:
        asked: the steps to compare; None: all that every run has.

    Raises:
        UserError: a checkpoint is incomplete or damaged, or the runs are not of the same training.
    """
    steps = common_steps(runs, asked)
    found = Comparison(runs)
    for step in steps:
        stored = [read(run.checkpoint(step)) for run in runs]
        check_alike(runs, stored)
        if not found.steps:
            found.notes = notes(runs, stored)
        found.steps.append(step)
        found.stored, found.pieces = stored, len(stored[0].pieces)
        found.bytes = sum(record.bytes for record in stored[0].manifest.files.values())
        found.findings = [*_shards(stored), *_common(stored)]
        if found.findings:
            break
    found.left = [step for step in steps if step > found.steps[-1]]
    return found


def _shards(stored: Sequence[Stored]) -> Iterator[DifferingPiece]:
    records = [each.manifest.files for each in stored]
    same = {name for name in records[0] if all(r.get(name) == records[0][name] for r in records)}
    checked: set[tuple[int, str]] = set()
    for key, piece in stored[0].pieces.items():
        mine = [each.pieces[key] for each in stored]
        if piece.file in same and all((p.file, p.start) == (piece.file, piece.start) for p in mine):
            continue
        for number, (each, p) in enumerate(zip(stored, mine, strict=True)):
            if (number, p.file) not in checked:
                each.check(p.file)
                checked.add((number, p.file))
        finding = _finding(piece, [each.whole(p) for each, p in zip(stored, mine, strict=True)])
        yield from [finding] if finding else []


def _common(stored: Sequence[Stored]) -> Iterator[DifferingPiece]:
    """Yield the differences in the part that is not sharded: counters, schedule, the optimizer's groups."""
    values = []
    for each in stored:
        state = each.common()
        values.append(leaves({key: value for key, value in state.items() if key not in _DESCRIBES}))
    for name in dict.fromkeys(name for each in values for name in each):
        piece = Piece(name, None, (), (), None, COMMON, 0, 0)
        finding = _finding(piece, [each.get(name) for each in values])
        yield from [finding] if finding else []


def _finding(piece: Piece, values: Sequence[Any]) -> DifferingPiece | None:
    """Return how the runs' values of one piece differ; None if they do not."""
    classes = classed(values, lambda a, b: of_values(a, b) is None)
    if len(classes) == 1:
        return None
    reference = values[classes[0][0]]
    others = {run: of_values(reference, values[group[0]]) for group in classes[1:] for run in group}
    return DifferingPiece(piece, classes, others)


def classed(values: Sequence[Any], equal: Callable[[Any, Any], bool]) -> Classes:
    """Group the numbers of ``values`` that are equal; ``equal`` has to be an equivalence relation."""
    groups: list[list[int]] = []
    for number, value in enumerate(values):
        group = next((g for g in groups if equal(values[g[0]], value)), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return tuple(tuple(group) for group in sorted(groups, key=lambda g: (-len(g), g[0])))


def coordinates(rank: int, layout: Mapping[str, int | None], pipeline_first: bool) -> dict[str, int]:
    """Return the coordinates of ``rank``: ``tp``, ``cp``, ``dp``, ``pp``, and with expert parallelism ``etp``, ``ep``,
    ``edp``.

    Args:
        layout: sizes as in a checkpoint (``tp``, ``cp``, ``ep``, ``etp``, ``pp``, ``world_size``); 1 if absent.
        pipeline_first: --use-tp-pp-dp-mapping: the pipeline dimension varies faster than data parallelism.
    """
    outer = ("pp", "dp") if pipeline_first else ("dp", "pp")
    kinds = {name: (name, False) for name in ("tp", "cp", *outer)}
    if (layout.get("ep") or 1) > 1:
        kinds |= {"etp": ("tp", True), "ep": ("ep", True), "edp": ("dp", True)}
    groups = {name: _group(rank, layout, pipeline_first, *kind) for name, kind in kinds.items()}
    return {name: group.index(rank) for name, group in groups.items()}


def copies(rank: int, layout: Mapping[str, int | None], pipeline_first: bool, expert: bool) -> list[int]:
    """Return the other ranks that hold the same shard of a parameter as ``rank``: its data-parallel replicas, which are
    others with expert parallelism for the parameter of an ``expert``. The rest is as for ``coordinates``.
    """
    spread = expert and (layout.get("ep") or 1) > 1
    group = _group(rank, layout, pipeline_first, "dp" if spread else "dp-cp", spread)
    return [other for other in group if other != rank]


def _group(rank: int, layout: Mapping[str, int | None], pipeline_first: bool, kind: str, spread: bool) -> list[int]:
    """Return all ranks of the process group of type ``kind``, such as "dp", to which ``rank`` belongs.

    ``spread``: whether ranks are numbered in the grid of the experts, which has expert-parallel groups.
    """
    groups = _groups(tuple(sorted(layout.items())), pipeline_first, kind, spread)
    return next(group for group in groups if rank in group)


@lru_cache
def _groups(
    layout: tuple[tuple[str, int | None], ...], pipeline_first: bool, kind: str, spread: bool
) -> list[list[int]]:
    size = {name: number or 1 for name, number in layout}
    tp, pp = size.get("tp", 1), size.get("pp", 1)
    cp, ep = (1, size["ep"]) if spread else (size.get("cp", 1), 1)
    tp = dict(layout).get("etp") or tp if spread else tp
    dp = max(1, size["world_size"] // (tp * cp * ep * pp))
    order = "tp-cp-ep-pp-dp" if pipeline_first else "tp-cp-ep-dp-pp"
    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=cp, order=order).get_ranks(kind)


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
            the index.
    """

    kind: str
    name: str
    stacked: bool = False


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


def rows(found: Comparison) -> list[dict[str, Any]]:
    """Return one row for each deviating run and subject, those with the largest differences first, as JSON values.

    Rows with values that are not finite come first; the others are sorted by absolute distance. Sorting does not use
    the distance in ULP, because once a fault has spread, numbers around zero have the largest distance in ULP.

    Returns:
        ``run``: the run that deviates; ``reference``: one that it is compared with; ``majority``: whether most runs
        agree with that; ``kind`` and ``name`` of the subject; ``elements``: those of the whole subject; ``first``:
        index of the first one that differs, empty where elements have no order; ``values`` there; ``consecutive``:
        whether all that differ follow each other; ``bit``: the only bit that differs; ``ranks``: logical ranks that
        wrote shards that differ; the rest is that of :class:`Difference`. Numbers that JSON lacks (NaN, infinities) are
        texts.
    """
    together: dict[tuple[int, Subject], list[tuple[DifferingPiece, Difference]]] = {}
    for finding in found.findings:
        for run, difference in finding.differences.items():
            together.setdefault((run, subject(finding.piece)), []).append((finding, difference))
    made = [(run, *_row(found, run, about, parts)) for (run, about), parts in together.items()]
    made.sort(key=lambda row: (-row[1].not_finite, -(row[1].absolute or 0.0), row[0]))
    return [values for _, _, values in made]


def _row(
    found: Comparison, run: int, about: Subject, parts: Sequence[tuple[DifferingPiece, Difference]]
) -> tuple[Difference, dict[str, Any]]:
    """Return the differences of all shards of a subject, merged, and the row about them.

    Positions are in the first shard that differs.
    """
    parts = sorted(parts, key=lambda part: part[0].piece.offsets or ())
    d = parts[0][1]
    for _, difference in parts[1:]:
        d = merged(d, difference)
    first, elements = parts[0][0], sum(each.elements for _, each in parts)
    if first.piece.offsets is not None:
        elements = math.prod(first.piece.whole[1:] if about.stacked else first.piece.whole)
    is_one = len(parts) == 1 and d.first is not None and d.last is not None
    return d, {
        "run": found.runs[run].name,
        "reference": found.runs[first.classes[0][0]].name,
        "majority": all(each.has_majority(len(found.runs)) for each, _ in parts),
        "kind": about.kind,
        "name": about.name,
        "elements": elements,
        "differing": d.differing,
        "not_finite": d.not_finite,
        "ulp": d.ulp,
        "absolute": _number(d.absolute),
        "first": list(_index(first.piece, d.first, about.stacked)),
        "consecutive": is_one and d.last - d.first + 1 == d.differing,
        "values": [_number(value) for value in d.values] if d.values else None,
        "bit": d.mask.bit_length() - 1 if d.mask.bit_count() == 1 else None,
        "ranks": sorted({_writer(found, run, each) for each, _ in parts}),
    }


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
    groups = ({_writer(found, run, f), *_copies(found, run, f)} for f in mine)
    return tuple(sorted(own or set().union(*groups)))


def _is_own(found: Comparison, run: int, finding: DifferingPiece) -> bool:
    """Return whether the rank that wrote the piece of ``finding`` computed the piece itself.

    Otherwise the rank may have received it from another rank.
    """
    stored = found.stored[run].manifest.optimizer
    in_memory = stored != "fully_reshardable" and _BUCKET.fullmatch(finding.piece.name) is not None
    generators = subject(finding.piece).kind == "generators"
    return in_memory or generators or stored in ("replicated", None) or not _copies(found, run, finding)


def _sharded(found: Comparison, run: int) -> list[DifferingPiece]:
    return [f for f in found.findings if run in f.differences and f.piece.file != COMMON]


def _writer(found: Comparison, run: int, finding: DifferingPiece) -> int:
    """Return the rank of ``run`` that wrote the piece; it may differ between runs with different checkpoint flags."""
    return found.stored[run].pieces.get(finding.piece.key, finding.piece).rank


def _copies(found: Comparison, run: int, finding: DifferingPiece) -> tuple[int, ...]:
    """Return the other ranks that hold the piece of ``finding`` in ``run``."""
    manifest = found.stored[run].manifest
    expert = ".experts." in finding.piece.name
    return tuple(copies(_writer(found, run, finding), manifest.layout, _pipeline_first(manifest.run), expert))


def _pipeline_first(run: Mapping[str, Any]) -> bool:
    """Return whether the run that a manifest describes used --use-tp-pp-dp-mapping."""
    return bool(run.get("options", {}).get("core", {}).get("use_tp_pp_dp_mapping"))


_GATHERED = "fully_reshardable"


def as_text(found: Comparison, shown: int) -> str:
    """Return the verdict, a table of the first ``shown`` subjects that differ, and notes."""
    parts = [_headline(found)]
    if found.findings:
        made = rows(found)
        parts = ["\n".join([_headline(found), *_verdict(found, made)]), _rows(made, shown)]
        parts.append("\n".join(_where(found)))
    parts.append("\n".join(f"note: {note}" for note in found.notes))
    return "\n\n".join(part for part in parts if part)


def _headline(found: Comparison) -> str:
    steps = ", ".join(map(str, found.steps if len(found.steps) <= 8 else [found.steps[0], "...", found.steps[-1]]))
    size = f"{count(found.pieces, 'piece')}, {bytes_in_words(found.bytes)} each"
    what = f"{len(found.runs)} runs, {count(len(found.steps), 'step')} ({steps}), {size}"
    return what if found.findings else f"equal, bit for bit: {what}"


def _verdict(found: Comparison, made: Sequence[Mapping[str, Any]]) -> list[str]:
    share = f"{sum(f.piece.file != COMMON for f in found.findings)} of {count(found.pieces, 'piece')} differ"
    lines = [f"first difference: step {found.step}{_span(found)}: {share}"]
    names, guilty = [run.name for run in found.runs], outliers(found)
    lone = sum(not row["majority"] for row in made)
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
    return lines + [line for run in _deviating(found) if (line := _accused(found, run))]


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


def _deviating(found: Comparison) -> list[int]:
    """Return the runs with any difference."""
    return sorted({run for finding in found.findings for run in finding.differences})


def _rows(made: Sequence[Mapping[str, Any]], shown: int) -> str:
    head = ("run", "what", "of", "differ", "elements", "ULP", "absolute", "first at", "values there", "bit", "rank")
    cells = [_cells(row) for row in made[:shown]]
    more = f"\n... and {count(len(made) - shown, 'more line')} (--show, --json)" if len(made) > shown else ""
    return table(head, cells, right=(3, 4, 5, 6)) + more


def _cells(row: Mapping[str, Any]) -> list[str]:
    absolute, values = row["absolute"], row["values"]
    ranks = ", ".join(map(str, row["ranks"][:4])) + (", ..." if len(row["ranks"]) > 4 else "")
    return [
        row["run"],
        row["kind"],
        row["name"],
        str(row["differing"]),
        str(row["elements"]),
        f"{row['not_finite']} not finite" if row["not_finite"] else _shown(row["ulp"]),
        f"{absolute:.3g}" if isinstance(absolute, int | float) else _shown(absolute),
        f"[{', '.join(map(str, row['first']))}]" if row["first"] else "-",
        " -> ".join(f"{value:.7g}" if isinstance(value, int | float) else value for value in values or ()) or "-",
        _shown(row["bit"]),
        ranks,
    ]


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _shown_place(place: dict[str, int]) -> str:
    return " ".join(f"{name} {at}" for name, at in place.items())


def _where(found: Comparison) -> list[str]:
    """Return sentences about what the ranks in the table mean, and how to locate a fault more precisely."""
    lines = []
    ranks = ((run, finding) for run in range(len(found.runs)) for finding in _sharded(found, run))
    copied = ((_writer(found, run, one), held) for run, one in ranks if (held := _copies(found, run, one)))
    if (first := next(copied, None)) is not None:
        rank, held = first
        others = ", ".join(map(str, held[:8])) + (", ..." if len(held) > 8 else "")
        lines.append(
            "The rank in the table is the rank that wrote the shard. Of parameters that several ranks hold, only one "
            f"copy is stored (those of rank {rank} are also on {others})."
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
        "suspects": {names[run]: list(suspects(found, run)) for run in _deviating(found)},
        "majority": all(row["majority"] for row in made) if made else None,
        "differences": made,
        "notes": found.notes,
    }


def _number(value: float | int | None) -> float | int | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
