"""Compare the checkpoints of several runs of the same training bit for bit, up to the first step that differs.

ULP (unit in the last place) is the distance of two floating-point numbers, counted in representable numbers.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy
import torch

from ft.observe.diagnose.stored import COMMON, Blocks, Piece, Run, Stored, check_alike, common_steps, notes, read
from ft.systems.dmr.digest.definition import integers

_BLOCK = 1 << 20
"""Elements compared at a time: beyond both tensors, a comparison needs some tens of bytes for each of these elements.
"""


@dataclass(frozen=True)
class Difference:
    """The difference between a value and its reference.

    Attributes:
        elements: number of elements of the value.
        differing: number of elements that differ in at least one bit.
        not_finite: number of differing elements that are NaN or infinite on one side; ``ulp`` and ``absolute`` ignore
            them.
        ulp: largest distance of floating-point elements in ULP; None where there are none to compare.
        absolute: largest absolute distance.
        first: flat index of the first differing element; None where elements have no order.
        last: flat index of the last differing element; None where elements have no order.
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
class Finding:
    """A piece of a checkpoint that is not the same in all runs.

    Attributes:
        piece: the piece, as the first run describes it.
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
        pieces: number of shards and objects in one checkpoint.
        bytes: size of one checkpoint in bytes.
        findings: the pieces that differ at the last step.
        stored: the checkpoints of the last compared step, one for each run.
        notes: caveats about the comparison, as sentences.
    """

    runs: list[Run]
    steps: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    pieces: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Return the first step that differs, or None."""
        return self.steps[-1] if self.findings else None


def compare(runs: list[Run], asked: Sequence[int] | None = None, *, quick: bool = False) -> Comparison:
    """Compare ``runs`` up to the first step at which they differ.

    Reads every file once, one block at a time. Only pieces that differ are held whole in memory, one at a time for all
    runs.

    Args:
        asked: the steps to compare; None: all that every run has.
        quick: whether files with equal size and CRC-32 in the manifests count as equal without being read.

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
        found.findings = [*_shards(stored, quick), *_common(stored)]
        if found.findings:
            break
    found.left = [step for step in steps if step > found.steps[-1]]
    return found


def _shards(stored: Sequence[Stored], quick: bool) -> Iterator[Finding]:
    same = _equal_files(stored) if quick else set()
    readers = [Blocks(each) for each in stored]
    for key, piece in stored[0].pieces.items():
        mine = [each.pieces[key] for each in stored]
        if piece.file in same and all((p.file, p.start) == (piece.file, piece.start) for p in mine):
            continue
        blocks = zip_longest(*(reader.of(p) for reader, p in zip(readers, mine, strict=True)))
        if not _equal(blocks):
            # Equal objects may have been pickled to different bytes, so different bytes do not prove a difference.
            finding = _finding(piece, [each.whole(p) for each, p in zip(stored, mine, strict=True)])
            yield from [finding] if finding else []
    for reader in readers:
        reader.finish()


def _equal(blocks: Iterator[tuple]) -> bool:
    """Return whether all runs have the same bytes. Always read to the end, so that the checksums can be verified."""
    equal = True
    for first, *others in blocks:
        equal = all(block == first for block in others) and equal
    return equal


def _equal_files(stored: Sequence[Stored]) -> set[str]:
    records = [each.manifest.files for each in stored]
    return {name for name in records[0] if all(r.get(name) == records[0][name] for r in records)}


def _common(stored: Sequence[Stored]) -> Iterator[Finding]:
    """Yield the differences in the part that is not sharded: counters, schedule, the optimizer's groups."""
    values = []
    for each in stored:
        state = each.common()
        values.append(leaves({key: value for key, value in state.items() if key not in _DESCRIBES}))
    for name in dict.fromkeys(name for each in values for name in each):
        piece = Piece(name, None, (), (), None, COMMON, 0, 0)
        finding = _finding(piece, [each.get(name) for each in values])
        yield from [finding] if finding else []


def _finding(piece: Piece, values: Sequence[Any]) -> Finding | None:
    """Return how the runs' values of one piece differ; None if they do not."""
    classes = classed(values, lambda a, b: of_values(a, b) is None)
    if len(classes) == 1:
        return None
    reference = values[classes[0][0]]
    others = {run: of_values(reference, values[group[0]]) for group in classes[1:] for run in group}
    return Finding(piece, classes, others)


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
