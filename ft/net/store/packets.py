"""Packet filter for a listening socket: a classic BPF program in the kernel, which needs no privilege to install.

It protects the port of torch's TCPStore, which has no authentication of its own.
"""

import ctypes
import socket
import struct
from collections.abc import Iterable

from ft.base.errors import UserError

_SO_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_SOURCE_PORT = 0
"""Offset of the source port in the TCP header, which is where the program's packet begins."""
_SOURCE_ADDRESS = (-0x100000 + 12) & 0xFFFFFFFF
"""SKF_NET_OFF + the source address's offset in the IPv4 header."""
_ALL, _NONE = 0xFFFFFFFF, 0

Caller = tuple[str, int]


def admit(listener: socket.socket, callers: Iterable[Caller]) -> None:
    """Let ``listener`` accept packets from these (IPv4 address, port) pairs only. Port 0: all ports of the address.

    An accepted connection keeps the filter that was installed when it was accepted, which admits its own peer.

    Raises:
        UserError: the kernel does not accept such a program.
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
