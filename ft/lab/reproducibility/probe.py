"""Execute the operators of a real training step repeatedly on their actual inputs, and compare the results.

Repetition happens at the moment of the call, when the inputs exist with their strides and aliases; nothing is recorded
for later. Random operators draw again from the same state of the generator, and operators that write in place are
computed on copies (``ft.systems.dmr.runtime.operators``), as DMR does at run time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.digest import compare, differing
from ft.systems.dmr.runtime.operators import (
    OperatorProperties,
    check_in_place,
    execute_again,
    is_counted,
    properties_of,
    state_before,
    tensors_in,
    written,
)

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
    """Calls of an operator that are treated as equivalent.

    Attributes:
        operator: DMR's name of the operator.
        magnitude: bit length of the largest input's number of elements; kernels for larger inputs may split their work
            differently, and so have other results.
    """

    operator: str
    dtypes: tuple[str, ...]
    magnitude: int


@dataclass(slots=True)
class Finding:
    """The result of executing calls of one kind repeatedly.

    Attributes:
        case: name of the training step in which the kind occurred first.
        shapes: shapes of the input tensors of the first call.
        calls: number of calls that were repeated.
        runs: number of repetitions of all calls together.
        differing: number of repetitions whose result differed from the first one.
        elements: largest number of elements that differed in one repetition.
        output_elements: number of elements of the output in the repetition that ``elements`` comes from.
        deterministic: None while no repetition differed; else the result with torch's deterministic algorithms:
            STABLE, UNSTABLE, REFUSED or NOT_TRIED.
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
    """Dispatch mode that repeats the first ``calls`` calls of each kind ``runs`` times.

    Attributes:
        case: name of the training step that is being executed.
    """

    def __init__(self, runs: int, calls: int = 2):
        super().__init__()
        self._runs, self._calls = runs, calls
        self.findings: dict[Kind, Finding] = {}
        self.case = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operator = properties_of(func)
        if not is_counted(operator, args, kwargs):
            return func(*args, **kwargs)
        finding = self._finding_of(operator, args, kwargs)
        if finding.calls >= self._calls:
            return func(*args, **kwargs)
        finding.calls += 1
        return self._execute(finding, operator, func, args, kwargs)

    def _finding_of(self, operator: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]) -> Finding:
        given = tensors_in((args, kwargs))
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in given)
        magnitude = max((tensor.numel() for tensor in given), default=0).bit_length()
        kind = Kind(operator.name, tuple(dtypes), magnitude)
        if kind not in self.findings:
            self.findings[kind] = Finding(kind, self.case, tuple(tuple(tensor.shape) for tensor in given))
        return self.findings[kind]

    def _execute(
        self, finding: Finding, operator: OperatorProperties, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Execute the call and its repetitions; return the result of the call itself."""
        if not operator.written:
            state = state_before(operator, args, kwargs)
            out = func(*args, **kwargs)
            self._repeat(finding, tensors_in(out), lambda: tensors_in(execute_again(func, args, kwargs, state)))
            return out
        first = check_in_place(operator, func, args, kwargs)
        self._repeat(finding, first, lambda: check_in_place(operator, func, args, kwargs))
        out = func(*args, **kwargs)
        _compare(finding, first, tensors_in(written(operator, args, kwargs)))
        return out

    def _repeat(self, finding: Finding, first: Sequence[torch.Tensor], again: Again) -> None:
        before = finding.differing
        for _ in range(self._runs):
            _compare(finding, first, again())
        if finding.differing > before:
            finding.deterministic = _worse(finding.deterministic, _deterministically(again, self._runs))


def _compare(finding: Finding, first: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> None:
    finding.runs += 1
    wrong = [(a, b) for a, b in zip(first, again, strict=True) if not compare(a, b).item()]
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
            same = all(compare(a, b).item() for _ in range(runs) for a, b in zip(first, again(), strict=True))
    except RuntimeError as error:
        return NOT_TRIED if _CUBLAS in str(error) else REFUSED
    return STABLE if same else UNSTABLE


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _worse(one: str | None, other: str) -> str:
    order = (None, STABLE, NOT_TRIED, UNSTABLE, REFUSED)
    return max(one, other, key=order.index)
