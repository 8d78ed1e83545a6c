"""
Archives of store records: writing, verification and import.

An archive is a gzip file of JSON lines, each with its `kind`. The first line is the header: `format`, `version`,
time, program and backend. The records follow. The last line is the trailer: count and SHA-256 of the lines of each
kind, and the SHA-256 of the header. An archive without a trailer, or that differs from it, is refused as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

from mediatord import __version__
from mediatord.backup.records import (
    RECORD_KINDS,
    BackupError,
    InvalidArchiveError,
    MessageRecord,
    RecipientRecord,
    RecordCounts,
    RecordTarget,
    StoreRecord,
    batch_by_size,
    decode_record,
    encode_record,
    shorten_value,
)

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def create_file_atomically(path: Path) -> Iterator[BinaryIO]:
    """
    A new file, of mode 0600, which gets its name when it is complete and on disk. The draft of an earlier run that
    was killed is overwritten.

    :raise BackupError: the file exists, or another process is writing it.
    """
    _require_absent(path)
    draft = path.with_name(f".{path.name}.draft")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with report_full_disk(path), os.fdopen(descriptor, "r+b") as file:  # closing it writes once more
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(f"{path} is being written by another process") from None
        _require_absent(path)  # another process may have finished it just before the lock
        _require_own_file(draft, os.fstat(descriptor))
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


@contextmanager
def report_full_disk(path: Path) -> Iterator[None]:
    """:raise BackupError: the disk is full; the system's error does not name the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL_ERRORS or error.filename is not None:
            raise
        raise BackupError(f"{path} cannot be written: {error.strerror}") from None


