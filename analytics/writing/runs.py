"""
A run in the results directory: its lock, the atomic publication of what it staged, and its manifest.

Publication writes a journal first; from then on the moves are decided. Each move can be repeated from where it
stopped, so the next run completes a publication that was killed. No step relies on a rename of several files being
atomic, which it is not on an object store. It relies on reads and listings that show every earlier write.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from analytics.errors import AnalyticsError
from analytics.files import FileSystem, get_local_path
from analytics.job import Span
from analytics.settings import Settings
from mediatord import __version__
from mediatord.observability.event_schema import SCHEMA_VERSION

LOCK_PREFIX = "_lock-"
# Processes on other hosts cannot be checked. No run takes that long.
ABANDONED_LOCK_AGE = timedelta(hours=24)


@contextmanager
def hold_run_lock(files: FileSystem, out: str, run_id: str) -> Iterator[None]:
    """
    Hold the lock of a results directory.

    Each run writes its own lock file, then looks for others. Two simultaneous runs may both stop, but never both
    continue; the file system needs no exclusive creation.

    :raise AnalyticsError: another run holds the lock, on any host.
    """
    own_name = f"{LOCK_PREFIX}{run_id}.json"
    path = f"{out}/{own_name}"
    files.write(path, json.dumps(_describe_process()).encode())
    try:
        for name in files.list_names(out):
            if name.startswith(LOCK_PREFIX) and name != own_name:
                _remove_abandoned_lock(files, f"{out}/{name}")
        yield
    finally:
        _release_lock(files, path)


def _release_lock(files: FileSystem, path: str) -> None:
    """Delete the lock file, even if Java is gone; then only if it is local."""
    try:
        files.delete(path)
    except Exception:
        local = get_local_path(path)
        if local:
            with suppress(OSError):
                local.unlink()


def _remove_abandoned_lock(files: FileSystem, path: str) -> None:
    """
    Remove the lock of a run that has ended.

    :raise AnalyticsError: the run is active.
    """
    try:
        holder = json.loads(files.read(path))
    except AnalyticsError:
        return  # Released meanwhile.
    if _is_lock_held(holder):
        raise AnalyticsError(
            f"another run holds the lock: process {holder['pid']} on {holder['host']} since {holder['since']};"
            f" if it is no longer running, delete {path}"
        )
    files.delete(path)


def _is_lock_held(holder: dict[str, Any]) -> bool:
    if holder["host"] == socket.gethostname():
        return holder["life"] in {_get_process_identity(holder["pid"])} - {None}
    return datetime.now(UTC) - datetime.fromisoformat(holder["since"]) < ABANDONED_LOCK_AGE


def _describe_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "life": _get_process_identity(os.getpid()),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _get_process_identity(pid: int) -> str | None:
    """
    Identity of a process that differs from earlier processes with the same id, also across reboots; None if it does
    not exist.

    Without /proc it is the process id.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        start_ticks = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[19]
    except OSError:
        return str(pid)
    return f"{boot}/{start_ticks}"


JOURNAL_FILE = "_journal.json"
STAGING_DIRECTORY = "_staging"
# Names the manifest of the publication that is staged, from before its journal is written until after it is deleted.
_PREPARED_FILE = f"{STAGING_DIRECTORY}/_prepared"


@dataclass(frozen=True, slots=True)
class DirectoryMove:
    """
    Replacement of a directory. Paths are relative to the results directory.

    :param target: directory to replace.
    :param staged: its replacement; empty: none.
    :param files: number of files in `staged`.
    """

    target: str
    staged: str = ""
    files: int = 0


def commit_publication(
    files: FileSystem, out: str, moves: Sequence[DirectoryMove], manifest_path: str, manifest: bytes
) -> None:
    """Publish atomically: write the journal, move all directories, write the manifest."""
    content = {
        "moves": [asdict(move) for move in moves],
        "manifest_path": manifest_path,
        "manifest": manifest.decode(),
    }
    files.write(f"{out}/{_PREPARED_FILE}", manifest_path.encode())
    files.sync(out)
    files.write(f"{out}/{JOURNAL_FILE}", json.dumps(content).encode())
    _complete_publication(files, out, content)


def has_journal(files: FileSystem, out: str) -> bool:
    """Whether a decided publication is incomplete."""
    return files.exists(f"{out}/{JOURNAL_FILE}")


def recover_publication(files: FileSystem, out: str) -> bool:
    """
    Complete a decided publication, and delete other staged files. Requires the lock.

    :return: whether there was a journal.
    :raise AnalyticsError: its staged files were deleted; nothing has changed.
    """
    decided = has_journal(files, out)
    if decided:
        content = json.loads(files.read(f"{out}/{JOURNAL_FILE}"))
        _check_still_staged(files, out, content["manifest_path"])
        _complete_publication(files, out, content)
    else:
        files.delete(f"{out}/{STAGING_DIRECTORY}")
    return decided


def _check_still_staged(files: FileSystem, out: str, manifest_path: str) -> None:
    """
    Check that nobody has deleted the staging directory, since files that are not staged count as moved.

    A store may also write the journal of a failed run after that run has given up and cleaned up.
    """
    path = f"{out}/{_PREPARED_FILE}"
    if not files.exists(path) or files.read(path).decode() != manifest_path:
        raise AnalyticsError(
            f"{out}/{JOURNAL_FILE}: the staged files of this publication were deleted; delete this file, too, and"
            f" analyse the days of {manifest_path} again"
        )


