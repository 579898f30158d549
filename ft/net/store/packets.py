"""Which packets the kernel lets in to a listening socket: a classic BPF program on it, which needs no privilege."""

import ctypes
import socket
import struct
from collections.abc import Iterable

from ft.base.errors import UserError

_SO_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_SOURCE_PORT = 0
"""Offset in the TCP header, at which the program's packet begins."""
_SOURCE_ADDRESS = (-0x100000 + 12) & 0xFFFFFFFF
"""SKF_NET_OFF + the source address's offset in the IPv4 header."""
_ALL, _NONE = 0xFFFFFFFF, 0

Caller = tuple[str, int]


def admit(listener: socket.socket, callers: Iterable[Caller]) -> None:
    """Has ``listener`` take packets from these (IPv4 address, port) alone; port 0: from any port of that address.

    A connection that is accepted keeps the program of that moment, which lets its own peer through.

    Raises:
        UserError: the kernel takes no such program.
    """
    program = []
    for address, port in callers:
        (number,) = struct.unpack("!I", socket.inet_aton(address))
        if port:
            program += [(_LOAD_HALF, 0, 0, _SOURCE_PORT), (_JUMP_EQUAL, 0, 3, port)]
        program += [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS), (_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALL)]
    program.append((_RETURN, 0, 0, _NONE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code))
        )
    except OSError as error:
        raise UserError(
            f"the kernel does not let a socket be guarded (SO_ATTACH_FILTER: {error.strerror})",
            "run outside this sandbox",
        ) from error
