"""Files that are there whole or not at all, and readable by their owner only."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mediatord.transfer.errors import TransferError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """
    A file to write to, of mode 0600, which gets its name when all is on disk; what an earlier run that was killed has
    left is written over.

    :raise TransferError: something is there already, or another process is writing it.
    """
    _refuse_existing(path)
    draft = path.with_name(f".{path.name}.draft")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with naming(path), os.fdopen(descriptor, "r+b") as file:  # closing it writes once more
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransferError(f"{path} is being written by another process") from None
        _refuse_existing(path)  # another one that has just finished: what was opened is its file
        _refuse_foreign(draft, os.fstat(descriptor))
        try:
            os.fchmod(descriptor, 0o600)
            file.truncate()
            yield file
            file.flush()
            os.fsync(descriptor)
            _refuse_existing(path)
            draft.rename(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """:raise TransferError: there is no room for a file that is being written; the system does not say for which."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        raise TransferError(f"{path} cannot be written: {error.strerror}") from None


def sync_directory(path: Path) -> None:
    """What was renamed in it stays so."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_to_owner_of(directory: Path, *paths: Path) -> None:
    """What root has made in a directory belongs to whom that belongs to, as the daemon may run as that user."""
    if os.geteuid() == 0:
        folder = directory.stat()
        for path in paths:
            os.chown(path, folder.st_uid, folder.st_gid, follow_symlinks=False)


def _refuse_foreign(draft: Path, found: os.stat_result) -> None:
    """Whoever has made it could read what is written to it, or have meant another file of ours."""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        raise TransferError(f"{draft} was made by somebody else: remove it first")


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise TransferError(f"{path} is there already and is not overwritten")
