"""The names of communication operations: torch has several for each, by release, interface and recorder."""

from ft.faults.hang.look import RECV

_SAME: dict[str, tuple[str, ...]] = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        *("allgather", "allgather_coalesced", "_allgather_base", "_all_gather_base", "all_gather_into_tensor"),
        *("all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        *("all_gather_into_tensor_coalesced", "ALLGATHER_coalesced"),
    ),
    "reduce_scatter": (
        *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
        *("reduce_scatter_tensor_coalesced", "REDUCE_SCATTER_coalesced"),
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("_broadcast_oop",),
    "reduce": ("_reduce_oop",),
    "barrier": ("monitored_barrier", "all_reduce_barrier"),
    "coalesced": ("_end_coalescing",),
    RECV: ("recv_anysource",),
}
_NAMES = {other: name for name, others in _SAME.items() for other in others}


def source_name(filename: str, folder: str) -> str:
    """Return the path of a source file without the folder of installed packages, or without ``folder``.

    Args:
        filename: the path.
        folder: working directory of the process that runs it; "" if that is not known.
    """
    _, packages, rest = filename.rpartition("/site-packages/")
    return rest if packages else filename.removeprefix(f"{folder.rstrip('/')}/") if folder else filename


def operation_name(name: str) -> str:
    """Return the one name of an operation that torch, or its flight recorder, calls ``name``."""
    return _NAMES.get(name, name)
