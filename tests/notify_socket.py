"""What systemd is to a daemon with `Type=notify`: a socket that the daemon tells how it is."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType


class NotifySocket:
    """
    Listens as long as it is a context.

    :param patience: seconds that the daemon may say nothing.
    :ivar address: for NOTIFY_SOCKET.
    :ivar statuses: what followed `STATUS=`, as far as it was heard.
    """

    def __init__(self, directory: Path, patience: float) -> None:
        self.address = str(directory / "notify")
        self.statuses: list[str] = []
        self._patience = patience
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> NotifySocket:
        self._socket.bind(self.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def next(self) -> str:
        """
        What it says next, unless that is its status.

        :raise TimeoutError: nothing.
        """
        while (status := self._next()).startswith("STATUS="):
            self.statuses.append(status.removeprefix("STATUS="))
        return status

    def next_status(self) -> str:
        """
        The next status, which is what is to be said next.

        :raise TimeoutError: nothing is.
        """
        self.statuses.append(self._next().removeprefix("STATUS="))
        return self.statuses[-1]

    def silent(self) -> bool:
        """Whether all that was said until now was heard."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(200)
        except BlockingIOError:
            return True
        return False

    def _next(self) -> str:
        self._socket.settimeout(self._patience)
        return self._socket.recv(200).decode()
