"""
Files that are there whole or not at all, and readable by their owner only.

Archives of records: gzip, in it lines of JSON, each with its `kind`.

The first line is the header: `format`, `version`, when and by what it was made and from which backend. Then come the
records. The last line is the trailer: of each kind how many there are and the SHA-256 of their lines, and the SHA-256
of the header. An archive without its trailer, or that is not what its trailer says, is refused as a whole.

Bringing an archive into a store.
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
from typing import Any, BinaryIO, TypeVar, cast

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
    decode_record,
    encode_record,
    shorten_value,
)

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def create_file_atomically(path: Path) -> Iterator[BinaryIO]:
    """
    A file to write to, of mode 0600, which gets its name when all is on disk; what an earlier run that was killed has
    left is written over.

    :raise TransferError: something is there already, or another process is writing it.
    """
    _require_absent(path)
    draft = path.with_name(f".{path.name}.draft")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with report_full_disk(path), os.fdopen(descriptor, "r+b") as file:  # closing it writes once more
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(f"{path} is being written by another process") from None
        _require_absent(path)  # another one that has just finished: what was opened is its file
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
    """:raise TransferError: there is no room for a file that is being written; the system does not say for which."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL_ERRORS or error.filename is not None:
            raise
        raise BackupError(f"{path} cannot be written: {error.strerror}") from None


def sync_directory(path: Path) -> None:
    """What was renamed in it stays so."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chown_to_directory_owner(directory: Path, *paths: Path) -> None:
    """What root has made in a directory belongs to whom that belongs to, as the daemon may run as that user."""
    if os.geteuid() == 0:
        folder = directory.stat()
        for path in paths:
            os.chown(path, folder.st_uid, folder.st_gid, follow_symlinks=False)


def _require_own_file(draft: Path, found: os.stat_result) -> None:
    """Whoever has made it could read what is written to it, or have meant another file of ours."""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        raise BackupError(f"{draft} was made by somebody else: remove it first")


def _require_absent(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise BackupError(f"{path} is there already and is not overwritten")


ARCHIVE_FORMAT, ARCHIVE_VERSION = "mediatord-store", 1
# Envelopes do not get much smaller by more.
_COMPRESSION_LEVEL = 3
# More than the longest record that any store takes.
_MAX_LINE_BYTES = 1 << 28
_HEADER_DIGEST_KEY = "header_sha256"

ProgressCallback = Callable[[int], None]


def ignore_progress(_: int) -> None:
    """Tells nobody how far something is."""


@dataclass(eq=False, slots=True)
class _RecordDigests:
    """How many lines of each kind there were, and what they were."""

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
    Make an archive of records, in their order; how many of each kind those were.

    :param backend: where they come from.
    :param tell: told after each record how many there are.
    :raise TransferError: there is a file of that name already.
    """
    with create_file_atomically(path) as file:
        return write_records(file, backend, records, progress)


def write_records(
    file: BinaryIO, backend: str, records: Iterable[StoreRecord], progress: ProgressCallback = ignore_progress
) -> RecordCounts:
    """As :func:`write_archive`, to a file that is open."""
    tally = _RecordDigests()
    # Without name and time, which are nobody's business.
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
            tally.add(record.kind, line)
            progress(number)
        packed.write(_encode_line(tally.trailer(header)))
    return tally.counts


@dataclass(frozen=True, slots=True)
class RecordArchive:
    """
    One that was read from end to end and is what it says.

    :param id: stands for all that is in it.
    :param counts: records by kind.
    """

    path: Path
    id: str
    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def records(self, after: int = 0) -> Iterator[tuple[StoreRecord, int]]:
        """
        The records behind the first `after`, each with the bytes of its line.

        :raise ArchiveRefused: it has changed since; said at the end, if not before.
        """
        with _open_lines(self.path) as lines:
            tally, header = _RecordDigests(), next(lines, b"")
            for place, line in enumerate(lines, 1):
                if place > self.total:
                    if sha256(line).hexdigest() != self.id or _parse_line(line) != tally.trailer(header):
                        break
                    return
                record = decode_record(line)
                tally.add(record.kind, line)
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

    :param tell: told how many of its records were read.
    :param accept: refuses records that cannot be used.
    :raise ArchiveRefused: it is torn, altered, of a newer version or something else.
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
    tally, order, number = _RecordDigests(), list(RECORD_KINDS), 0
    for line in lines:
        if line.startswith(b'{"kind":"trailer"'):
            if _parse_line(line) != tally.trailer(header) or next(lines, None) is not None:
                raise InvalidArchiveError("it is not what its last line says")
            return RecordArchive(path, sha256(line).hexdigest(), dict(tally.counts))
        record = decode_record(line)
        if record.kind not in order:
            raise InvalidArchiveError("its records are not in order")
        del order[: order.index(record.kind)]
        tally.add(record.kind, line)
        _verify_numbers(record, tally.counts)
        accept(record)
        number += 1
        progress(number)
    raise InvalidArchiveError("its end is missing")


