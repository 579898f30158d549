"""Options of FT-HSDP's all-reduce ring between replicas (FT-HSDP, section 4.2)."""

from dataclasses import dataclass

from ft.base.errors import UserError

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
        wide_sums: whether sums of bf16 tensors are sent in fp32 and rounded once, which takes (3N-4)/(2N-2) times the
            bytes for N members; otherwise they are sent in bf16, and every member that adds rounds, as in gloo and
            NCCL.
        streams: number of connections that carry data to a neighbour.
        limit_s: time limit without progress, in seconds, until ``Ring.expect`` sets another one.
    """

    chunk_bytes: int = CHUNK_BYTES["cpu"]
    chunks: int = 2
    wide_sums: bool = True
    streams: int = 1
    limit_s: float = 60.0

    def shared(self) -> tuple[int, ...]:
        """Return the options that all members must have in common."""
        return self.chunk_bytes, self.chunks, int(self.wide_sums), self.streams

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
