"""
What an operator removes, in the event log: the books have to balance, so what cannot be logged is not removed.

The daemon's own file is not touched. The lines are those of a short process with a name of its own, `NODE-operator`,
in a segment that is written before anything is removed, in a directory that nobody reads, and moved beside the closed
ones once it is known what was still there. A process that is killed between leaves that directory; the next removal
enters what of its plan was done, and looks what is gone of the few that were being removed then.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from prometheus_client import CollectorRegistry
from twisted.internet.task import Clock

from mediatord import __version__
from mediatord.cli.queues.course import Course, carried_out
from mediatord.cli.queues.values import Entry, Waiting
from mediatord.config import Config
from mediatord.eventlog.logs import EventFile, Origin, SegmentLimits
from mediatord.eventlog.seal import seal
from mediatord.eventlog.segments import RetentionLimits
from mediatord.message_journal import MessageJournal
from mediatord.metrics import Metrics
from mediatord.service import StartupError
from mediatord.tag_keys import read_tag_keys
from mediatord.tags import Tags
from mediatord.wiring.base import log_key

_SUFFIX = "-operator"
_LONGEST_NAME = 63
_DRAFT = ".purge-"
_PLAN, _COURSE = "plan.jsonl", "course.jsonl"
_UNLOGGABLE = "the event log cannot be written, so nothing is removed"
_UNLOGGED = "{number} were removed, which the event log is yet to say, at the next queue purge: {reason}"
# One segment, and nobody else's are to be deleted for it.
_WHOLE = SegmentLimits(size=1 << 62, retention=RetentionLimits(bytes=1 << 62, unread_bytes=1 << 62))


class Books:
    """
    The event log of this configuration, for removals.

    :raise PrivateFileError: the keys of its pseudonyms cannot be read.
    :raise StartupError: no daemon has written there.
    """

    def __init__(self, config: Config) -> None:
        self._directory = config.log.directory
        self._level = config.log.level
        self._node = config.node_name[: _LONGEST_NAME - len(_SUFFIX)].rstrip("-._") + _SUFFIX
        self._tags = Tags(config.log.dids, read_tag_keys(log_key(config))[-1])
        if not self._directory.is_dir():
            raise StartupError(f"{self._directory} is not there: what is removed could not be logged")

    def remove(self, waiting: Waiting, entries: Sequence[Entry]) -> list[Entry]:
        """
        Remove these, and say so; those that were still there.

        :raise StartupError: the log cannot be written, and nothing was removed; or the store cannot be used.
        """
        self.settle(waiting)
        if not entries:
            return []
        draft = self._directory / f"{_DRAFT}{secrets.token_hex(6)}"
        course = Course(draft / _COURSE)
        plan, segment = self._plan(draft, entries)
        with plan:
            try:
                waiting.remove(entries, course)
            except BaseException:
                # What was being done just now may be done, though nobody said so. Else the next removal finds it.
                with suppress(StartupError, OSError):
                    self._close(draft, [*course.removed, *waiting.missing(course.doubtful)])
                raise
            removed = course.removed
            try:
                self._close(draft, removed, segment if len(removed) == len(entries) else None)
            except OSError as error:
                raise StartupError(_UNLOGGED.format(number=len(removed), reason=_reason(error))) from None
        return removed

    def settle(self, waiting: Waiting) -> int:
        """Enter what a removal that was killed has left; how many messages and events that is."""
        entered = 0
        for draft in sorted(self._directory.glob(f"{_DRAFT}*")):
            entered += self._settle(waiting, draft)
        return entered

    def _settle(self, waiting: Waiting, draft: Path) -> int:
        names = (draft / _PLAN, draft / f"{_PLAN}.draft")
        name = next((one for one in names if one.exists()), names[0])
        # One that is locked is being carried out, and one that goes while it is looked at has been.
        with suppress(FileNotFoundError, BlockingIOError), name.open("rb") as plan:
            fcntl.flock(plan, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.stat()
            # What had no whole plan removed nothing; what had its lines moved has told everything.
            begun = name == names[0] and not any(self._directory.glob(f"events-*-{_boot_of(draft)}-*"))
            gone = carried_out(draft / _COURSE, _read(plan), waiting.missing) if begun else []
            self._close(draft, gone)
            return len(gone)
        return 0

    def _plan(self, draft: Path, entries: Sequence[Entry]) -> tuple[IO[str], Path]:
        """
        Have it written what is to be removed: as a plan, which is locked while it is open, and as a segment.

        :raise StartupError: that is not possible.
        """
        name = draft / f"{_PLAN}.draft"
        try:
            draft.mkdir(mode=0o700)
            plan = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"{_UNLOGGABLE}: {_reason(error)}") from None
        try:
            fcntl.flock(plan, fcntl.LOCK_EX)
            name.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries), "utf-8")
            os.fsync(plan)
            segment = self._write(draft / "planned", _boot_of(draft), entries)
            # From now on it may be that something of it has been removed.
            name.rename(draft / _PLAN)
            _sync(draft)
        except OSError as error:
            os.close(plan)
            shutil.rmtree(draft, ignore_errors=True)
            raise StartupError(f"{_UNLOGGABLE}: {_reason(error)}") from None
        return os.fdopen(plan), segment

    def _close(self, draft: Path, removed: Sequence[Entry], segment: Path | None = None) -> None:
        """
        Put the lines of what was removed beside those of the daemon.

        :param segment: which has them already.
        """
        if removed:
            segment = segment or self._write(draft / f"done-{secrets.token_hex(2)}", _boot_of(draft), removed)
            segment.rename(self._directory / segment.name)
            _sync(self._directory)
        shutil.rmtree(draft)

    def _write(self, directory: Path, boot: str, entries: Sequence[Entry]) -> Path:
        """
        A segment with these, on disk.

        :raise OSError: it is not.
        """
        clock = Clock()
        clock.advance(datetime.now(UTC).timestamp())
        metrics = Metrics(CollectorRegistry(), version=__version__)
        origin = Origin(self._node, __version__, self._tags.epoch, boot)
        events = EventFile(directory, clock, origin, limits=_WHOLE, level=self._level)
        events.told = metrics
        journal = MessageJournal(clock, events, metrics, self._tags)
        events.startService()
        events.emit("proc.start", version=__version__, reason="purge")
        for entry in entries:
            journal.purged(entry.removed(), entry.half)
        events.emit("proc.stop", version=__version__, reason="purge")
        events.stopService()
        if events.dropped:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        (segment,) = directory.glob("events-*.jsonl")
        self._give(segment)
        seal(segment, compress=False)
        return segment

    def _give(self, path: Path) -> None:
        """To whom the daemon's own files belong."""
        if os.geteuid() == 0:
            folder = self._directory.stat()
            os.chown(path, folder.st_uid, folder.st_gid)


def _read(plan: IO[bytes]) -> list[Entry]:
    return [Entry(**json.loads(line)) for line in plan]


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def _boot_of(draft: Path) -> str:
    return draft.name.removeprefix(_DRAFT)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
