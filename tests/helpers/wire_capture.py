"""Recording of all packets between processes of this machine, and a search for secrets in them.

Packets are read from the loopback interface with a raw socket, which needs root. Traffic through Unix sockets stays on
its node and is not recorded.
"""

import base64
import contextlib
import ctypes
import socket
import struct
import threading
from collections import defaultdict
from pathlib import Path

import pytest

_ALL_PROTOCOLS, _OUTGOING = 0x0003, 4
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
_SOL_PACKET, _STATISTICS = 263, 6
_BUFFER = 512 << 20
_LENGTH = struct.Struct("<I")
_TCP = 6

Flow = tuple[bytes, bytes]
"""Sender and receiver: the address and port of each."""


class Recording:
    """All packets on the loopback interface from now until ``end``, stored in ``file``.

    Attributes:
        lost: number of packets that arrived faster than they could be recorded.
    """

    def __init__(self, file: Path):
        self.file, self.lost = file, 0
        self._over = threading.Event()
        self._socket = _listening()
        self._thread = threading.Thread(target=self._record, name="wire-capture", daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        statistics = self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 8)
        self.lost = struct.unpack("II", statistics)[1]
        self._socket.close()

    def _record(self) -> None:
        self._socket.settimeout(0.2)
        room = memoryview(bytearray(1 << 17))
        with open(self.file, "wb", buffering=1 << 20) as file:
            while True:
                try:
                    length = self._socket.recv_into(room)
                except TimeoutError:
                    if self._over.is_set():
                        return
                    continue
                file.write(_LENGTH.pack(length))
                file.write(room[:length])

    def streams(self) -> dict[Flow, bytes]:
        """Return what each sender has sent to each receiver, in order, without headers and retransmissions."""
        pieces: dict[Flow, list[bytes]] = defaultdict(list)
        expected: dict[Flow, int] = {}
        for packet in self._packets():
            protocol, addresses, rest = _payload_of_ip(packet)
            flow = (addresses[0] + rest[:2], addresses[1] + rest[2:4])
            if protocol != _TCP:
                pieces[flow].append(rest)
                continue
            (sequence,) = struct.unpack_from("!I", rest, 4)
            data = rest[(rest[12] >> 4) * 4 :]
            if rest[13] & 2:  # SYN: a new connection, perhaps with the same ports
                expected[flow] = (sequence + 1) % (1 << 32)
                continue
            known = (expected.get(flow, sequence) - sequence) % (1 << 32)
            if known >= 1 << 31:  # there is a gap before this packet
                known = 0
            if data[known:]:
                pieces[flow].append(data[known:])
                expected[flow] = (sequence + len(data)) % (1 << 32)
        return {flow: b"".join(each) for flow, each in pieces.items()}

    def _packets(self):
        with open(self.file, "rb") as file:
            while head := file.read(_LENGTH.size):
                yield file.read(_LENGTH.unpack(head)[0])


def need_root() -> None:
    """Skip the test if packets cannot be recorded."""
    if not hasattr(socket, "AF_PACKET"):
        pytest.skip("no AF_PACKET: packets are recorded on Linux only")
    try:
        _listening().close()
    except OSError as error:
        pytest.skip(f"packets on the loopback interface cannot be recorded here (as root they can): {error}")


def forms(token: str) -> dict[str, bytes]:
    """Return the encodings of the token that could appear in traffic, by name of the encoding."""
    found = {}
    secrets = {"text": token.encode()}
    with contextlib.suppress(ValueError):
        secrets["bytes"] = bytes.fromhex(token)
    for name, secret in secrets.items():
        found[name] = secret
        found[f"hex of {name}"], found[f"HEX of {name}"] = secret.hex().encode(), secret.hex().upper().encode()
        for alphabet in (base64.b64encode, base64.urlsafe_b64encode):
            for shift in range(3):  # its offset in a group of three bytes that are encoded together
                text = alphabet(bytes(shift) + secret).rstrip(b"=")
                found[f"{alphabet.__name__} of {name}, from {shift}"] = text[-(-8 * shift // 6) : -1]
    return found


def found_in(streams: dict[Flow, bytes], wanted: dict[str, bytes]) -> dict[str, list[str]]:
    """Return which of the ``wanted`` byte strings occur in the streams, each with its surroundings."""
    found = defaultdict(list)
    for name, secret in wanted.items():
        for data in streams.values():
            at = data.find(secret)
            if at >= 0:
                found[name].append(repr(data[max(0, at - 60) : at + len(secret) + 20]))
    return dict(found)


def _listening() -> socket.socket:
    own = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    try:
        own.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        # The loopback interface delivers every packet twice, outgoing and incoming; only the incoming one is recorded.
        program = [(0x30, 0, 0, 0xFFFFF000 + 4), (0x15, 0, 1, _OUTGOING), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
        own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
        own.bind(("lo", _ALL_PROTOCOLS))
    except BaseException:
        own.close()
        raise
    return own


def _payload_of_ip(packet: bytes) -> tuple[int, tuple[bytes, bytes], bytes]:
    """Return (protocol, (sender, receiver), payload) of an IP packet."""
    if packet[0] >> 4 == 6:
        return packet[6], (packet[8:24], packet[24:40]), packet[40:]
    head = (packet[0] & 15) * 4
    return packet[9], (packet[12:16], packet[16:20]), packet[head : int.from_bytes(packet[2:4]) or None]
