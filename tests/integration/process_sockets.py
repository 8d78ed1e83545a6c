"""Inspects sockets of other processes through /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438
_LISTENING = "0A"


def _tcp_sockets() -> list[tuple[int, int, str, str]]:
    """Local port, remote port, state and inode of each IPv4 socket of this host."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    return [(int(row[1].split(":")[1], 16), int(row[2].split(":")[1], 16), row[3], row[9]) for row in rows]


def _descriptors(pid: int) -> dict[str, int]:
    """File descriptors of a process, by their targets."""
    descriptors = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            descriptors[os.readlink(link)] = int(link.name)
    return descriptors


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    descriptors = _descriptors(pid)
    return {
        port for port, _, state, inode in _tcp_sockets() if state == _LISTENING and f"socket:[{inode}]" in descriptors
    }


def find_owner(client: int, server: int, pids: set[int]) -> int:
    """The process that has the server's end of a connection."""
    # Linux may list a socket twice while others come and go.
    (inode,) = {inode for local, remote, _, inode in _tcp_sockets() if (local, remote) == (server, client)}
    (owner,) = [pid for pid in pids if f"socket:[{inode}]" in _descriptors(pid)]
    return owner


@contextlib.contextmanager
def duplicate_listening_socket(pid: int, ports: set[int]) -> Iterator[socket.socket]:
    """A duplicate of the socket on which another process listens at this port."""
    (port,) = ports
    (inode,) = {inode for local, _, state, inode in _tcp_sockets() if (local, state) == (port, _LISTENING)}
    process = os.pidfd_open(pid)
    try:
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(
            _PIDFD_GETFD, process, _descriptors(pid)[f"socket:[{inode}]"], 0
        )
    finally:
        os.close(process)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=descriptor) as listener:
        yield listener
