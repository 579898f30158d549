"""Small JSON values that ranks exchange, and decisions that rank 0 makes for all of them."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft.base import bounded_json
from ft.base.errors import FtError, UserError
from megatron.patches import platform


def alone() -> bool:
    """Return whether this rank is joining a running job, whose other ranks cannot take part in its collectives."""
    return dist.is_initialized() and getattr(dist.group.WORLD, "is_alone", False)


def share(value: Any, group: dist.ProcessGroup) -> list:
    """Return the values of all ranks of a gloo group, on every rank. All ranks have to call it."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    mine = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8)  # JSON ignores spaces at its end
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [_decoded(part) for part in parts]


def from_rank_0(compute: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Return on every rank the result of ``compute`` on rank 0. All ranks have to call it.

    A rank that joins a running job (see ``alone``) calls ``compute`` itself. The result is sent as JSON, so tuples
    arrive as lists.

    Args:
        compute: called on rank 0 only.
        group: a gloo group of all ranks; None: the default process group, if there is one.

    Raises:
        UserError: ``compute`` has raised a UserError; it is raised on every rank.
        FtError: ``compute`` has raised another exception; rank 0 raises that exception, the other ranks an FtError.
    """
    if not dist.is_initialized() or alone():
        return compute()
    device = platform().device if group is None else torch.device("cpu")
    if dist.get_rank() != 0:
        message = _decoded(_broadcast(b"", device, group))
        if "user_error" in message:
            raise UserError(*message["user_error"])
        if "error" in message:
            raise FtError(f"rank 0 failed: {message['error']}")
        return message["answer"]
    try:
        answer = compute()
    except BaseException as error:
        is_user_error = isinstance(error, UserError)
        failure = {"user_error": [error.problem, error.fix]} if is_user_error else {"error": repr(error)}
        _broadcast(json.dumps(failure).encode(), device, group)
        raise
    _broadcast(json.dumps({"answer": answer}).encode(), device, group)
    return answer


def _broadcast(content: bytes, device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Broadcast ``content`` from rank 0, and return it on every rank, [bytes] uint8."""
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0, group=group)
    buffer = torch.frombuffer(bytearray(content or bytes(int(size))), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, 0, group=group)
    return buffer.cpu()


def _decoded(data: torch.Tensor) -> Any:
    return bounded_json.loads(data.numpy().tobytes(), non_finite=True)
