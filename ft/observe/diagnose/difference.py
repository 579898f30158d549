"""How two values differ that should have the same bits."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ft.systems.dmr.digest.bits import integers

_BLOCK = 1 << 20
"""Elements looked at together: what a comparison needs beyond both tensors is some tens of bytes for each of them."""


@dataclass(frozen=True)
class Difference:
    """What differs between a value and its reference.

    Args:
        elements: that the value has.
        differing: of them, in at least one bit.
        not_finite: of those, NaN or infinite on one side; ``ulp`` and ``absolute`` leave them out.
        ulp: largest distance in representable numbers in between, of floating-point elements.
        absolute: largest distance.
        first, last: flat index of the first and of the last differing element; None without an order.
        values: the reference's and this one's at ``first``, where they are numbers.
        mask: which bits differ, in any element.
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
    """The difference of two tensors on the CPU; None where all bits are equal, so that NaN is equal to itself.

    Tensors of another dtype or shape differ in every element.
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
    """Of differing elements: their bits on both sides, and their flat indices."""
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
    """Distances of floating-point numbers given by their bits: IEEE formats count up in sign and magnitude.

    A distance beyond int64, which only doubles of different signs have, is cut off there.
    """
    most = torch.iinfo(torch.int64).max
    magnitude = torch.iinfo(ours.dtype).max if ours.dtype != torch.uint8 else 0x7F
    signs = [(bits < 0) if ours.dtype != torch.uint8 else bits > magnitude for bits in (ours, theirs)]
    a, b = ((bits & magnitude).long() for bits in (ours, theirs))
    across = torch.where(a > most - b, most, a + b)
    return torch.where(signs[0] == signs[1], (a - b).abs(), across)


def merged(a: Difference, b: Difference) -> Difference:
    """Two parts of one value as one; ``elements`` is the first's, and places are those of the one that comes first."""
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
    """The difference of two values other than tensors: numbers, texts, arrays, and containers of them."""
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
    """What containers hold in the end, by the path to it: ``optimizer.param_groups[0].lr``."""
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
