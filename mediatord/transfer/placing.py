"""Files that take their places together, or none of them."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mediatord.transfer.bundle import CONFIG, Member
from mediatord.transfer.draft import sync_directory
from mediatord.transfer.errors import TransferError

T = TypeVar("T")

_SUFFIX = ".restore"


def draft_beside(path: Path) -> Path:
    """Where a file is before it has its place."""
    return path.with_name(f".{path.name}{_SUFFIX}")


@dataclass(eq=False, slots=True)
class Placing:
    """
    Drafts beside the places that they are to take.

    :ivar drafts: by place, in the order in which they take them.
    """

    drafts: dict[Path, Path] = field(default_factory=dict)

    def stage(self, path: Path, content: bytes, member: Member) -> None:
        """
        Write a draft, durably, unless the very same is there already.

        :raise TransferError: something else is there.
        """
        if path.exists() or path.is_symlink():
            if not path.is_file() or path.read_bytes() != content:
                raise TransferError(f"{path} is there already and differs from the backup's: move it away first")
            return
        draft = draft_beside(path)
        draft.unlink(missing_ok=True)
        self.drafts[path] = draft
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(content)
            if member.name == CONFIG:  # all others have secrets
                os.fchmod(file.fileno(), member.mode & 0o644 | 0o600)
            give(file.fileno(), path, member)
            file.flush()
            os.fsync(file.fileno())

    def let_be_last(self, path: Path) -> None:
        """Where this one is, everything is."""
        if path in self.drafts:
            self.drafts[path] = self.drafts.pop(path)

    def place(self) -> None:
        """Let all drafts take their places, which are free; those that have, leave again if one cannot."""
        placed: list[Path] = []
        try:
            for path, draft in self.drafts.items():
                os.link(draft, path)  # unlike a rename, it fails where something stands by now
                placed.append(path)
        except OSError:
            for path in placed:
                path.unlink()
            raise
        for folder in {path.parent for path in placed}:
            sync_directory(folder)

    def clean(self) -> None:
        """Remove the drafts, which are not needed any more."""
        for draft in self.drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()


def give(file: int | Path, path: Path, member: Member) -> None:
    """
    What root restores belongs to the users of the same names as before, or to the owner of its directory.

    :param file: what is to be given.
    :param path: what it will be called.
    """
    if os.geteuid() != 0:
        return
    folder = path.parent.stat()
    user = _number(lambda: pwd.getpwnam(member.user).pw_uid, folder.st_uid)
    group = _number(lambda: grp.getgrnam(member.group).gr_gid, folder.st_gid)
    os.chown(file, user, group)


def _number(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except KeyError:
        return otherwise
