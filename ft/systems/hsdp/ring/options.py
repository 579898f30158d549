"""Options of FT-HSDP's all-reduce ring between replicas (FT-HSDP, section 4.2), and the result of an all-reduce."""

from concurrent.futures import Future
from dataclasses import dataclass

from ft.base.errors import RecoverableError, UserError

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
"""Type of a device -> default size of a chunk. 1 MiB stays in a CPU's caches. FT-HSDP, section 4.2, uses 8 MB for GPUs:
each chunk costs some calls of CUDA and waits for them."""
_LARGEST_CHUNK = 1 << 30


@dataclass(frozen=True)
class RingOptions:
    """Options of a ring. All but ``limit_s`` must be equal on all members, which compare them when they connect.

    Attributes:
        chunk_bytes: chunk size S, the bytes that are sent, received and added at once, counted in fp32.
        chunks: C, the number of chunks per member in a partition (the part of a tensor that is reduced at once); at
            most S x C bytes are in flight to a neighbour.
        streams: number of connections that carry data to a neighbour.
        limit_s: time limit without progress, in seconds, until ``Ring.expect`` sets another one.
    """

    chunk_bytes: int = CHUNK_BYTES["cpu"]
    chunks: int = 2
    streams: int = 1
    limit_s: float = 60.0

    def shared(self) -> tuple[int, ...]:
        """Return the options that all members must have in common."""
        return self.chunk_bytes, self.chunks, self.streams

    def check(self) -> None:
        """Raise UserError if no ring can run with these options."""
        if not 8 <= self.chunk_bytes <= _LARGEST_CHUNK or self.chunk_bytes % 8:
            raise UserError(
                f"a chunk of {self.chunk_bytes} bytes", f"give a multiple of 8 between 8 and {_LARGEST_CHUNK}"
            )
        if not 1 <= self.chunks <= 1024:
            raise UserError(f"{self.chunks} chunks per member and partition", "give 1 to 1024")
        if not 1 <= self.streams <= 16:
            raise UserError(f"{self.streams} connections to a neighbour", "give 1 to 16")
        if not self.limit_s > 0:
            raise UserError(f"a limit of {self.limit_s} s", "give seconds above 0")


@dataclass(frozen=True)
class ReduceResult:
    """Result of an all-reduce.

    Attributes:
        ok: whether the tensor holds the result. If False, its content is undefined, and the training step has to be
            repeated.
        skipped: whether the all-reduce was never begun.
    """

    ok: bool
    reason: str = ""
    suspect: int | None = None
    skipped: bool = False


class Broken(RecoverableError):
    """The ring of this quorum cannot be used any more; it has to be reconfigured for the next quorum of replicas."""

    def __init__(self, reason: str, suspect: int | None = None):
        self.reason, self.suspect = reason, suspect
        super().__init__(reason)


class Pending(Future[ReduceResult]):
    """Handle of an all-reduce that was submitted to the ring's thread."""

    def wait(self) -> ReduceResult:
        """Wait until the all-reduce is over, and return its result.

        The time limit of the ring (``Ring.expect``) ensures that it ends.

        Raises:
            UserError: the members do not reduce the same tensors in the same order.
            BaseException: this process is at fault and a retry is useless; exceptions of the ``after`` function that
                was given to ``Ring.all_reduce`` are passed on.
        """
        return self.result()

    def end(self, outcome: ReduceResult | BaseException) -> None:
        """Set the result, or the exception that :meth:`wait` raises; called on the ring's thread, once."""
        if isinstance(outcome, BaseException):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)
