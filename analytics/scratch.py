"""Directories for temporary files, which end with the process that made them, or else with the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "mediatord-analytics-"
_LOCK = "lock"


@contextmanager
def scratch(parent: str | None) -> Iterator[str]:
    """
    A new directory. Those that killed processes left beside it are deleted: a few of them would fill a disk.

    :param parent: where it is made; None: where the system has such.
    :raise OSError: it cannot be made.
    """
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    # The lock ends with this process, however that ends. It has its name only once it is held.
    with (made / "new").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, made / _LOCK)
            _sweep(made)
            yield str(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _sweep(mine: Path) -> None:
    """Delete those of this user that nobody holds."""
    for folder in mine.parent.glob(f"{PREFIX}*"):
        # Somebody holds it, or it was deleted meanwhile.
        with suppress(OSError):
            if folder != mine and folder.lstat().st_uid == os.getuid():
                with (folder / _LOCK).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
