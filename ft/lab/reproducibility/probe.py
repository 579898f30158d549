"""Execute the operators of real training steps repeatedly on their actual inputs, and compare the results.

Repetition happens at the moment of the call, when the inputs exist with their strides and aliases; nothing is recorded
for later. Random operators draw again from the same state of the generator, and operators that write in place are
computed on copies (``ft.systems.dmr.runtime.operators``), as DMR does at run time. The models that are trained
(:func:`cases`) together execute all operators of a GPT."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft.show.text import count, table
from ft.systems.dmr.digest import differing, same
from ft.systems.dmr.plan.file import Unstable
from ft.systems.dmr.runtime.operators import (
    Call,
    call_of,
    check_in_place,
    execute_again,
    is_counted,
    state_before,
    tensors_in,
    written,
)

_ALWAYS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size {vocab} --num-layers 2 --hidden-size {hidden} "
    "--num-attention-heads 8 --seq-length {length} --micro-batch-size 2 --lr 1e-3 --clip-grad 1.0"
)
_SIZES = {
    "small": {"vocab": 500, "hidden": 64, "length": 64},
    "large": {"vocab": 8000, "hidden": 256, "length": 256},
    "huge": {"vocab": 50000, "hidden": 2048, "length": 1024},
}
"""Sizes of the models. "huge" is for GPUs, where a varying order of summation shows only with many thread blocks."""

_KINDS = {
    "dense": "--position-embedding-type learned_absolute --hidden-dropout 0.1 --attention-dropout 0.1",
    "dense, full recomputation": "--position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 4 --qk-layernorm "
    "--untie-embeddings-and-output-weights --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --optimizer sgd --calculate-per-token-loss",
    "MoE, all to all": "--position-embedding-type rope --num-experts 4 --moe-router-topk 2 --swiglu "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 64 --hidden-dropout 0.1 --recompute-activations",
    "MoE, all gather": "--position-embedding-type rope --num-experts 4 --moe-router-topk 2 "
    "--disable-bias-linear --moe-token-dispatcher-type allgather --moe-aux-loss-coeff 1e-2 "
    "--attention-dropout 0.1 --use-distributed-optimizer",
}
_PRECISIONS = {"fp32": "", "bf16": "--bf16"}


@dataclass(frozen=True)
class Case:
    """One model that the self-test trains for a few steps, by flags of the trainer, ``pretrain_gpt.py``."""

    name: str
    flags: str


def cases(device: str, *, deterministic: bool = False) -> list[Case]:
    """Return the cases that are trained by default on a ``device`` ("cpu" or "cuda")."""
    sizes = ("small", "huge") if device == "cuda" else ("small", "large")
    extra = " --deterministic-mode" if deterministic else ""
    return [
        Case(f"{kind}, {precision}, {size}", f"{_ALWAYS.format(**_SIZES[size])} {flags} {more}{extra}")
        for size in sizes
        for kind, flags in _KINDS.items()
        for precision, more in _PRECISIONS.items()
    ]


STABLE, UNSTABLE, REFUSED, NOT_TRIED = "stable", "unstable", "refused", "not tried"
"""Outcomes for an operator that was not reproducible and is executed again with torch's deterministic algorithms.

