"""
Writing to a socket at once.

Twisted keeps what is written until the reactor's next turn, asks the kernel whether there is room for it, writes it,
and takes the question back: three system calls and a turn for a few bytes that there is always room for.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.tcp import Connection


def send(transport: Any, data: bytes) -> None:
    """
    Write, right away where nothing waits to be written before it.

    What the kernel does not take, and everything on a transport that is more than a socket, such as one with TLS, is
    written as usual. A connection that turns out to be broken is left to be found so by the reactor.
    """
    if isinstance(transport, Connection) and _is_free(transport):
        try:
            sent = transport.socket.send(data)
        except OSError:
            sent = 0
        if sent == len(data):
            return
        data = data[sent:]
    transport.write(data)


def _is_free(transport: Connection) -> bool:
    """Whether it is open and stays so, speaks no TLS and holds nothing back."""
    return bool(
        transport.connected
        and not (transport.dataBuffer or transport._tempDataBuffer)
        and not (transport.disconnecting or transport._aborting or transport._writeDisconnecting or transport.TLS)
    )