def sync_directory(path: Path) -> None:
    """Flush renames in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chown_to_directory_owner(directory: Path, *paths: Path) -> None:
    """Give files that root has made to the owner of their directory, as the daemon may run as that user."""
    if os.geteuid() == 0:
        folder = directory.stat()
        for path in paths:
            os.chown(path, folder.st_uid, folder.st_gid, follow_symlinks=False)


def _require_own_file(draft: Path, found: os.stat_result) -> None:
    """Refuse a draft that another user has created or linked."""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        raise BackupError(f"{draft} was created by another user: remove it first")


def _require_absent(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise BackupError(f"{path} exists and is not overwritten")


ARCHIVE_FORMAT, ARCHIVE_VERSION = "mediatord-store", 1
# Envelopes are encrypted: higher levels gain little.
_COMPRESSION_LEVEL = 3
# Longer than the longest record of any store.
_MAX_LINE_BYTES = 1 << 28
_HEADER_DIGEST_KEY = "header_sha256"

ProgressCallback = Callable[[int], None]


def ignore_progress(_: int) -> None:
    """A progress callback that does nothing."""


@dataclass(eq=False, slots=True)
class _RecordDigests:
    """Count and digest of the lines of each kind."""

    counts: RecordCounts = field(default_factory=lambda: dict.fromkeys(RECORD_KINDS, 0))
    digests: dict[str, Any] = field(default_factory=lambda: {kind: sha256() for kind in RECORD_KINDS})

    def add(self, kind: str, line: bytes) -> None:
        self.counts[kind] += 1
        self.digests[kind].update(line)

    def trailer(self, header: bytes) -> dict[str, Any]:
        records = {
            kind: {"count": self.counts[kind], "sha256": self.digests[kind].hexdigest()} for kind in RECORD_KINDS
        }
        return {"kind": "trailer", "records": records, _HEADER_DIGEST_KEY: sha256(header).hexdigest()}


def write_archive(
    path: Path, backend: str, records: Iterable[StoreRecord], progress: ProgressCallback = ignore_progress
) -> RecordCounts:
    """
    Write records to a new archive; returns the number of each kind.

    :param backend: of the store that they come from.
    :param progress: called after each record with the number written.
    :raise BackupError: the file exists.
    """
    with create_file_atomically(path) as file:
        return write_records(file, backend, records, progress)


def write_records(
    file: BinaryIO, backend: str, records: Iterable[StoreRecord], progress: ProgressCallback = ignore_progress
) -> RecordCounts:
    """As :func:`write_archive`, to an open file."""
    digests = _RecordDigests()
    # Without file name and time.
    with gzip.GzipFile("", "wb", compresslevel=_COMPRESSION_LEVEL, fileobj=file, mtime=0) as packed:
        header = _encode_line(
            {
                "kind": "header",
                "format": ARCHIVE_FORMAT,
                "version": ARCHIVE_VERSION,
                "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "made_by": f"mediatord {__version__}",
                "backend": backend,
            }
        )
        packed.write(header)
        for number, record in enumerate(records, 1):
            line = encode_record(record)
            packed.write(line)
            digests.add(record.kind, line)
            progress(number)
        packed.write(_encode_line(digests.trailer(header)))
    return digests.counts


@dataclass(frozen=True, slots=True)
class RecordArchive:
    """
    A verified archive.

    :param id: digest of its content.
    :param counts: number of records by kind.
    """

    path: Path
    id: str
    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def records(self, after: int = 0) -> Iterator[tuple[StoreRecord, int]]:
        """
        The records after the first `after`, each with the size of its line.

        :raise InvalidArchiveError: it has changed since; raised at the end at the latest.
        """
        with _open_lines(self.path) as lines:
            digests, header = _RecordDigests(), next(lines, b"")
            for place, line in enumerate(lines, 1):
                if place > self.total:
                    if sha256(line).hexdigest() != self.id or _parse_line(line) != digests.trailer(header):
                        break
                    return
                record = decode_record(line)
                digests.add(record.kind, line)
                if place > after:
                    yield record, len(line)
        raise InvalidArchiveError(f"{self.path} has changed while it was read")


def verify_archive(
    path: Path,
    progress: ProgressCallback = ignore_progress,
    accept: Callable[[StoreRecord], None] = lambda record: None,
) -> RecordArchive:
    """
    Read an archive from end to end.

    :param progress: called with the number of records read.
    :param accept: raises an error for records that the target cannot hold.
    :raise InvalidArchiveError: it is truncated, altered, of another version or no archive.
    """
    try:
        with _open_lines(path) as lines:
            return _verify_lines(path, lines, progress, accept)
    except InvalidArchiveError as error:
        reason = str(error)
        raise InvalidArchiveError(reason if str(path) in reason else f"{path} cannot be used: {reason}") from None


def _verify_lines(
    path: Path, lines: Iterator[bytes], progress: ProgressCallback, accept: Callable[[StoreRecord], None]
) -> RecordArchive:
    header = next(lines, b"")
    _verify_header(_parse_line(header))
    digests, order, number = _RecordDigests(), list(RECORD_KINDS), 0
    for line in lines:
        if line.startswith(b'{"kind":"trailer"'):
            if _parse_line(line) != digests.trailer(header) or next(lines, None) is not None:
                raise InvalidArchiveError("its content differs from its last line")
            return RecordArchive(path, sha256(line).hexdigest(), dict(digests.counts))
        record = decode_record(line)
        if record.kind not in order:
            raise InvalidArchiveError("its records are not in order")
        del order[: order.index(record.kind)]
        digests.add(record.kind, line)
        _verify_numbers(record, digests.counts)
        accept(record)
        number += 1
        progress(number)
    raise InvalidArchiveError("its end is missing")


def _verify_header(header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != ARCHIVE_FORMAT:
        raise InvalidArchiveError("it is not an archive of mediatord")
    if header.get("version") != ARCHIVE_VERSION:
        raise InvalidArchiveError(
            f"it is of version {shorten_value(header.get('version'))}, this mediatord knows {ARCHIVE_VERSION}"
        )


def _verify_numbers(record: StoreRecord, counts: Mapping[str, int]) -> None:
    """Check that a record refers to records before it."""
    right = True
    if record.kind in ("account", "recipient"):
        right = record.number == counts[record.kind]
    if isinstance(record, RecipientRecord | MessageRecord):
        right = right and record.account <= counts["account"]
    if isinstance(record, MessageRecord):
        right = right and record.recipient <= counts["recipient"]
    if not right:
        raise InvalidArchiveError(f"record {counts[record.kind]} of kind {record.kind} has a wrong number")


@contextmanager
def _open_lines(path: Path) -> Iterator[Iterator[bytes]]:
    """
    The lines of an archive.

    :raise InvalidArchiveError: while they are read: it is truncated.
    """
    with path.open("rb") as file, gzip.GzipFile(fileobj=file, mode="rb") as packed:
        try:
            yield _read_lines(cast(BinaryIO, packed))
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise InvalidArchiveError(
                f"{path} cannot be used: it is truncated or altered, or not an archive of mediatord"
            ) from None


def _read_lines(packed: BinaryIO) -> Iterator[bytes]:
    while line := packed.readline(_MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            raise InvalidArchiveError("a line is truncated")
        yield line


def _encode_line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# Of one transaction of an import.
_BATCH_RECORDS, _BATCH_BYTES = 500, 4_194_304


@dataclass(frozen=True, slots=True)
class ImportComparison:
    """
    :param archive: number of records by kind in the archive.
    :param store: the same in the store.
    """

    archive: RecordCounts
    store: RecordCounts

    @property
    def is_equal(self) -> bool:
        return self.archive == self.store


class CountMismatchError(BackupError):
    """The counts of the store differ from those of the archive."""

    def __init__(self, comparison: ImportComparison) -> None:
        wrong = [
            f"{number} {RECORD_KINDS[kind]} instead of {comparison.archive[kind]}"
            for kind, number in comparison.store.items()
            if number != comparison.archive[kind]
        ]
        super().__init__(f"the store has {', '.join(wrong)}; the import is not finished, and no daemon will use it")
        self.comparison = comparison


def import_archive(
    archive: RecordArchive,
    target: RecordTarget,
    progress: ProgressCallback = ignore_progress,
    prepared: Callable[[], None] = lambda: None,
) -> ImportComparison:
    """
    Import an archive, or the rest of it after an interrupted import, and compare the counts.

    :param progress: called with the number of its records in the store.
    :param prepared: called when all are, before daemons may use the store.
    :raise CountMismatchError: the counts differ.
    :raise BackupError: it cannot be imported; raised before anything is written, unless the archive contradicts
        itself or the store fails.
    """
    done = target.begin(archive.id)
    if done > archive.total:
        raise BackupError(f"{done} records of {archive.total} were imported: it is not the same archive")
    progress(done)
    for batch in batch_by_size(archive.records(done), _BATCH_RECORDS, _BATCH_BYTES):
        target.write(done + 1, batch)
        done += len(batch)
        progress(done)
    comparison = ImportComparison(dict(archive.counts), target.counts())
    if not comparison.is_equal:
        raise CountMismatchError(comparison)
    prepared()
    target.finish()
    return comparison
