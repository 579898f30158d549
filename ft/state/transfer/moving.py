"""The one operation of every transfer: a range of a state's bytes goes from one memory to another in checked chunks.

The state is laid out as one contiguous run of bytes (:class:`ft.state.layout.Table`). A range is sent as frames:

    CHUNK  up to 1 MiB of the state, at its offset
    DONE   all chunks of the range were sent while the state was unchanged
    GONE   the state was withdrawn or overwritten: everything that was received is invalid
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from ft.net.framed import BadFrame, Bytes, FramedChannel, Mark
from ft.state.layout import CHUNK, Memory

CHUNK_KIND, DONE, GONE = b"CHNK", b"DONE", b"GONE"

Disturb = Callable[[int, int, list[Bytes]], list[list[Bytes]]]
"""Function (index of a chunk, number of chunks, pieces of its frame) -> frames to send instead, for fault injection."""


class Withdrawn(Exception):
    """The state must not be read any more."""


class Gone(Exception):
    """The other end has withdrawn the state."""


def send_range(
    channel: FramedChannel,
    mark: Mark,
    piece: range,
    reading: Callable[[int, int], AbstractContextManager[Memory]],
    disturb: Disturb | None = None,
) -> None:
    """Send a range of a state.

    Args:
        channel: channel to the receiver.
        mark: the state.
        piece: range of bytes.
        reading: function (start, stop) -> context in which the bytes [start, stop) do not change; raises
            :class:`Withdrawn`, when it is entered or left, if they have changed or may change.
        disturb: for fault injection.
    """
    count = -(-len(piece) // CHUNK)
    try:
        for index, start in enumerate(range(piece.start, piece.stop, CHUNK)):
            stop = min(start + CHUNK, piece.stop)
            with reading(start, stop) as memory:
                frame = channel.pack(CHUNK_KIND, mark, start, *_chunk(channel, memory, start, stop))
                for sent in [frame] if disturb is None else disturb(index, count, frame):
                    channel.write(sent)
    except Withdrawn:
        channel.send(GONE, mark)
    else:
        channel.send(DONE, mark)


def receive_range(
    channel: FramedChannel, mark: Mark, piece: range, memory: Memory, moved: Callable[[], None] = lambda: None
) -> int | None:
    """Receive a range of a state.

    Args:
        channel: channel to the sender.
        mark: the state; chunks of another one are refused.
        piece: range of bytes.
        memory: memory to write into; not valid before this function has returned None.
        moved: called after every chunk.

    Returns:
        offset of the first chunk that does not match its checksum; None if all do.

    Raises:
        Gone: the sender has withdrawn the state.
        BadFrame: something else was received. The channel has to be closed.
    """
    damaged = None
    for start in range(piece.start, piece.stop, CHUNK):
        stop = min(start + CHUNK, piece.stop)
        head = channel.next()
        if head.kind == GONE:
            raise Gone("the state was withdrawn during the transfer")
        if (head.kind, head.mark, head.offset) != (CHUNK_KIND, mark, start):
            raise BadFrame(f"{head} instead of the chunk at byte {start} of {mark}")
        place = memory.whole(start, stop)
        is_sound = channel.take(head, channel.scratch(stop - start) if place is None else place)
        if place is None and is_sound:
            memory.scatter(start, stop, channel.scratch(stop - start))
        memory.note(start, head.check)
        if not is_sound and damaged is None:
            damaged = start
        moved()
    end = channel.receive()
    if end.kind == GONE:
        raise Gone("the state was withdrawn during the transfer")
    if (end.kind, end.mark) != (DONE, mark):
        raise BadFrame(f"{end} instead of the end of {mark}")
    return damaged


def _chunk(channel: FramedChannel, memory: Memory, start: int, stop: int) -> tuple[Bytes, int]:
    """Return the bytes [start, stop) and their checksum."""
    chunk = memory.whole(start, stop)
    if chunk is None:
        chunk = channel.scratch(stop - start)
        memory.gather(start, stop, chunk)
    return chunk, memory.checksum(start, chunk)
