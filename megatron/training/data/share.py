"""One rank decides, all ranks hear the decision, or the error."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import FtError, UserError


def alone() -> bool:
    """This rank assembles itself for a run that is under way: the others are training and answer nothing."""
    return dist.is_initialized() and getattr(dist.group.WORLD, "is_alone", False)


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """What ``compute`` answers on rank 0, on every rank; a collective call over the default process group.

    A rank that is ``alone`` computes for itself. The answer travels as JSON, so tuples arrive as lists.

    Raises:
        UserError: on every rank, where ``compute`` raised it.
        FtError: on the other ranks, where ``compute`` raised anything else; rank 0 gets the exception itself.
    """
    if not dist.is_initialized() or alone():
        return compute()
    if dist.get_rank() != 0:
        return _unpack(json.loads(_broadcast(b"")))
    try:
        answer = compute()
    except UserError as error:
        _broadcast(json.dumps({"user_error": [error.problem, error.fix]}).encode())
        raise
    except BaseException as error:
        _broadcast(json.dumps({"error": repr(error)}).encode())
        raise
    _broadcast(json.dumps({"answer": answer}).encode())
    return answer


def _unpack(message: dict[str, Any]) -> Any:
    if "user_error" in message:
        raise UserError(*message["user_error"])
    if "error" in message:
        raise FtError(f"rank 0 failed: {message['error']}")
    return message["answer"]


def _broadcast(content: bytes) -> bytes:
    """``content`` of rank 0."""
    from megatron.patches import platform

    device = platform().device
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    buffer = torch.frombuffer(bytearray(content or bytes(size.item())), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()
