"""Files that are written beside their place and named when they are complete and on disk, one or several."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from mediatord.backup.records import BackupError
from mediatord.store.sqlite.database_file import sync_directory

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def create_file_atomically(path: Path) -> Iterator[BinaryIO]:
    """
    A new file, of mode 0600, which gets its name when it is complete and on disk. The draft of an earlier run that
    was killed is overwritten.

    :raise BackupError: the file exists, cannot be created, or another process is writing it.
    """
    _require_absent(path)
    draft = path.with_name(f".{path.name}.draft")
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise BackupError(f"cannot write {path}: {path.parent} does not exist") from None
    except PermissionError as error:
        raise BackupError(f"cannot write {path}: {error.strerror}") from None
    with report_full_disk(path), os.fdopen(descriptor, "r+b") as file:  # closing it writes once more
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(f"{path} is being written by another process") from None
        _require_absent(path)  # another process may have finished it just before the lock
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise BackupError(f"{draft} belongs to another user; remove it first")
        try:
            os.fchmod(descriptor, 0o600)
            file.truncate()
            yield file
            file.flush()
            os.fsync(descriptor)
            _require_absent(path)
            draft.rename(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def _require_absent(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise BackupError(f"{path} already exists and will not be overwritten")


@contextmanager
def report_full_disk(path: Path) -> Iterator[None]:
    """:raise BackupError: the disk is full; the system's error does not name the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL_ERRORS or error.filename is not None:
            raise
        raise BackupError(f"cannot write {path}: {error.strerror}") from None


def chown_to_owner(file: int | Path, path: Path, user: str = "", group: str = "") -> None:
    """
    Give a file that root has made to a user and a group, or to those of its directory where there are none so named.

    :param file: descriptor or path of the draft.
    :param path: its final path.
    """
    if os.geteuid() != 0:
        return
    folder = path.parent.stat()
    user_id, group_id = folder.st_uid, folder.st_gid
    with suppress(KeyError):
        user_id = pwd.getpwnam(user).pw_uid
    with suppress(KeyError):
        group_id = grp.getgrnam(group).gr_gid
    os.chown(file, user_id, group_id, follow_symlinks=isinstance(file, int))


def require_directory(path: Path) -> None:
    """:raise BackupError: it does not exist."""
    if not path.is_dir():
        raise BackupError(f"{path} does not exist; create it first")


def create_draft(path: Path) -> tuple[Path, BinaryIO]:
    """Create an empty file beside a path, in place of one of an earlier run that was killed; its path and itself."""
    draft = path.with_name(f".{path.name}.restore")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    return draft, os.fdopen(descriptor, "wb")


class StagedFiles:
    """
    Drafts of files that get their names together; a context manager, which deletes the drafts at its end.

    :ivar drafts: by final path, in the order of naming.
    """

    def __init__(self) -> None:
        self.drafts: dict[Path, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for draft in self.drafts.values():
            with suppress(OSError):
                draft.unlink()

    def stage(self, path: Path, content: bytes, mode: int, user: str, group: str) -> None:
        """
        Write a draft durably, unless a file with the same content exists.

        :raise BackupError: a different file exists.
        """
        if path.exists() or path.is_symlink():
            if not path.is_file() or path.read_bytes() != content:
                raise BackupError(f"{path} exists and differs from the file in the backup; move it away first")
            return
        self.drafts[path], file = create_draft(path)
        with file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            chown_to_owner(file.fileno(), path, user, group)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, last: Path) -> None:
        """Give all drafts their names, or none of them. :param last: exists only if all the others do."""
        placed: list[Path] = []
        try:
            for path in sorted(self.drafts, key=last.__eq__):
                os.link(self.drafts[path], path)  # unlike a rename, it fails if the path exists by now
                placed.append(path)
        except OSError:
            for path in placed:
                path.unlink()
            raise
        for folder in {path.parent for path in placed}:
            sync_directory(folder)


@contextmanager
def create_directory(path: Path, user: str, group: str) -> Iterator[None]:
    """Create a directory that a user can read, unless it exists; remove it if the block fails."""
    if path.is_dir():
        yield
        return
    path.mkdir(mode=0o750, parents=True)
    try:
        chown_to_owner(path, path, user, group)
        yield
    except BaseException:
        with suppress(OSError):
            path.rmdir()
        raise
    sync_directory(path.parent)
