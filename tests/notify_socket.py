"""systemd's notification socket for daemons with `Type=notify`."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType


class NotifySocket:
    """
    Receives notifications, as a context manager.

    :param timeout: seconds to wait for a notification.
    :ivar address: value of NOTIFY_SOCKET.
    :ivar statuses: values of `STATUS=` received so far.
    """

    def __init__(self, directory: Path, timeout: float) -> None:
        self.address = str(directory / "notify")
        self.statuses: list[str] = []
        self._timeout = timeout
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> NotifySocket:
        self._socket.bind(self.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def next_state(self) -> str:
        """
        The next notification other than a status.

        :raise TimeoutError: none arrived.
        """
        while (status := self._receive()).startswith("STATUS="):
            self.statuses.append(status.removeprefix("STATUS="))
        return status

    def next_status(self) -> str:
        """
        The next notification, which must be a status.

        :raise TimeoutError: none arrived.
        """
        self.statuses.append(self._receive().removeprefix("STATUS="))
        return self.statuses[-1]

    def is_empty(self) -> bool:
        """Whether all notifications sent so far were read."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(200)
        except BlockingIOError:
            return True
        return False

    def _receive(self) -> str:
        self._socket.settimeout(self._timeout)
        return self._socket.recv(200).decode()
