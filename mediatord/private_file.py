"""Files with secrets: made whole or not at all, readable by their owner only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


class PrivateFileError(Exception):
    """A file with secrets cannot be made or used; the text is one line for the operator."""


def create_private(path: Path, content: bytes) -> None:
    """
    Write a new file of mode 0600: after a crash it is there whole or not at all.

    :raise PrivateFileError: something is there already, or the directory cannot be written to.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
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


def read_private(path: Path) -> bytes:
    """
    The content of a file that only its owner may read or write.

    :raise PrivateFileError: it is missing, unreadable, or open to others.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise PrivateFileError(f"{path} is open to others (mode {mode:04o}); type: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise PrivateFileError(f"{path} cannot be read: {error.strerror}") from None
