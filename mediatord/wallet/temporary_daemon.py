"""A daemon of one's own for a while: a child process in a temporary directory, on a free port of the loopback."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

_START_SECONDS = 30.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.05

# Below those that Linux gives to connections.
_FIRST_PORT, _PORTS_END = 10_000, 32_768
_BLOCK_PORTS = 64


class DaemonStartError(Exception):
    """The daemon did not start, or ended by itself; the text is the last line that it wrote."""


@dataclass(frozen=True, slots=True)
class TemporaryDaemon:
    """
    A running daemon.

    :param url: where it listens.
    :param directory: where its configuration, keys, database and logs are.
    :param pid: of its first process; its workers are children of it.
    """

    url: str
    directory: Path
    pid: int


@contextmanager
def run_temporary_daemon(
    settings: Mapping[str, str] | None = None, *, beside: TemporaryDaemon | None = None
) -> Iterator[TemporaryDaemon]:
    """
    A daemon that answers inside the `with`, and of which nothing is left afterwards.

    :param settings: environment names and values on top of the defaults (`MEDIATORD_...`).
    :param beside: another node of the same cluster, whose keys and public URL this one shall have.
    :raise DaemonFailed: it did not start.
    """
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    # Without the settings of a daemon that somebody may be running from this shell.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATORD_")}
    environment = {
        **inherited,
        **(settings or {}),
        **({} if beside is None else {"MEDIATORD_IDENTITY__KEYS": str(beside.directory / "keys.jwks")}),
        "MEDIATORD_PUBLIC_URL": url if beside is None else beside.url,
        "MEDIATORD_LISTEN": json.dumps([f"tcp:{port}:interface=127.0.0.1"]),
    }
    with tempfile.TemporaryDirectory(prefix="mediatord-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        output = directory / "output.txt"
        _run_to_end(output, environment, "init", "--dir", str(directory), "--public-url", url)
        process = _spawn(output, environment, "run", "--config", str(directory / "mediator.yaml"))
        try:
            _wait_until_healthy(process, url, output)
            yield TemporaryDaemon(url, directory, process.pid)
        finally:
            _stop(process)


def is_healthy(url: str) -> bool:
    """Whether a daemon at this URL says that it is well."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=2) as response:  # nosec B310 # an http(s) URL
            return response.status == 200 and b'"ok"' in response.read(1000)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _spawn(output: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    with open(output, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "mediatord", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
        )


def _run_to_end(output: Path, environment: Mapping[str, str], *arguments: str) -> None:
    process = _spawn(output, environment, *arguments)
    try:
        status = process.wait(_START_SECONDS)
    except subprocess.TimeoutExpired:
        _stop(process)
        status = -1
    if status != 0:
        raise DaemonStartError(_last_output_line(output))


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    for _ in range(int(_START_SECONDS / _POLL_SECONDS)):
        if is_healthy(url):
            return
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        break
    raise DaemonStartError(_last_output_line(output))


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_output_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def find_free_port() -> int:
    """
    A TCP port of the loopback interface that nobody listens on at the moment.

    None of those that the system gives to connections, one of which could have it before the daemon does, and none
    that this function gives again, here or in another process, while this one lives.

    :raise DaemonFailed: no such port was found.
    """
    with _port_lock:
        for port in _ports:
            if _is_free(port):
                return port
    raise DaemonStartError("no port is free")


def _iterate_reserved_ports() -> Iterator[int]:
    """Ports by blocks. Whoever has the first of a block bound, which nobody is given, has the others as well."""
    firsts = list(range(_FIRST_PORT, _PORTS_END - _BLOCK_PORTS, _BLOCK_PORTS))
    random.Random().shuffle(firsts)  # nosec B311 # no secret
    for first in firsts:
        mark = socket.socket()
        try:
            mark.bind(("127.0.0.1", first))
        except OSError:
            mark.close()
            continue
        _reservation_sockets.append(mark)
        yield from range(first + 1, first + _BLOCK_PORTS)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_port_lock = Lock()
_reservation_sockets: list[socket.socket] = []
_ports = _iterate_reserved_ports()
