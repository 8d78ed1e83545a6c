"""Blocking client of the control socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mediatord.errors import StartupError

# Seconds for which an answer is waited for.
_TIMEOUT = 60.0
# Bytes of a path that fit in an address.
_MAX_PATH_BYTES = 107


class NoDaemon(Exception):
    """No daemon listens on the control socket."""


@contextmanager
def make_socket_address(path: Path) -> Iterator[str]:
    """The address of a UNIX socket; a path that is too long for one is shortened through its open directory."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


class _UNIXConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with make_socket_address(self._path) as address:
            self.sock.connect(address)


class ControlClient:
    """
    One connection to a daemon.

    :raise NoDaemon: no daemon listens there.
    :raise StartupError: the socket cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = _UNIXConnection(path)
        try:
            self._connection.connect()
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            self._connection.close()
            raise NoDaemon from None
        except OSError as error:
            self._connection.close()
            raise StartupError(f"cannot connect to the daemon at {path}: {error.strerror or error}") from None

    def call(self, operation: str, **arguments: Any) -> Any:
        """
        Run an operation of :class:`~mediatord.control.queue_and_account_operations.ControlOperations` in the daemon.

        :raise StartupError: the daemon refuses it or does not answer.
        """
        try:
            self._connection.request(
                "POST", f"/v1/{operation}", json.dumps(arguments), {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            answer = json.loads(response.read())
            if response.status != http.client.OK:
                refusal = str(answer["error"])
            else:
                return answer["result"]
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise StartupError(f"the daemon at {self._path} does not respond: {reason}") from None
        raise StartupError(refusal)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