def _complete_publication(files: FileSystem, out: str, content: Mapping[str, Any]) -> None:
    for move in content["moves"]:
        _replace_directory(files, out, DirectoryMove(**move))
    files.write(content["manifest_path"], content["manifest"].encode())
    files.sync(out)
    files.delete(f"{out}/{JOURNAL_FILE}")
    files.delete(f"{out}/{STAGING_DIRECTORY}")


def _replace_directory(files: FileSystem, out: str, move: DirectoryMove) -> None:
    target, staged = f"{out}/{move.target}", f"{out}/{move.staged}"
    if not move.staged:
        files.delete(target)
        return
    left = files.list(staged) if files.exists(staged) else []
    if len(left) == move.files:
        files.delete(target)
        files.move(staged, target)
        return
    # An object store moves single files: those that are missing here have arrived.
    for file in left:
        arrived = target + file.path.partition(move.staged)[2]
        files.delete(arrived)
        files.move(file.path, arrived)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """
    What outputs say about their run. Everything else in them depends on the input alone.

    :param version: of mediatord.
    :param span: computed days.
    :param now: when the results were complete, with a time zone.
    :param final_until: last day that late segments can no longer change.
    :param duration_s: seconds since the run began.
    """

    version: str
    span: Span
    now: datetime
    final_until: date
    duration_s: float

    def is_final(self, day: date) -> bool:
        """Whether late segments can no longer change a day."""
        return day <= self.final_until


RUNS_DIRECTORY = "runs"


def make_run_id(now: datetime) -> str:
    """Make an id that sorts by time: `20261121T010000Z-1f2e3d`."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def parse_run_start(run_id: str) -> datetime | None:
    """Start time in the id of a run; None if it is not one."""
    try:
        return datetime.strptime(run_id.split("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class JobResult:
    """:param tables: rows of each table that the job wrote. :param seconds: duration."""

    job: str
    tables: Mapping[str, int]
    seconds: float


@dataclass(slots=True)
class RunManifest:
    """
    Record of a run, filled in as it proceeds.

    :ivar requested_span: requested days.
    :ivar span: computed days, which include the requested ones.
    :ivar inputs: rows of `inputs` for the segments read in this run.
    :ivar kept: batch to the number of its segments whose earlier content was kept.
    :ivar found: count of each kind of :data:`analytics.reading.segments.FILE_FINDINGS`.
    :ivar changes: settings and versions that changed since the run before, as sentences.
    :ivar integrity_errors: signs of incomplete logs or ledgers, as sentences; exit status 4.
    :ivar warnings: for the operator, as sentences.
    :ivar seconds: durations of all steps except the jobs.
    """

    run_id: str
    requested_span: Span
    span: Span
    settings: Settings
    inputs: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    jobs: list[JobResult] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    integrity_errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    code_version: str = __version__
    schema_version: int = SCHEMA_VERSION

    def encode(self, exit_status: int, error: str = "") -> bytes:
        """:param error: why the run failed."""
        content = {
            "run_id": self.run_id,
            "code_version": self.code_version,
            "schema_version": self.schema_version,
            "asked": _format_span(self.requested_span),
            "span": _format_span(self.span),
            "final_through": self.final_through,
            "exit_status": exit_status,
            **({"error": error} if error else {}),
            "broken": self.integrity_errors,
            "warnings": self.warnings,
            "changes": self.changes,
            "settings": self.settings.model_dump(),
            "found": self.found,
            "inputs": self.inputs,
            "kept": self.kept,
            "jobs": [asdict(job) for job in sorted(self.jobs, key=lambda job: job.job)],
            "seconds": self.seconds,
        }
        return json.dumps(content, indent=1, default=str).encode() + b"\n"

    @property
    def final_through(self) -> str:
        """Last day that no later nightly run will compute again."""
        return str(self.requested_span.last - timedelta(self.settings.look_back_days))


def make_manifest_path(out: str, run_id: str) -> str:
    """Path of a manifest."""
    return f"{out}/{RUNS_DIRECTORY}/{run_id}.json"


def load_last_manifest(files: FileSystem, out: str) -> dict[str, Any] | None:
    """Manifest of the latest successful run; None before the first."""
    for name in reversed(list_manifest_names(files, out)):
        content: dict[str, Any] = json.loads(files.read(f"{out}/{RUNS_DIRECTORY}/{name}"))
        if "error" not in content:
            return content
    return None


def list_manifest_names(files: FileSystem, out: str) -> Sequence[str]:
    """Names of all manifests, oldest first."""
    folder = f"{out}/{RUNS_DIRECTORY}"
    return [name for name in files.list_names(folder) if name.endswith(".json")] if files.exists(folder) else []


def describe_changes(before: Mapping[str, Any] | None, settings: Settings) -> list[str]:
    """Describe settings and versions that changed since the run before."""
    if before is None:
        return []
    then = {**before["settings"], "code_version": before["code_version"], "schema_version": before["schema_version"]}
    now = {**settings.model_dump(), "code_version": __version__, "schema_version": SCHEMA_VERSION}
    return [
        f"{name} changed from {then.get(name)} to {now.get(name)}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]


def _format_span(span: Span) -> list[str]:
    return [str(span.first), str(span.last)]