- STABLE: with them, the operator is reproducible.
- UNSTABLE: it is not reproducible with them either.
- REFUSED: torch has no deterministic algorithm for the operator.
- NOT_TRIED: they were enabled from the beginning, or have to be enabled before the process starts (cuBLAS).
"""

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
Again = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, order=True)
class Kind:
    """Calls of an operator that are treated as equivalent. ``magnitude``: bit length of the largest input's number of
    elements; kernels for larger inputs may split their work differently, and so have other results."""

    operator: str
    dtypes: tuple[str, ...]
    magnitude: int


@dataclass(slots=True)
class Repeated:
    """The result of executing calls of one kind repeatedly.

    Attributes:
        case: name of the training step in which the kind occurred first.
        shapes: shapes of the input tensors of the first call.
        runs: number of repetitions of all calls together.
        differing: number of repetitions whose result differed from the first one.
        elements: largest number of elements that differed in one repetition, whose output has ``output_elements``.
        deterministic: None while no repetition differed; else the result with torch's deterministic algorithms.
    """

    kind: Kind
    case: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 0
    runs: int = 0
    differing: int = 0
    elements: int = 0
    output_elements: int = 0
    deterministic: str | None = None

    @property
    def is_stable(self) -> bool:
        return not self.differing


class Probe(TorchDispatchMode):
    """Dispatch mode that repeats the first ``calls`` calls of each kind ``runs`` times. ``case``: name of the training
    step that is being executed."""

    def __init__(self, runs: int, calls: int = 2):
        super().__init__()
        self._runs, self._calls = runs, calls
        self.findings: dict[Kind, Repeated] = {}
        self.case = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = call_of(func, args, kwargs)
        if not is_counted(call):
            return func(*args, **call.kwargs)
        finding = self._finding_of(call)
        if finding.calls >= self._calls:
            return func(*args, **call.kwargs)
        finding.calls += 1
        return self._execute(finding, call)

    def _finding_of(self, call: Call) -> Repeated:
        given = tensors_in((call.args, call.kwargs))
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in given)
        magnitude = max((tensor.numel() for tensor in given), default=0).bit_length()
        kind = Kind(call.kind.name, tuple(dtypes), magnitude)
        if kind not in self.findings:
            self.findings[kind] = Repeated(kind, self.case, tuple(tuple(tensor.shape) for tensor in given))
        return self.findings[kind]

    def _execute(self, finding: Repeated, call: Call) -> Any:
        """Execute the call and its repetitions; return the result of the call itself."""
        if not call.kind.written:
            state = state_before(call)
            out = call.func(*call.args, **call.kwargs)
            self._repeat(finding, tensors_in(out), lambda: tensors_in(execute_again(call, state)))
            return out
        first = check_in_place(call)
        self._repeat(finding, first, lambda: check_in_place(call))
        out = call.func(*call.args, **call.kwargs)
        _compare(finding, first, tensors_in(written(call)))
        return out

    def _repeat(self, finding: Repeated, first: Sequence[torch.Tensor], again: Again) -> None:
        before = finding.differing
        for _ in range(self._runs):
            _compare(finding, first, again())
        if finding.differing > before:
            both = (finding.deterministic, _deterministically(again, self._runs))
            finding.deterministic = max(both, key=(None, STABLE, NOT_TRIED, UNSTABLE, REFUSED).index)  # the worse one


def _compare(finding: Repeated, first: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> None:
    finding.runs += 1
    wrong = [(a, b) for a, b in zip(first, again, strict=True) if not same(a, b)]
    if not wrong:
        return
    finding.differing += 1
    alike = [(a, b) for a, b in wrong if a.shape == b.shape and a.dtype == b.dtype]
    elements = sum(int(differing(a, b)) for a, b in alike) or sum(a.numel() for a, _ in wrong)
    if elements > finding.elements:
        finding.elements, finding.output_elements = elements, sum(a.numel() for a in first)


def _deterministically(again: Again, runs: int) -> str:
    """Return the operator's result with torch's deterministic algorithms: STABLE, UNSTABLE, REFUSED or NOT_TRIED."""
    if torch.are_deterministic_algorithms_enabled():
        return NOT_TRIED
    try:
        with _deterministic_algorithms():
            first = again()
            alike = all(same(a, b) for _ in range(runs) for a, b in zip(first, again(), strict=True))
    except RuntimeError as error:
        return NOT_TRIED if _CUBLAS in str(error) else REFUSED
    return STABLE if alike else UNSTABLE


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_MEANING = {
    STABLE: "reproducible",
    UNSTABLE: "not either",
    REFUSED: "torch has no other kernel",
    NOT_TRIED: "try --deterministic",
}
_HEAD = ("operator", "dtypes", "largest", "differed", "elements", "with --deterministic-mode")


@dataclass(frozen=True)
class ProbeResult:
    """The result of a self-test. ``deterministic``: whether torch's deterministic algorithms were enabled."""

    device: str
    threads: int
    torch: str
    deterministic: bool
    cases: Sequence[Case]
    findings: Sequence[Repeated]

    @property
    def unstable(self) -> list[Repeated]:
        """Return the findings of unstable operators, ordered by operator."""
        return sorted((one for one in self.findings if not one.is_stable), key=lambda one: one.kind)

    def names(self) -> Unstable:
        """Return the list of unstable operators that a run with DMR reads."""
        operators = dict.fromkeys(one.kind.operator for one in self.unstable)
        return Unstable(tuple(operators), str(self.torch), self.device)


