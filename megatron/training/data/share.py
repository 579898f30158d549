"""Computes a value on rank 0, and sends the result or the error to all ranks."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import FtError, UserError


def alone() -> bool:
    """Return whether this rank is joining a running job: the others are training and take part in no collective."""
    return dist.is_initialized() and getattr(dist.group.WORLD, "is_alone", False)


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """Return on every rank what ``compute`` returns on rank 0. Collective over the default process group.

    A rank that is ``alone`` computes for itself. The result is sent as JSON, so tuples arrive as lists.

    Raises:
        UserError: on every rank, if ``compute`` raised it.
        FtError: on the other ranks, if ``compute`` raised anything else; rank 0 gets the exception itself.
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
    """Return rank 0's ``content``."""
    from megatron.patches import platform

    device = platform().device
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    buffer = torch.frombuffer(bytearray(content or bytes(size.item())), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()
