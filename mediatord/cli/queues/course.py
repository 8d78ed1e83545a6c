"""How far a removal is, in a file beside its plan: after a kill, only what was being done then is looked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mediatord.cli.queues.values import Entry
from mediatord.service import StartupError

_NEXT, _REMOVED = "next", "removed"
_Key = tuple[str, str]


class Course:
    """
    :param path: of the file.
    :ivar removed: what is gone for certain.
    :ivar doubtful: what is being removed just now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.removed: list[Entry] = []
        self.doubtful: Sequence[Entry] = ()

    def begin(self, entries: Sequence[Entry]) -> None:
        """These are next. :raise StartupError: that cannot be written, so they are to stay."""
        self._add(_NEXT, entries)
        self.doubtful = entries

    def end(self, removed: Sequence[Entry]) -> None:
        """Of those, these were still there, and have been removed. :raise StartupError: that cannot be written."""
        self.removed += removed
        self.doubtful = ()
        self._add(_REMOVED, removed)

    def _add(self, what: str, entries: Sequence[Entry]) -> None:
        line = json.dumps([what, [_key(one) for one in entries]]) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            raise StartupError(f"the event log cannot be written, so no more is removed: {error.strerror}") from None


def carried_out(
    path: Path, plan: Sequence[Entry], missing: Callable[[Sequence[Entry]], Sequence[Entry]]
) -> list[Entry]:
    """
    What was removed of a plan.

    :param path: of the file; there is none if nothing was begun.
    :param missing: asked what is not there any more of what was being removed when the process was killed.
    """
    removed: set[_Key] = set()
    doubtful: set[_Key] = set()
    for what, keys in _lines(path):
        if what == _NEXT:
            doubtful = keys
        else:
            removed |= keys
            doubtful = set()
    gone = missing([one for one in plan if _key(one) in doubtful]) if doubtful else []
    return [*(one for one in plan if _key(one) in removed), *gone]


def _lines(path: Path) -> list[tuple[str, set[_Key]]]:
    """But for a last one that is torn: what it was to announce was not done."""
    if not path.exists():
        return []
    whole = path.read_text("utf-8").split("\n")[:-1]
    return [(what, {(half, id_) for half, id_ in keys}) for what, keys in map(json.loads, whole)]


def _key(entry: Entry) -> _Key:
    return entry.half, entry.id
