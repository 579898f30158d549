"""Compare the checkpoints of several runs of the same training bit for bit, up to the first step that differs.

A piece is one shard of a tensor, or one object, in a checkpoint. The manifest is the checkpoint's list of its files,
with their sizes and checksums.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from ft.observe.diagnose.difference import Difference, leaves, of_values
from ft.observe.diagnose.runs import Run, check_alike, common_steps, notes
from ft.observe.diagnose.stored import COMMON, Blocks, Piece, Stored, read

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
        runs: the runs that were compared.
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
        runs: the runs.
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
