"""
Files that hold secrets: mode 0600, created atomically; and systemd credentials, written as `credential:NAME`
(systemd.exec(5), "Credentials").
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mediatord.errors import OperatorError

CREDENTIAL_PREFIX = "credential:"
_CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"


def get_credentials_directory() -> Path | None:
    """Directory of this process's credentials; None if systemd passed none."""
    value = os.environ.get(_CREDENTIALS_VARIABLE)
    return Path(value) if value else None


def resolve_secret_path(base: Path, path: Path) -> Path:
    """
    Resolve the path of a secret in the configuration: relative to `base`, or a credential.

    A credential that was not passed to this process is returned as written.
    """
    if not str(path).startswith(CREDENTIAL_PREFIX):
        return base / path
    given = get_credentials_directory()
    return path if given is None else given / Path(str(path).removeprefix(CREDENTIAL_PREFIX)).name


def is_missing_credential(path: Path) -> bool:
    """Whether a path names a credential that was not passed to this process."""
    return str(path).startswith(CREDENTIAL_PREFIX)


class SecretFileError(OperatorError):
    """A secret file cannot be created or used."""


def create_secret_file(path: Path, content: bytes, owner: tuple[int, int] | None = None) -> None:
    """
    Create a file of mode 0600 atomically; after a crash it is complete or absent.

    :param owner: user and group id of the file; None for those of the process.
    :raise SecretFileError: the path exists, or the directory is not writable.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if owner is not None:
                    # By descriptor: somebody with write access to the directory could replace the name by a link.
                    os.fchown(descriptor, *owner)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Unlike rename(2), link(2) fails if the target exists.
            os.link(draft, path)
        finally:
            os.unlink(draft)
    except FileExistsError:
        raise SecretFileError(f"{path} already exists and will not be overwritten") from None
    except OSError as error:
        raise SecretFileError(f"cannot write {path}: {error.strerror}") from None


def replace_secret_file(path: Path, content: bytes) -> None:
    """
    Replace a file atomically by one of mode 0600 and the same owner.

    :raise SecretFileError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        before = path.stat()
        create_secret_file(draft, content, (before.st_uid, before.st_gid))
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise SecretFileError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def lock_secret_file(path: Path) -> Iterator[None]:
    """
    Hold an exclusive lock against other processes that modify the file.

    :raise SecretFileError: its directory cannot be opened or locked.
    """
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SecretFileError(f"cannot open {path.parent}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise SecretFileError(f"cannot lock {path.parent}: {error.strerror}") from None
        yield
    finally:
        os.close(descriptor)


def read_secret_file(path: Path) -> bytes:
    """
    Read a file that only its owner can access, or a systemd credential.

    :raise SecretFileError: it is missing, unreadable, or accessible to others.
    """
    if is_missing_credential(path):
        name = str(path).removeprefix(CREDENTIAL_PREFIX)
        raise SecretFileError(
            f"{path}: systemd passed no such credential; add LoadCredential={name}:PATH to the unit"
        )
    # A credential belongs to root; an ACL grants the service access, which appears in the mode as group permissions.
    others = 0o037 if path.parent == get_credentials_directory() else 0o077
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & others:
                raise SecretFileError(f"{path} is accessible to other users (mode {mode:04o}); run: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise SecretFileError(f"cannot read {path}: {error.strerror}") from None