def as_text(outcome: ProbeResult) -> str:
    """Return a table of the unstable operators, with advice."""
    operators = {one.kind.operator for one in outcome.findings}
    runs = sum(one.runs for one in outcome.findings)
    where = f"{outcome.device}, {count(outcome.threads, 'thread')}, torch {outcome.torch}"
    mode = ", deterministic mode" if outcome.deterministic else ""
    watched = f"{count(len(operators), 'operator')} of {count(len(outcome.cases), 'model')} in training"
    lines = [
        f"{where}{mode}",
        f"{watched}, {count(len(outcome.findings), 'kind')} of calls, executed {runs} times again",
    ]
    if not outcome.unstable:
        return "\n".join([*lines, "all results were equal each time, bit for bit"])
    rows = [_row(one, deterministic=outcome.deterministic) for one in outcome.unstable]
    return "\n".join([*lines, "", table(_HEAD, rows, right=(2, 3, 4)), "", *_advice(outcome)])


def as_values(outcome: ProbeResult) -> dict[str, Any]:
    """Return the outcome as JSON values."""
    return {
        "device": outcome.device,
        "threads": outcome.threads,
        "torch": outcome.torch,
        "deterministic_mode": outcome.deterministic,
        "cases": [asdict(case) for case in outcome.cases],
        "unstable": [_values(one) for one in outcome.unstable],
        "stable": sorted({one.kind.operator for one in outcome.findings} - set(outcome.names().operators)),
    }


def _row(one: Repeated, *, deterministic: bool) -> tuple[str, ...]:
    largest = max(one.shapes, key=math.prod, default=())
    instead = "that is on" if deterministic else _MEANING[one.deterministic or NOT_TRIED]
    return (
        one.kind.operator,
        ", ".join(one.kind.dtypes) or "-",
        " x ".join(map(str, largest)) or "-",
        f"{one.differing} of {one.runs}",
        f"{one.elements} of {one.output_elements}",
        instead,
    )


def _advice(outcome: ProbeResult) -> list[str]:
    worst: dict[str, set[str]] = {}
    for one in outcome.unstable:
        worst.setdefault(one.kind.operator, set()).add(one.deterministic or NOT_TRIED)
    helped = Counter(kinds == {STABLE} for kinds in worst.values())[True]
    lines = []
    if helped and not outcome.deterministic:
        lines.append(
            f"train with --deterministic-mode: {helped} of {count(len(worst), 'operator')} become reproducible"
        )
    if helped < len(worst):
        lines.append(
            "or exclude them from DMR: give --out unstable.json here, and --ft-dmr-unstable unstable.json to the "
            "trainer"
        )
    return lines


def _values(one: Repeated) -> dict[str, Any]:
    return {
        "operator": one.kind.operator,
        "dtypes": list(one.kind.dtypes),
        "shapes": [list(shape) for shape in one.shapes],
        "case": one.case,
        "calls": one.calls,
        "runs": one.runs,
        "differing_runs": one.differing,
        "elements": one.elements,
        "of": one.output_elements,
        "deterministic_algorithms": one.deterministic,
    }
