"""Writing to a connection without an iteration of the reactor."""

from __future__ import annotations

from typing import Any

from twisted.internet.tcp import Connection


def write_immediately(transport: Any, data: bytes) -> None:
    """
    Write to the socket at once if the transport's buffer is empty.

    Twisted buffers what is written until its next iteration and then asks the kernel for readiness: three system
    calls for a few bytes. What the kernel does not take, and everything on other transports such as TLS, is written
    as usual. The reactor detects broken connections.
    """
    if (
        isinstance(transport, Connection)
        and transport.connected
        and not (transport.dataBuffer or transport._tempDataBuffer or transport.disconnecting or transport.TLS)
        and not (transport._aborting or transport._writeDisconnecting)
    ):
        try:
            sent = transport.socket.send(data)
        except OSError:
            sent = 0
        if sent == len(data):
            return
        data = data[sent:]
    transport.write(data)
