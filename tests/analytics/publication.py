"""Published and staged files, moves that replace, remove and add some, and what is published after them."""

from __future__ import annotations

from typing import Any

from analytics.files import FileSystem
from analytics.writing.runs import DirectoryMove

OLD = {
    "tables/t/dt=1/a": b"old",
    "tables/t/dt=1/b": b"old too",
    "tables/t/dt=2/a": b"old",
    "report/2/index.html": b"old",
}
STAGED = {
    "_staging/run/t/dt=1/c": b"new",
    "_staging/run/t/dt=3/a": b"new",
    "_staging/run/t/dt=3/b": b"new too",
    "_staging/run/report/2/index.html": b"new",
    "_staging/run/report/2/csv/t.csv": b"new",
}
MOVES = (
    DirectoryMove("tables/t/dt=1", "_staging/run/t/dt=1", 1),
    DirectoryMove("tables/t/dt=2"),
    DirectoryMove("tables/t/dt=3", "_staging/run/t/dt=3", 2),
    DirectoryMove("report/2", "_staging/run/report/2", 2),
)
MANIFEST = b"{}"
NEW = {
    "tables/t/dt=1/c": b"new",
    "tables/t/dt=3/a": b"new",
    "tables/t/dt=3/b": b"new too",
    "report/2/index.html": b"new",
    "report/2/csv/t.csv": b"new",
    "runs/run.json": MANIFEST,
}


class KilledProcess(BaseException):
    """The process is killed here."""


class KilledFileSystem:
    """Kills the process before its n-th change of a file."""

    def __init__(self, files: FileSystem, changes_left: int) -> None:
        self._files = files
        self.changes_left = changes_left

    def __getattr__(self, name: str) -> Any:
        if name in {"write", "move", "delete", "make_directories"}:
            self.changes_left -= 1
            if self.changes_left < 0:
                raise KilledProcess
        return getattr(self._files, name)
