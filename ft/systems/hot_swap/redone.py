"""Compares a step that a recovery has a worker do again with the worker's first try at it.

A worker whose state and data were restored reads the same batches and computes the same values. A difference shows that
a training loop keeps something that no recovery restores, such as a data iterator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_ROW, _WORD = 1024, 8
"""Words in each row of a digest, and bytes in a word."""


@dataclass
class Try:
    """What a worker has seen of one try at a step, which a failure may have interrupted.

    Attributes:
        batches: digest of the model's inputs, for each forward pass.
        outputs: sum of the model's outputs, for each forward pass: of the losses, if the model returns losses.
        norm: norm of the gradients, None if the optimizer has not returned one.
        ends: for each forward pass on a device, what tells whether the device has done it.
    """

    batches: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    norm: Any = None
    ends: list[torch.cuda.Event] = field(default_factory=list)

    def interrupted(self) -> "Try":
        """Return what is known to be right while the epoch ends: a device goes on with wrong values after that."""
        done = sum(end.query() for end in list(self.ends)) if self.ends else len(self.outputs)
        return Try(self.batches[:done], self.outputs[:done], None if self.ends else self.norm)


class Tries:
    """The tries of one worker at its last steps.

    Args:
        chunks: model chunks, whose forward passes are watched while gradients are recorded.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._committed: dict[int, Try] = {}
        self._first: dict[int, Try] = {}
        self._present = Try()
        self._interrupted: Try | None = None
        for chunk in chunks:
            chunk.register_forward_hook(self._watch, with_kwargs=True)

    def updated(self, result: Any) -> None:
        """Take note of what megatron-core's optimizer has returned: (whether it stepped, gradient norm, zeros)."""
        if isinstance(result, tuple) and len(result) > 1:
            self._present.norm = result[1]

    def committed(self, step: int) -> list[str]:
        """Note that the present try has committed ``step``; return how it differs from the first try."""
        done = self._renew()
        self._committed = {number: old for number, old in self._committed.items() if number >= step - 1} | {step: done}
        first = self._first.pop(step, None)
        return [] if first is None else list(differences(first, done))

    def closes(self, epoch: int, reason: str) -> None:
        """Note that the present try is interrupted. Called in another thread, before operations on the device end."""
        self._interrupted = self._present.interrupted()

    def recovers(self, step: int, is_exact: bool) -> None:
        """Note that the recovery has restored ``step``: the tries at the steps after it are first ones."""
        last = self._interrupted or self._present.interrupted()
        tried = {**self._committed, max(self._committed, default=step) + 1: last}
        # a first try that reached further than a later one is kept
        for number, new in tried.items():
            old = self._first.get(number)
            if number > step and (old is None or len(new.batches) > len(old.batches)):
                self._first[number] = new
        if not is_exact:
            self._first = {}
        self._committed = {number: old for number, old in self._committed.items() if number <= step}
        self._renew()

    def _renew(self) -> Try:
        done, self._present, self._interrupted = self._present, Try(), None
        return done

    def _watch(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        with torch.no_grad():
            given, returned = list(_tensors([args, kwargs])), list(_tensors(output))
            self._present.batches.append(_sum([digest(tensor) for tensor in given]))
            sums = [tensor.sum(dtype=torch.float64) for tensor in returned if tensor.is_floating_point()]
            self._present.outputs.append(_sum(sums))
        if any(tensor.is_cuda for tensor in (*given, *returned)):
            end = torch.cuda.Event()
            end.record()
            self._present.ends.append(end)  # after it: an event that was not recorded counts as passed


def differences(first: Try, again: Try) -> Iterator[str]:
    """Yield a clause for each kind of value in which two tries at a step differ, as far as both have come."""
    pairs = list(zip(first.batches, again.batches, strict=False))
    if others := [n for n, (one, two) in enumerate(pairs, 1) if one.item() != two.item()]:
        yield f"{len(others)} of {len(pairs)} forward passes read other batches, the first of them pass {others[0]}"
    sums = [(one.item(), two.item()) for one, two in zip(first.outputs, again.outputs, strict=False)]
    changed = [(n, one, two) for n, (one, two) in enumerate(sums, 1) if one != two and (one == one or two == two)]
    if changed:
        number, one, two = changed[0]
        yield f"the outputs (losses) of forward pass {number} summed up to {one!r}, and to {two!r} when done again"
    if first.norm is not None and again.norm is not None and float(first.norm) != float(again.norm):
        yield f"the norm of the gradients was {float(first.norm)!r}, and {float(again.norm)!r} when done again"


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor's bytes on its device, as int64: it depends on the order of the elements, too."""
    whole = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = whole.clone() if whole.storage_offset() % _WORD else whole  # a view as words has to be aligned
    end = len(whole) // (_WORD * _ROW) * _WORD * _ROW
    rows, rest = whole[:end].view(torch.int64).view(-1, _ROW), whole[end:]
    parts = (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest.to(torch.int64))
    return _sum([(_weights(part) * part).sum() for part in parts])


def _weights(part: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, len(part) + 1, device=part.device) * 2654435761 % 2147483647


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of scalars, each weighed by its place; zero if there are none."""
    total = values[0] if values else torch.zeros((), device="cpu")
    for value in values[1:]:
        total = total * 31 + value.to(total.device)
    return total


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor) and values.layout is torch.strided:
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)
