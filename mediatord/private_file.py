"""
Credentials that systemd hands to a service (systemd.exec(5), "Credentials"), named as `credential:NAME`.

Files with secrets: made whole or not at all, readable by their owner only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CREDENTIAL_PREFIX = "credential:"
_CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"


def get_credentials_directory() -> Path | None:
    """Where those of this process are; None if it has none."""
    value = os.environ.get(_CREDENTIALS_VARIABLE)
    return Path(value) if value else None


def resolve_secret_path(base: Path, path: Path) -> Path:
    """
    Where a file with a secret is, as the configuration names it: a path relative to `base`, or a credential. One that
    this process was not given stays as it is written.
    """
    if not str(path).startswith(CREDENTIAL_PREFIX):
        return base / path
    given = get_credentials_directory()
    return path if given is None else given / Path(str(path).removeprefix(CREDENTIAL_PREFIX)).name


def is_missing_credential(path: Path) -> bool:
    """Whether it is a credential that this process was not given."""
    return str(path).startswith(CREDENTIAL_PREFIX)


def is_credential(path: Path) -> bool:
    """Whether it is one that this process was given: root's, and by a list of access for the service alone."""
    given = get_credentials_directory()
    return given is not None and path.parent == given


class PrivateFileError(Exception):
    """A file with secrets cannot be made or used; the text is one line for the operator."""


def create_private_file(path: Path, content: bytes, owner: tuple[int, int] | None = None) -> None:
    """
    Write a new file of mode 0600: after a crash it is there whole or not at all.

    :param owner: numbers of the user and the group that it is given to; None for those of this process.
    :raise PrivateFileError: something is there already, or the directory cannot be written to.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if owner is not None:
                    # By its descriptor: whoever may write to the directory could put a link in the place of the name.
                    os.fchown(descriptor, *owner)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Unlike a rename, a link fails where something stands already.
            os.link(draft, path)
        finally:
            os.unlink(draft)
    except FileExistsError:
        raise PrivateFileError(f"{path} is there already and is not overwritten") from None
    except OSError as error:
        raise PrivateFileError(f"{path} cannot be written: {error.strerror}") from None


def replace_private_file(path: Path, content: bytes) -> None:
    """
    Write a file of mode 0600 in place of one that is there, of the same owner; after a crash it is either of them.

    :raise PrivateFileError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        before = path.stat()
        create_private_file(draft, content, (before.st_uid, before.st_gid))
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PrivateFileError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def lock_private_file(path: Path) -> Iterator[None]:
    """
    Keep other processes that do the same from changing a file meanwhile.

    :raise PrivateFileError: its directory cannot be opened or locked.
    """
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PrivateFileError(f"{path.parent} cannot be opened: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise PrivateFileError(f"{path.parent} cannot be locked: {error.strerror}") from None
        yield
    finally:
        os.close(descriptor)


def read_private_file(path: Path) -> bytes:
    """
    The content of a file that only its owner may read or write, or that systemd has handed to this process.

    :raise PrivateFileError: it is missing, unreadable, or open to others.
    """
    if is_missing_credential(path):
        raise PrivateFileError(f"{path} is not there: this process was given no such credential by systemd")
    # A list of access shows in the mode as the group's.
    others = 0o037 if is_credential(path) else 0o077
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & others:
                raise PrivateFileError(f"{path} is open to others (mode {mode:04o}); type: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise PrivateFileError(f"{path} cannot be read: {error.strerror}") from None
