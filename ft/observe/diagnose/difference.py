"""Measure how two values differ that should have the same bits, for ``ft diagnose compare``.

ULP (unit in the last place) is the distance of two floating-point numbers, counted in representable numbers.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

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
