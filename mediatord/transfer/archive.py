"""
Archives of records: gzip, in it lines of JSON, each with its `kind`.

The first line is the header: `format`, `version`, when and by what it was made and from which backend. Then come the
records. The last line is the trailer: of each kind how many there are and the SHA-256 of their lines, and the SHA-256
of the header. An archive without its trailer, or that is not what its trailer says, is refused as a whole.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

from mediatord import __version__
from mediatord.transfer.draft import new_file
from mediatord.transfer.errors import ArchiveRefused, shown
from mediatord.transfer.records import KINDS, Counts, Message, Recipient, Record, decode, encode

FORMAT, VERSION = "mediatord-store", 1
# Envelopes do not get much smaller by more.
_LEVEL = 3
# More than the longest record that any store takes.
_LONGEST_LINE = 1 << 28
_TAIL = "header_sha256"

Tell = Callable[[int], None]


def silent(_: int) -> None:
    """Tells nobody how far something is."""


@dataclass(eq=False, slots=True)
class _Tally:
    """How many lines of each kind there were, and what they were."""

    counts: Counts = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    digests: dict[str, Any] = field(default_factory=lambda: {kind: sha256() for kind in KINDS})

    def add(self, kind: str, line: bytes) -> None:
        self.counts[kind] += 1
        self.digests[kind].update(line)

    def trailer(self, header: bytes) -> dict[str, Any]:
        records = {kind: {"count": self.counts[kind], "sha256": self.digests[kind].hexdigest()} for kind in KINDS}
        return {"kind": "trailer", "records": records, _TAIL: sha256(header).hexdigest()}


def write_archive(path: Path, backend: str, records: Iterable[Record], tell: Tell = silent) -> Counts:
    """
    Make an archive of records, in their order; how many of each kind those were.

    :param backend: where they come from.
    :param tell: told after each record how many there are.
    :raise TransferError: there is a file of that name already.
    """
    with new_file(path) as file:
        return write_records(file, backend, records, tell)


def write_records(file: BinaryIO, backend: str, records: Iterable[Record], tell: Tell = silent) -> Counts:
    """As :func:`write_archive`, to a file that is open."""
    tally = _Tally()
    # Without name and time, which are nobody's business.
    with gzip.GzipFile("", "wb", compresslevel=_LEVEL, fileobj=file, mtime=0) as packed:
        header = _line(
            {
                "kind": "header",
                "format": FORMAT,
                "version": VERSION,
                "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "made_by": f"mediatord {__version__}",
                "backend": backend,
            }
        )
        packed.write(header)
        for number, record in enumerate(records, 1):
            line = encode(record)
            packed.write(line)
            tally.add(record.kind, line)
            tell(number)
        packed.write(_line(tally.trailer(header)))
    return tally.counts


@dataclass(frozen=True, slots=True)
class Archive:
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

    def records(self, after: int = 0) -> Iterator[tuple[Record, int]]:
        """
        The records behind the first `after`, each with the bytes of its line.

        :raise ArchiveRefused: it has changed since; said at the end, if not before.
        """
        with _lines(self.path) as lines:
            tally, header = _Tally(), next(lines, b"")
            for place, line in enumerate(lines, 1):
                if place > self.total:
                    if sha256(line).hexdigest() != self.id or _parsed(line) != tally.trailer(header):
                        break
                    return
                record = decode(line)
                tally.add(record.kind, line)
                if place > after:
                    yield record, len(line)
        raise ArchiveRefused(f"{self.path} has changed while it was read")


def check_archive(path: Path, tell: Tell = silent, accept: Callable[[Record], None] = lambda record: None) -> Archive:
    """
    Read an archive from end to end.

    :param tell: told how many of its records were read.
    :param accept: refuses records that cannot be used.
    :raise ArchiveRefused: it is torn, altered, of a newer version or something else.
    """
    try:
        with _lines(path) as lines:
            return _check(path, lines, tell, accept)
    except ArchiveRefused as error:
        reason = str(error)
        raise ArchiveRefused(reason if str(path) in reason else f"{path} cannot be used: {reason}") from None


def _check(path: Path, lines: Iterator[bytes], tell: Tell, accept: Callable[[Record], None]) -> Archive:
    header = next(lines, b"")
    _check_header(_parsed(header))
    tally, order, number = _Tally(), list(KINDS), 0
    for line in lines:
        if line.startswith(b'{"kind":"trailer"'):
            if _parsed(line) != tally.trailer(header) or next(lines, None) is not None:
                raise ArchiveRefused("it is not what its last line says")
            return Archive(path, sha256(line).hexdigest(), dict(tally.counts))
        record = decode(line)
        if record.kind not in order:
            raise ArchiveRefused("its records are not in order")
        del order[: order.index(record.kind)]
        tally.add(record.kind, line)
        _check_numbers(record, tally.counts)
        accept(record)
        number += 1
        tell(number)
    raise ArchiveRefused("its end is missing")


def _check_header(header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ArchiveRefused("it is no archive of mediatord")
    if header.get("version") != VERSION:
        raise ArchiveRefused(f"it is of version {shown(header.get('version'))}, this mediatord knows {VERSION}")


def _check_numbers(record: Record, counts: Mapping[str, int]) -> None:
    """What a record refers to has come before it."""
    right = True
    if record.kind in ("account", "recipient"):
        right = record.number == counts[record.kind]
    if isinstance(record, Recipient | Message):
        right = right and record.account <= counts["account"]
    if isinstance(record, Message):
        right = right and record.recipient <= counts["recipient"]
    if not right:
        raise ArchiveRefused(f"record {counts[record.kind]} of kind {record.kind} has a wrong number")


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[bytes]]:
    """
    The lines of an archive.

    :raise ArchiveRefused: while they are read: it is torn.
    """
    with path.open("rb") as file, gzip.GzipFile(fileobj=file, mode="rb") as packed:
        try:
            yield _each_line(cast(BinaryIO, packed))
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise ArchiveRefused(
                f"{path} cannot be used: it is torn or altered, or no archive of mediatord"
            ) from None


def _each_line(packed: BinaryIO) -> Iterator[bytes]:
    while line := packed.readline(_LONGEST_LINE):
        if not line.endswith(b"\n"):
            raise ArchiveRefused("a line has no end")
        yield line


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
