"""The framed channel: a frame counts once, at its place in its connection, and only as it was sent."""

import contextlib
import random
import socket
import threading
import time

import pytest

from ft.net import framed
from ft.net.framed import HEAD_BYTES, BadFrame, FramedChannel, Mark, checksum

TOKEN, PURPOSE, LIMIT_S = "the token of this run", "ft-test-1", 60.0
MARK, DATA = Mark(3, 7, 2), bytes(range(256)) * 40


class Ends:
    """Both ends of a channel, and a wire between them of which the test decides what arrives."""

    def __init__(self):
        near, self.wire = socket.socketpair()
        self.feed, far = socket.socketpair()
        self.near, self.far = FramedChannel(near, LIMIT_S), FramedChannel(far, LIMIT_S)
        pumps = [
            threading.Thread(target=self._pump, args=ends) for ends in ((self.wire, self.feed), (self.feed, self.wire))
        ]
        for pump in pumps:
            pump.start()
        accepting = threading.Thread(target=self.far.accept, args=(TOKEN, PURPOSE, LIMIT_S))
        accepting.start()
        self.near.dial(TOKEN, PURPOSE, LIMIT_S)
        accepting.join()
        self._is_over = True
        for pump in pumps:
            pump.join()

    _is_over = False

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        while not self._is_over:
            with contextlib.suppress(BlockingIOError):
                sink.sendall(source.recv(1 << 16, socket.MSG_DONTWAIT))
            time.sleep(0.001)

    def sent(self) -> bytes:
        """Return what the near end has sent, which has not arrived."""
        return self.wire.recv(1 << 20)

    def close(self) -> None:
        for each in (self.near, self.far, self.wire, self.feed):
            each.close()


@pytest.fixture
def ends():
    both = Ends()
    yield both
    both.close()


def bulk(ends: Ends, data: bytes = DATA) -> bytes:
    ends.near.write(ends.near.pack(b"data", MARK, 64, data, checksum(data)))
    return ends.sent()


def test_messages_and_data_arrive_as_they_were_sent(ends):
    ends.near.send(b"tell", MARK, {"a": [1, "ü"]}, b"one", b"", DATA)
    ends.feed.sendall(ends.sent())
    found = ends.far.receive()
    assert (found.kind, found.mark, found.words) == (b"tell", MARK, {"a": [1, "ü"]})
    assert found.bodies == [b"one", b"", DATA]
    ends.feed.sendall(bulk(ends))
    head, into = ends.far.next(), memoryview(bytearray(len(DATA)))
    assert (head.kind, head.mark, head.offset, head.length) == (b"data", MARK, 64, len(DATA))
    assert ends.far.take(head, into) and bytes(into) == DATA


def test_damaged_data_is_told_and_the_next_frame_is_sound(ends):
    for flipped in (True, False):
        frame = bytearray(bulk(ends))
        frame[HEAD_BYTES + 5000] ^= flipped
        ends.feed.sendall(frame)
        assert ends.far.take(ends.far.next(), memoryview(bytearray(len(DATA)))) is not flipped


def test_no_bit_of_a_head_or_of_a_message_can_change_unseen(seed):
    rng = random.Random(seed)
    for is_message in (True, False) * 10:
        ends = Ends()
        if is_message:
            ends.near.send(b"tell", MARK, {"a": 1}, b"one")
            frame = bytearray(ends.sent())
        else:
            frame = bytearray(bulk(ends))
        frame[rng.randrange(len(frame) if is_message else HEAD_BYTES)] ^= 1 << rng.randrange(8)
        ends.feed.sendall(frame)
        with pytest.raises(BadFrame, match="does not fit"):
            ends.far.receive() if is_message else ends.far.next()
        ends.close()


def test_a_frame_that_is_lost_repeated_or_overtaken_is_refused():
    for arrives in ((0, 0), (1,), (0, 2), (1, 0)):
        ends = Ends()
        frames = []
        for number in range(3):
            ends.near.send(b"tell", MARK, {"number": number})
            frames.append(ends.sent())
        for index in arrives:
            ends.feed.sendall(frames[index])
        with pytest.raises(BadFrame, match="seal"):
            for _ in arrives:
                ends.far.receive()
        ends.close()


def test_a_frame_counts_neither_in_another_connection_nor_back_to_its_sender(ends):
    other = Ends()
    ends.near.send(b"tell", MARK)
    frame = ends.sent()
    other.feed.sendall(frame)
    ends.wire.sendall(frame)
    for victim in (other.far, ends.near):
        with pytest.raises(BadFrame, match="seal"):
            victim.receive()
    other.close()


def test_data_of_another_length_is_not_taken(ends):
    ends.feed.sendall(bulk(ends))
    with pytest.raises(BadFrame, match="10240 bytes of data instead of 100"):
        ends.far.take(ends.far.next(), memoryview(bytearray(100)))


def test_a_message_that_is_too_long_is_not_received(ends, monkeypatch):
    monkeypatch.setattr(framed, "MAX_MESSAGE", 1000)
    ends.near.send(b"tell", MARK, {}, bytes(1000))
    ends.feed.sendall(ends.sent())
    with pytest.raises(BadFrame, match="at most 1000"):
        ends.far.receive()


def test_silence_a_closed_connection_and_a_shutdown_end_a_call(ends):
    ends.far.be_patient(0.05)
    with pytest.raises(TimeoutError):
        ends.far.next()
    ends.near.be_patient(0.05)
    with pytest.raises(TimeoutError):
        ends.near.write([bytes(64 << 20)])
    ends.far.be_patient(0)
    threading.Timer(0.05, ends.far.shutdown).start()
    with pytest.raises(ConnectionError):
        ends.far.next()
    ends.wire.close()
    with pytest.raises(ConnectionError):
        ends.near.next()
