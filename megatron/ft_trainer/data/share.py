"""Computes a value on rank 0 only, and broadcasts the result or the error to all ranks."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft.base import bounded_json
from ft.base.errors import FtError, UserError


def alone() -> bool:
    """Return whether this rank is joining a running job, whose other ranks cannot take part in its collectives."""
    return dist.is_initialized() and getattr(dist.group.WORLD, "is_alone", False)


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """Return on every rank the result of ``compute`` on rank 0. All ranks of the default process group have to call it.

    A rank that joins a running job (see ``alone``) calls ``compute`` itself. The result is sent as JSON, so tuples
    arrive as lists.

    Raises:
        UserError: ``compute`` has raised a UserError; it is raised on every rank.
        FtError: ``compute`` has raised another exception; rank 0 raises that exception, the other ranks an FtError.
    """
    if not dist.is_initialized() or alone():
        return compute()
    if dist.get_rank() != 0:
        return _unpack(bounded_json.loads(_broadcast(b""), non_finite=True))
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
    """Broadcast ``content`` from rank 0, and return it on every rank."""
    from megatron.patches import platform

    device = platform().device
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    buffer = torch.frombuffer(bytearray(content or bytes(size.item())), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()