def _verify_header(header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != ARCHIVE_FORMAT:
        raise InvalidArchiveError("it is no archive of mediatord")
    if header.get("version") != ARCHIVE_VERSION:
        raise InvalidArchiveError(
            f"it is of version {shorten_value(header.get('version'))}, this mediatord knows {ARCHIVE_VERSION}"
        )


def _verify_numbers(record: StoreRecord, counts: Mapping[str, int]) -> None:
    """What a record refers to has come before it."""
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

    :raise ArchiveRefused: while they are read: it is torn.
    """
    with path.open("rb") as file, gzip.GzipFile(fileobj=file, mode="rb") as packed:
        try:
            yield _read_lines(cast(BinaryIO, packed))
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise InvalidArchiveError(
                f"{path} cannot be used: it is torn or altered, or no archive of mediatord"
            ) from None


def _read_lines(packed: BinaryIO) -> Iterator[bytes]:
    while line := packed.readline(_MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            raise InvalidArchiveError("a line has no end")
        yield line


def _encode_line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


ItemT = TypeVar("ItemT")

# What is written at a time.
_BATCH_RECORDS, _BATCH_BYTES = 500, 4_194_304


@dataclass(frozen=True, slots=True)
class ImportComparison:
    """
    :param archive: records by kind.
    :param store: the same, counted in the store.
    """

    archive: RecordCounts
    store: RecordCounts

    @property
    def is_equal(self) -> bool:
        return self.archive == self.store


class CountMismatchError(BackupError):
    """A store does not have what was in the archive."""

    def __init__(self, comparison: ImportComparison) -> None:
        wrong = [
            f"{number} {RECORD_KINDS[kind]} instead of {comparison.archive[kind]}"
            for kind, number in comparison.store.items()
            if number != comparison.archive[kind]
        ]
        super().__init__(f"the store has {', '.join(wrong)}; it was left unfinished, and no daemon will use it")
        self.comparison = comparison


def import_archive(
    archive: RecordArchive,
    target: RecordTarget,
    progress: ProgressCallback = ignore_progress,
    prepared: Callable[[], None] = lambda: None,
) -> ImportComparison:
    """
    Write all records of an archive, or those that an interrupted import of it has not written, and count.

    :param tell: told how many of its records are there.
    :param prepared: called when all are, before daemons may use the store.
    :raise CountsDiffer: what is there then is not what was in the archive.
    :raise TransferError: it cannot be imported; said before anything is written, unless the archive contradicts
        itself or the store fails.
    """
    done = target.begin(archive.id)
    if done > archive.total:
        raise BackupError(f"{done} records of {archive.total} were imported: it is not the same archive")
    progress(done)
    for some in _batch_records(archive.records(done)):
        target.write(done + 1, some)
        done += len(some)
        progress(done)
    comparison = ImportComparison(dict(archive.counts), target.counts())
    if not comparison.is_equal:
        raise CountMismatchError(comparison)
    prepared()
    target.finish()
    return comparison


def _batch_records(items: Iterable[tuple[ItemT, int]]) -> Iterator[list[ItemT]]:
    """Items with their bytes: not too many at a time, nor too large unless it is a single one."""
    batch: list[ItemT] = []
    size = 0
    for item, more in items:
        if batch and (len(batch) == _BATCH_RECORDS or size + more > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch
