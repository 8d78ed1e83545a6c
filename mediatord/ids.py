"""Ids that mediatord gives out."""

from __future__ import annotations

import os
import uuid

_AT_ONCE = 4_000


def new_message_id(now: float) -> str:
    """
    Id of a stored message: 32 hexadecimal digits, unguessable, in order of time so that indexes grow at their end.

    :param now: seconds since the epoch.
    """
    return f"{int(now * 1000) & 0xFFFF_FFFF_FFFF:012x}{_chance(10).hex()}"


class _Chance:
    """
    Random bytes of the kernel, fetched many at a time: each time it is asked, the interpreter's lock is let go. None
    is given out twice, nor to two processes.
    """

    def __init__(self) -> None:
        self._bytes = b""
        self._used = 0
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self, number: int) -> bytes:
        """So many bytes."""
        start, end = self._used, self._used + number
        if end > len(self._bytes):
            self._bytes, start, end = os.urandom(_AT_ONCE), 0, number
        self._used = end
        return self._bytes[start:end]

    def _forget(self) -> None:
        self._bytes, self._used = b"", 0


_chance = _Chance()


def new_id() -> str:
    """Id of a DIDComm message that we write."""
    return str(uuid.uuid4())
