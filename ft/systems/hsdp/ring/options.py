"""What a ring is built with."""

from dataclasses import dataclass

from ft.base.errors import UserError

_LARGEST_CHUNK = 1 << 30


@dataclass(frozen=True)
class RingOptions:
    """The same on all members: they are part of what connections agree on.

    Attributes:
        chunk_bytes: S: what is sent, received and added at once, in bytes of the type that sums are kept in.
        chunks: C: chunks per member and partition; at most S x C bytes are in flight to a neighbour.
        wide_sums: sums of bf16 travel in fp32 and are rounded once; otherwise they travel in bf16, rounded by each
            member that adds to them, as gloo and NCCL do it. For N members that is (3N-4)/(2N-2) times the bytes.
        streams: connections that carry data to a neighbour.
        limit_s: how long nothing may move, until :meth:`Ring.expect` says otherwise.
    """

    chunk_bytes: int = 1 << 20
    chunks: int = 2
    wide_sums: bool = True
    streams: int = 1
    limit_s: float = 60.0

    def shared(self) -> tuple[int, ...]:
        """What members must have in common to understand one another."""
        return self.chunk_bytes, self.chunks, int(self.wide_sums), self.streams

    def check(self) -> None:
        """Raises UserError when no ring can run with these."""
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
