"""The sockets of other processes, by what Linux says of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438
_LISTENING = "0A"


def _tcp() -> list[tuple[int, int, str, str]]:
    """Local port, remote port, state and inode of each IPv4 socket of this host."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    return [(int(row[1].split(":")[1], 16), int(row[2].split(":")[1], 16), row[3], row[9]) for row in rows]


def _descriptors(pid: int) -> dict[str, int]:
    """The descriptors of a process by what they stand for."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(link)] = int(link.name)
    return found


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    mine = _descriptors(pid)
    return {port for port, _, state, inode in _tcp() if state == _LISTENING and f"socket:[{inode}]" in mine}


def find_owner(client: int, server: int, pids: set[int]) -> int:
    """Which of these processes has the server's end of a connection."""
    # Linux may list one twice while others come and go.
    (inode,) = {inode for local, remote, _, inode in _tcp() if (local, remote) == (server, client)}
    (owner,) = [pid for pid in pids if f"socket:[{inode}]" in _descriptors(pid)]
    return owner


@contextlib.contextmanager
def duplicate_listening_socket(pid: int, ports: set[int]) -> Iterator[socket.socket]:
    """The very socket that another process listens on at this port, as if it was ours."""
    (port,) = ports
    (inode,) = {inode for local, _, state, inode in _tcp() if (local, state) == (port, _LISTENING)}
    process = os.pidfd_open(pid)
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(
            _PIDFD_GETFD, process, _descriptors(pid)[f"socket:[{inode}]"], 0
        )
    finally:
        os.close(process)
    assert taken >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=taken) as listener:
        yield listener
