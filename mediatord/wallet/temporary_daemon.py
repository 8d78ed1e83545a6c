"""Temporary daemons: child processes with a temporary directory, on a free port of the loopback interface."""

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
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from mediatord.runtime.secret_files import create_secret_file

_START_SECONDS = 120.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.01

# Below the ephemeral ports of Linux.
_FIRST_PORT, _PORTS_END = 10_000, 32_768
_BLOCK_PORTS = 64

_VAPID_KEY_FILE = "vapid.pem"
_WEB_PUSH_SETTINGS = {
    "MEDIATORD_PUSH__WEB_PUSH__KEY_FILE": _VAPID_KEY_FILE,
    "MEDIATORD_PUSH__WEB_PUSH__CONTACT": "mailto:admin@localhost",
    "MEDIATORD_PUSH__DECENTRL": "true",
    "MEDIATORD_PUSH__QUIET_AFTER_POLL": "0",
    "MEDIATORD_PUSH__MIN_INTERVAL": "100ms",
    "MEDIATORD_OUTBOUND__ALLOW_PRIVATE": '["127.0.0.0/8"]',
}


class DaemonStartError(Exception):
    """The daemon did not start; the text is the last line of its output."""


class TemporaryDaemon:
    """
    A daemon in a temporary directory; see :func:`run_temporary_daemon`.

    :param directory: of its configuration, keys, database and logs.
    :ivar pid: of its first process, the parent of its workers.
    """

    pid: int

    def __init__(self, url: str, directory: Path, environment: Mapping[str, str]) -> None:
        self.url = url
        self.directory = directory
        self._environment = environment
        self._output = directory / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def initialize(self) -> None:
        """
        Create configuration and keys.

        :raise DaemonStartError: it failed.
        """
        process = self._spawn("mediatord", "init", "--dir", str(self.directory), "--public-url", self.url)
        try:
            status = process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            stop_process(process)
            status = -1
        if status != 0:
            raise self._start_error()

    def start(self, *program: str) -> float:
        """
        Start, and wait until it is healthy; returns the seconds that it took.

        :param program: module and arguments that replace `mediatord`.
        :raise DaemonStartError: it did not start.
        """
        start = perf_counter()
        arguments = *(program or ("mediatord",)), "run", "--config", str(self.directory / "mediator.yaml")
        process = self._process = self._spawn(*arguments)
        self.pid = process.pid
        while not is_healthy(self.url):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
            if process.poll() is not None or perf_counter() - start > _START_SECONDS:
                raise self._start_error()
        return perf_counter() - start

    def stop(self) -> None:
        """Terminate it and wait for its end."""
        if self._process is not None:
            stop_process(self._process)

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self._output, "ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment,
            )

    def _start_error(self) -> DaemonStartError:
        lines = self._output.read_text(encoding="utf-8", errors="replace").split("\n")
        return DaemonStartError(next((line.strip() for line in reversed(lines) if line.strip()), "no output"))


@contextmanager
def run_temporary_daemon(
    settings: Mapping[str, str] | None = None, *, beside: TemporaryDaemon | None = None, web_push: bool = False
) -> Iterator[TemporaryDaemon]:
    """
    Run a daemon within a `with` statement, and remove its files afterwards.

    :param settings: environment variables (`MEDIATORD_...`) that override the defaults.
    :param beside: a node of the same cluster, whose keys and public URL this one has.
    :param web_push: whether wallets of both protocols are woken, at once, by push services on loopback.
    :raise DaemonStartError: it did not start.
    """
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    # Settings of the calling shell do not apply.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATORD_")}
    environment = {
        **inherited,
        **(settings or {}),
        **(_WEB_PUSH_SETTINGS if web_push else {}),
        **({} if beside is None else {"MEDIATORD_IDENTITY__KEYS": str(beside.directory / "keys.jwks")}),
        "MEDIATORD_PUBLIC_URL": url if beside is None else beside.url,
        "MEDIATORD_LISTEN": json.dumps([f"tcp:{port}:interface=127.0.0.1"]),
    }
    with tempfile.TemporaryDirectory(prefix="mediatord-", ignore_cleanup_errors=True) as directory:
        daemon = TemporaryDaemon(url, Path(directory), environment)
        daemon.initialize()
        if web_push:
            create_secret_file(daemon.directory / _VAPID_KEY_FILE, make_vapid_key())
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()


def is_healthy(url: str) -> bool:
    """Whether the daemon at this URL is healthy."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=2) as response:  # nosec B310 # an http(s) URL
            return response.status == 200 and b'"ok"' in response.read(1000)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def make_vapid_key() -> bytes:
    """A new private key for Web Push, as a PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def stop_process(process: subprocess.Popen[Any]) -> None:
    """Terminate a child process if it still runs; kill it after 15 s."""
    process.terminate()
    try:
        process.communicate(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def find_free_port() -> int:
    """
    A free TCP port of the loopback interface.

    It is not an ephemeral port, which a connection could take before the daemon does, and is not returned again, in
    this or another process, while this process lives.

    :raise DaemonStartError: there is none.
    """
    with _port_lock:
        for port in _ports:
            if _is_free(port):
                return port
    raise DaemonStartError("no port is free")


def _iterate_reserved_ports() -> Iterator[int]:
    """Ports by blocks; a process reserves a block by binding its first port, which is not returned."""
    firsts = list(range(_FIRST_PORT, _PORTS_END - _BLOCK_PORTS, _BLOCK_PORTS))
    random.Random().shuffle(firsts)  # nosec B311 # no secret
    for first in firsts:
        reservation = socket.socket()
        try:
            reservation.bind(("127.0.0.1", first))
        except OSError:
            reservation.close()
            continue
        _reservation_sockets.append(reservation)
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
