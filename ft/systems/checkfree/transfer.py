"""Transfer the parameters of a pipeline stage to the lost stage next to it, from which CheckFree rebuilds that stage.

A rank sends to the rank with the same tensor- and data-parallel coordinates in the neighbour stage. It sends its
transformer blocks and an envelope: the other values, such as schedule and position, that the lost stage takes over.
There are two rounds of point-to-point messages in the pipeline's process group: first the lengths of head and body,
then head and body. The head is JSON (envelope, names, shapes and dtypes). The body is the bytes of the parameters, each
aligned to ``_ALIGN`` bytes.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ft.base import bounded_json
from ft.base.errors import FallbackError

_ALIGN = 16

Blocks = list[dict[str, torch.Tensor]]
"""The parameters of each transformer block of a stage, by their names within the block."""


def lend(to: Sequence[int], group: dist.ProcessGroup, blocks: Blocks, envelope: dict[str, Any]) -> None:
    """Send ``blocks`` and ``envelope`` to the logical ranks ``to``, all at once.

    Args:
        to: logical ranks that receive.
        group: group that contains sender and receivers, with logical ranks as global ranks.
        blocks: the parameters to send.
        envelope: JSON values to send with them.
    """
    described = [[[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in b.items()] for b in blocks]
    tensors = [held for block in blocks for held in block.values()]
    device = tensors[0].device if tensors else torch.device("cpu")
    text = json.dumps({"envelope": envelope, "blocks": described}, separators=(",", ":")).encode()
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    body = _pack(tensors, device)
    sizes = torch.tensor([head.numel(), body.numel()], dtype=torch.int64, device=device)
    for round_ in ((sizes,), (head, body)):
        _exchange([dist.P2POp(dist.isend, part, rank, group) for rank in to for part in round_])


def borrow(lenders: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[tuple[Blocks, dict]]:
    """Receive (blocks, envelope) from each of the logical ranks ``lenders``.

    Args:
        lenders: logical ranks that send.
        group: group that contains sender and receivers, with logical ranks as global ranks.
        device: device on which the parameters are received.

    Raises:
        FallbackError: the received bytes cannot be decoded.
    """
    sizes = [torch.zeros(2, dtype=torch.int64, device=device) for _ in lenders]
    _exchange([dist.P2POp(dist.irecv, size, rank, group) for rank, size in zip(lenders, sizes, strict=True)])
    parts = [[torch.empty(n, dtype=torch.uint8, device=device) for n in size.tolist()] for size in sizes]
    _exchange(
        [dist.P2POp(dist.irecv, part, rank, group) for rank, both in zip(lenders, parts, strict=True) for part in both]
    )
    return [_read(head, body) for head, body in parts]


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    body = torch.zeros(sum(_room(t.nbytes) for t in tensors), dtype=torch.uint8, device=device)
    at = 0
    for tensor in tensors:
        body[at : at + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        at += _room(tensor.nbytes)
    return body


def _read(head: torch.Tensor, body: torch.Tensor) -> tuple[Blocks, dict]:
    try:
        header = bounded_json.loads(head.cpu().numpy().tobytes())
        blocks, at = [], 0
        for named in header["blocks"]:
            block = {}
            for name, shape, kind in named:
                dtype = getattr(torch, kind)
                size = torch.Size(shape).numel() * dtype.itemsize
                block[name] = body[at : at + size].view(dtype).view(shape)
                at += _room(size)
            blocks.append(block)
        return blocks, header["envelope"]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FallbackError(
            f"the received parameters of a neighbour stage cannot be decoded ({type(error).__name__}: {error})"
        ) from error
