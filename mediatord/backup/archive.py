"""
Archives of store records: writing, verification and import.

An archive is a gzip file of JSON lines, each with its `kind`. The first line is the header: `format`, `version`,
time, program and backend. The records follow. The last line is the trailer: count and SHA-256 of the lines of each
kind, and the SHA-256 of the header. An archive without a trailer, or that differs from it, is refused as a whole.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from mediatord import __version__
from mediatord.backup.durable_files import create_file_atomically
from mediatord.backup.records import (
    KINDS_BY_VERSION,
    RECORD_KINDS,
    BackupError,
    DeviceRecord,
    InvalidArchiveError,
    MessageRecord,
    RecipientRecord,
    RecordCounts,
    RecordTarget,
    StoreRecord,
    WakeupRecord,
    batch_by_size,
    decode_record,
    encode_record,
    shorten_value,
)

ARCHIVE_FORMAT, ARCHIVE_VERSION = "mediatord-store", max(KINDS_BY_VERSION)
# Envelopes are encrypted: higher levels gain little.
_COMPRESSION_LEVEL = 3
# Longer than the longest record of any store.
_MAX_LINE_BYTES = 1 << 28
# Of one transaction of an import.
_BATCH_RECORDS, _BATCH_BYTES = 500, 4_194_304

ProgressCallback = Callable[[int], None]


def ignore_progress(_: int) -> None:
    """A progress callback that does nothing."""


def describe_format(format: str, version: int) -> dict[str, Any]:
    """Format, version and origin of a file that is written now."""
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": format, "version": version, "made_at": made_at, "made_by": f"mediatord {__version__}"}


def check_format(given: Any, format: str, refusal: str) -> int:
    """
    The format version in a header.

    :raise InvalidArchiveError: it is of another format, which `refusal` says, or of an unknown version.
    """
    if not isinstance(given, dict) or given.get("format") != format:
        raise InvalidArchiveError(refusal)
    version = given.get("version")
    if type(version) is not int or version not in KINDS_BY_VERSION:
        known = f"{min(KINDS_BY_VERSION)} to {max(KINDS_BY_VERSION)}"
        raise InvalidArchiveError(f"its format version is {shorten_value(version)}, expected {known}")
    return version


class _RecordDigests:
    """
    Count and digest of the lines of each kind.

    :param header: the first line.
    :param kinds: those of the version of the archive.
    """

    def __init__(self, header: bytes, kinds: Sequence[str]) -> None:
        self.counts: RecordCounts = dict.fromkeys(RECORD_KINDS, 0)
        self._digests = {kind: sha256() for kind in kinds}
        self._header = header

    def add(self, kind: str, line: bytes) -> None:
        self.counts[kind] += 1
        self._digests[kind].update(line)

    def trailer(self) -> dict[str, Any]:
        records = {
            kind: {"count": self.counts[kind], "sha256": digest.hexdigest()} for kind, digest in self._digests.items()
        }
        return {"kind": "trailer", "records": records, "header_sha256": sha256(self._header).hexdigest()}


def write_archive(
    path: Path, backend: str, records: Iterable[StoreRecord], progress: ProgressCallback = ignore_progress
) -> RecordCounts:
    """
    Write records to a new archive; returns the number of each kind.

    :param backend: of the store that they come from.
    :param progress: called after each record with the number written.
    :raise BackupError: the file exists.
    """
    header = _encode_line(
        {
            "kind": "header",
            **describe_format(ARCHIVE_FORMAT, ARCHIVE_VERSION),
            "backend": backend,
        }
    )
    digests = _RecordDigests(header, KINDS_BY_VERSION[ARCHIVE_VERSION])
    with (
        create_file_atomically(path) as file,
        # Without file name and time.
        gzip.GzipFile("", "wb", compresslevel=_COMPRESSION_LEVEL, fileobj=file, mtime=0) as packed,
    ):
        packed.write(header)
        for number, record in enumerate(records, 1):
            line = encode_record(record)
            packed.write(line)
            digests.add(record.kind, line)
            progress(number)
        packed.write(_encode_line(digests.trailer()))
    return digests.counts


class RecordArchive:
    """
    A verified archive.

    :ivar id: digest of its content.
    :ivar counts: number of records by kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = ""
        self.counts: RecordCounts = {}

    @property
    def total(self) -> int:
        """Number of records."""
        return sum(self.counts.values())

    def records(self, after: int = 0) -> Iterator[tuple[StoreRecord, int]]:
        """
        The records after the first `after`, each with the size of its line.

        :raise InvalidArchiveError: it has changed since; raised at the end at the latest.
        """
        again = RecordArchive(self.path)
        with suppress(InvalidArchiveError):
            for number, found in enumerate(again.read(), 1):
                if number > after:
                    yield found
        if again.id != self.id:
            raise InvalidArchiveError(f"{self.path} changed while it was read; run the command again")

    def read(self) -> Iterator[tuple[StoreRecord, int]]:
        """
        All records, each with the size of its line; :attr:`id` and :attr:`counts` are set at the end.

        :raise InvalidArchiveError: as :func:`verify_archive`.
        """
        with self.path.open("rb") as file, gzip.GzipFile(fileobj=file, mode="rb") as packed:
            try:
                yield from self._parse(iter(lambda: packed.readline(_MAX_LINE_BYTES), b""))
            except (EOFError, gzip.BadGzipFile, zlib.error):
                raise InvalidArchiveError("truncated, modified, or not a mediatord archive") from None

    def _parse(self, lines: Iterator[bytes]) -> Iterator[tuple[StoreRecord, int]]:
        header = next(lines, b"")
        order = list(KINDS_BY_VERSION[_check_header(header)])
        digests = _RecordDigests(header, order)
        for line in lines:
            if not line.endswith(b"\n"):
                raise InvalidArchiveError("truncated line")
            if line.startswith(b'{"kind":"trailer"'):
                if _parse_line(line) != digests.trailer() or next(lines, None) is not None:
                    raise InvalidArchiveError("the digest in its last line does not match")
                self.id, self.counts = sha256(line).hexdigest(), digests.counts
                return
            record = decode_record(line)
            if record.kind not in order:
                raise InvalidArchiveError("its records are out of order")
            del order[: order.index(record.kind)]
            digests.add(record.kind, line)
            _check_numbers(record, digests.counts)
            yield record, len(line)
        raise InvalidArchiveError("its last line is missing")


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
    archive = RecordArchive(path)
    try:
        for number, (record, _) in enumerate(archive.read(), 1):
            accept(record)
            progress(number)
    except InvalidArchiveError as error:
        raise InvalidArchiveError(f"cannot read {path}: {error}") from None
    return archive


