"""Keeping a database to one daemon: a second one would take the first one's sessions for those of a crashed one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class InUse(ValueError):
    """Another process has it; the text is for the operator."""


class SoleUse:
    """
    A lock on a file beside the database, which the system lets go of when this process ends, however it does.

    The file stays: whoever deleted it could delete one that somebody has locked meanwhile. What is in it says that
    there was a database, see :mod:`mediatord.store.database_check`.

    :param path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """
        Lock it.

        :raise InUse: another process has.
        :raise ValueError: the file cannot be made; the text is for the operator.
        """
        descriptor = None
        try:
            descriptor = _opened(self._path.resolve())
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise InUse(f"cannot use the database {self._path}: another daemon does") from None
            raise ValueError(f"cannot use the database {self._path}: {error.strerror}") from None
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _opened(database: Path) -> int:
    path = database.with_name(f"{database.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    if os.geteuid() == 0:
        # The next daemon may be started by the user that this one is about to become.
        folder = os.stat(path.parent)
        os.fchown(descriptor, folder.st_uid, folder.st_gid)
    return descriptor
