"""Ports of temporary daemons."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from mediatord.wallet import temporary_daemon
from mediatord.wallet.temporary_daemon import find_free_port

ASK = (
    "from mediatord.wallet.temporary_daemon import find_free_port; "
    "print(*(find_free_port() for _ in range(200)), flush=True); input()"
)


@pytest.mark.system
def test_processes_get_different_ports() -> None:
    """A port is assigned once, even if nothing listens on it yet."""
    command = [sys.executable, "-c", ASK]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    answers = [child.stdout.readline().split() for child in children]
    given = [int(port) for answer in answers for port in answer] + [find_free_port() for _ in range(200)]
    for child in children:
        child.communicate("\n")
    assert len(given) == len(set(given)) == 800
    assert [child.returncode for child in children] == [0, 0, 0]


def test_skips_ports_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another daemon may listen on any of them."""
    free = find_free_port()
    with socket.socket() as accepted:
        accepted.bind(("127.0.0.1", 0))
        monkeypatch.setattr(temporary_daemon, "_ports", iter([accepted.getsockname()[1], free]))
        assert find_free_port() == free


def test_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line, like others at the start of a daemon."""
    monkeypatch.setattr(temporary_daemon, "_ports", iter([]))
    with pytest.raises(temporary_daemon.DaemonStartError, match="no port is free"):
        find_free_port()