def _check_header(line: bytes) -> int:
    """The format version."""
    version = check_format(_parse_line(line), ARCHIVE_FORMAT, "not a mediatord archive")
    if not line.endswith(b"\n"):
        raise InvalidArchiveError("truncated line")
    return version


def _check_numbers(record: StoreRecord, counts: RecordCounts) -> None:
    """Check that a record refers to records before it."""
    right = True
    if record.kind in ("account", "recipient"):
        right = record.number == counts[record.kind]
    if isinstance(record, RecipientRecord | MessageRecord | DeviceRecord | WakeupRecord):
        right = right and (record.account or 0) <= counts["account"]
    if isinstance(record, MessageRecord):
        right = right and record.recipient <= counts["recipient"]
    if not right:
        raise InvalidArchiveError(f"record {counts[record.kind]} of kind {record.kind} has the wrong number")


def _encode_line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class CountMismatchError(BackupError):
    """
    The counts of the store differ from those of the archive.

    :ivar store: number of records by kind in the store, and :ivar archive: in the archive.
    """

    def __init__(self, archive: RecordCounts, store: RecordCounts) -> None:
        wrong = [
            f"{number} {RECORD_KINDS[kind]} (expected {archive[kind]})"
            for kind, number in store.items()
            if number != archive[kind]
        ]
        super().__init__(
            f"import incomplete: the store has {', '.join(wrong)}; daemons refuse this store until an import succeeds"
        )
        self.archive = archive
        self.store = store


def import_archive(
    archive: RecordArchive,
    target: RecordTarget,
    progress: ProgressCallback = ignore_progress,
    prepared: Callable[[], None] = lambda: None,
) -> RecordCounts:
    """
    Import an archive, or the rest of it after an interrupted import, and compare the counts, which it returns.

    :param progress: called with the number of its records in the store.
    :param prepared: called when all are, before daemons may use the store.
    :raise CountMismatchError: the counts differ.
    :raise BackupError: it cannot be imported; raised before anything is written, unless the archive contradicts
        itself or the store fails.
    """
    done = target.begin(archive.id)
    if done > archive.total:
        raise BackupError(
            f"the interrupted import has stored {done} records, but this archive has only {archive.total}; use the "
            "archive of that import"
        )
    progress(done)
    for batch in batch_by_size(archive.records(done), _BATCH_RECORDS, _BATCH_BYTES):
        target.write(done + 1, batch)
        done += len(batch)
        progress(done)
    counts = target.counts()
    if counts != archive.counts:
        raise CountMismatchError(archive.counts, counts)
    prepared()
    target.finish()
    return counts
