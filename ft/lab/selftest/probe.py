"""Operators of a real training step, executed again and again on the very inputs that they come with.

Nothing is recorded for later: the inputs are there, with their strides and aliases, at the moment of the call. What an
operator draws is drawn anew from the same state of the generator, what it writes in place is computed beside
(``ft.systems.dmr.runtime.redundant``), as DMR itself does at run time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.digest import compare, differing
from ft.systems.dmr.runtime.operators import Nature, is_counted, nature, tensors_in
from ft.systems.dmr.runtime.redundant import check_in_place, execute_again, state_before, written

STABLE, UNSTABLE, REFUSED, NOT_TRIED = "stable", "unstable", "refused", "not tried"
"""What becomes of an unstable operator with torch's deterministic algorithms. REFUSED: torch has none for it.
NOT_TRIED: they are on already, or have to be from the start of the process."""

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
Again = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, order=True)
class Kind:
    """Calls that are taken for alike.

    Args:
        operator: as DMR names it. dtypes: of the tensors it is given. magnitude: log2 of the elements of the largest
            tensor, rounded up: how kernels split work depends on size.
    """

    operator: str
    dtypes: tuple[str, ...]
    magnitude: int


@dataclass(slots=True)
class Finding:
    """What executing calls of one kind again has shown.

    Attributes:
        kind: of the calls. case: the training step of the first one. shapes: of the tensors that one was given.
        calls: how many were executed again. runs: second executions, all together.
        differing: those that did not come out as the first. elements: most that differed in one, ``of`` so many.
        deterministic: None while stable; else STABLE, UNSTABLE, REFUSED or NOT_TRIED.
    """

    kind: Kind
    case: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 0
    runs: int = 0
    differing: int = 0
    elements: int = 0
    of: int = 0
    deterministic: str | None = None

    @property
    def is_stable(self) -> bool:
        return not self.differing


class Probe(TorchDispatchMode):
    """Within, every operator is executed ``runs`` times more on its first ``calls`` calls of a kind.

    Attributes:
        findings: by kind. case: a name for what is under way.
    """

    def __init__(self, runs: int, calls: int = 2):
        super().__init__()
        self._runs, self._calls = runs, calls
        self.findings: dict[Kind, Finding] = {}
        self.case = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = nature(func)
        if not is_counted(kind, args, kwargs):
            return func(*args, **kwargs)
        finding = self._of(kind, args, kwargs)
        if finding.calls >= self._calls:
            return func(*args, **kwargs)
        finding.calls += 1
        return self._execute(finding, kind, func, args, kwargs)

    def _of(self, kind: Nature, args: Sequence[Any], kwargs: dict[str, Any]) -> Finding:
        given = tensors_in((args, kwargs))
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in given)
        magnitude = max((tensor.numel() for tensor in given), default=0).bit_length()
        alike = Kind(kind.name, tuple(dtypes), magnitude)
        if alike not in self.findings:
            self.findings[alike] = Finding(alike, self.case, tuple(tuple(tensor.shape) for tensor in given))
        return self.findings[alike]

    def _execute(self, finding: Finding, kind: Nature, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The call itself, and the others beside it."""
        if not kind.written:
            state = state_before(kind, args, kwargs)
            out = func(*args, **kwargs)
            self._repeat(finding, tensors_in(out), lambda: tensors_in(execute_again(func, args, kwargs, state)))
            return out
        first = check_in_place(kind, func, args, kwargs)
        self._repeat(finding, first, lambda: check_in_place(kind, func, args, kwargs))
        out = func(*args, **kwargs)
        _compare(finding, first, tensors_in(written(kind, args, kwargs)))
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
        finding.elements, finding.of = elements, sum(a.numel() for a in first)


def _deterministically(again: Again, runs: int) -> str:
    """Whether torch's deterministic algorithms make it stable."""
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
