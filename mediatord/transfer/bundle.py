"""
Backups: a tar file with everything that a mediator needs, and a manifest of it.

Its members are `manifest.json`, `manifest.sha256` with the digest of that, and then what the manifest lists, in that
order: of each the name, which says what it is, bytes, SHA-256, mode and owner. No other names, links, or anything
that is no plain file is taken, and names are never used as paths.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mediatord import __version__
from mediatord.transfer.errors import ArchiveRefused, shown
from mediatord.transfer.records import KINDS

FORMAT, VERSION = "mediatord-backup", 1
CONFIG, KEYS = "mediator.yaml", "keys.jwks"
LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN = "log.key", "cluster-secret", "admin-token"
FILES = (CONFIG, KEYS, LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN)
DATABASE, RECORDS = "store.sqlite3", "store.records.gz"

_MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
# What is read into memory is not larger.
LARGEST_FILE = 16_777_216
_CHUNK = 1 << 20

Tell = Callable[[int], None]


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Member(_Checked):
    """:param user: name of its owner, empty if it has none; `group` likewise."""

    name: Literal[
        "mediator.yaml", "keys.jwks", "log.key", "cluster-secret", "admin-token", "store.sqlite3", "store.records.gz"
    ]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    user: str
    group: str


class Manifest(_Checked):
    """
    What is in a backup.

    :param records: of the store, by kind.
    """

    format: Literal["mediatord-backup"]
    version: Literal[1]
    made_at: str
    made_by: str
    backend: Literal["sqlite", "mongodb"]
    records: dict[str, Annotated[int, Field(ge=0)]]
    members: list[Member]

    @field_validator("records")
    @classmethod
    def _has_all_kinds(cls, records: Mapping[str, int]) -> Mapping[str, int]:
        if list(records) != list(KINDS):
            raise ValueError("expected all kinds of records")
        return records

    @field_validator("members")
    @classmethod
    def _has_each_once(cls, members: Sequence[Member]) -> Sequence[Member]:
        names = [member.name for member in members]
        small = all(member.bytes <= LARGEST_FILE for member in members[:-1])
        whole = names[:2] == [CONFIG, KEYS] and names[-1:] in ([DATABASE], [RECORDS])
        if len(set(names)) < len(names) or not whole or not small:
            raise ValueError("expected configuration, keys and store, each once")
        return members

    @property
    def store(self) -> Member:
        """The store, which comes last."""
        return self.members[-1]

    @property
    def files(self) -> Sequence[Member]:
        """All but the store."""
        return self.members[:-1]


class _PlainFile(tarfile.TarInfo):
    """A header of a plain file; the content of any other, which can be long, would be read into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type != tarfile.REGTYPE:
            raise ArchiveRefused("it has something else than plain files in it")
        return found


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def write_bundle(file: BinaryIO, backend: str, records: Mapping[str, int], members: Mapping[str, Path]) -> Manifest:
    """
    Write a backup to a file that is open.

    :param members: the files by name, in the order of :data:`FILES`; last comes the store.
    :raise OSError: one of them cannot be read.
    """
    manifest = Manifest.model_validate(
        {
            "format": FORMAT,
            "version": VERSION,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "made_by": f"mediatord {__version__}",
            "backend": backend,
            "records": dict(records),
            "members": [_member(name, path) for name, path in members.items()],
        }
    )
    text = manifest.model_dump_json(indent=1).encode()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in ((_MANIFEST, text), (_DIGEST, _digest_of(text))):
            tar.addfile(_header(name, len(content)), BytesIO(content))
        for member, path in zip(manifest.members, members.values(), strict=True):
            with path.open("rb") as source:
                tar.addfile(_header(member.name, member.bytes), source)
    return manifest


def check_bundle(path: Path, file: BinaryIO | None = None) -> Manifest:
    """
    Read a backup from end to end.

    :param file: where it is open already.
    :raise ArchiveRefused: it is torn, altered, of a newer version or something else.
    """
    with reading(path, file) as (manifest, contents):
        for member, content in contents:
            for _ in chunks(member, content):
                pass
        return manifest


@contextmanager
def reading(
    path: Path, file: BinaryIO | None = None
) -> Iterator[tuple[Manifest, Iterator[tuple[Member, _Readable]]]]:
    """
    A backup's manifest and its members, of which each is to be read before the next.

    :raise ArchiveRefused: while they are read: it is torn or altered.
    """
    try:
        if file is None:
            with path.open("rb") as opened, tarfile.open(fileobj=opened, mode="r|", tarinfo=_PlainFile) as tar:
                yield _take(tar)
        else:
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r|", tarinfo=_PlainFile) as tar:
                yield _take(tar)
    except ArchiveRefused as error:
        raise ArchiveRefused(f"{path} cannot be used: {error}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError):
        raise ArchiveRefused(f"{path} cannot be used: it is torn or altered, or no backup of mediatord") from None


def chunks(member: Member, content: _Readable) -> Iterator[bytes]:
    """
    All of a member.

    :raise ArchiveRefused: at its end: it is not what the manifest says.
    """
    digest, size = sha256(), 0
    while chunk := content.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if size != member.bytes or digest.hexdigest() != member.sha256:
        raise ArchiveRefused(f"{member.name} in it is not what its manifest says")


def _take(tar: tarfile.TarFile) -> tuple[Manifest, Iterator[tuple[Member, _Readable]]]:
    text = _small(tar, _MANIFEST)
    if _small(tar, _DIGEST) != _digest_of(text):
        raise ArchiveRefused("it is not what its digest says")
    return _manifest_of(text), _members(tar, _manifest_of(text))


def _manifest_of(text: bytes) -> Manifest:
    given = json.loads(text)
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise ArchiveRefused("it is no backup of mediatord")
    if given.get("version") != VERSION:
        raise ArchiveRefused(f"it is of version {shown(given.get('version'))}, this mediatord knows {VERSION}")
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise ArchiveRefused(f"its manifest: {error.errors(include_url=False)[0]['msg']}") from None


def _members(tar: tarfile.TarFile, manifest: Manifest) -> Iterator[tuple[Member, _Readable]]:
    for member in manifest.members:
        yield member, _next(tar, member.name, member.bytes)
    if tar.next() is not None:
        raise ArchiveRefused("there is more in it than its manifest says")


def _small(tar: tarfile.TarFile, name: str) -> bytes:
    return _next(tar, name, LARGEST_FILE, exactly=False).read(LARGEST_FILE)


def _next(tar: tarfile.TarFile, name: str, size: int, *, exactly: bool = True) -> _Readable:
    found = tar.next()
    if found is None or found.name != name:
        raise ArchiveRefused(f"expected {name} in it")
    if found.size > size or (exactly and found.size != size):
        raise ArchiveRefused(f"{name} in it is not what its manifest says")
    content = tar.extractfile(found)
    assert content is not None
    return content


def _member(name: str, path: Path) -> dict[str, object]:
    digest, found = sha256(), path.stat()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return {
        "name": name,
        "bytes": found.st_size,
        "sha256": digest.hexdigest(),
        "mode": found.st_mode & 0o7777,
        "user": _name_of(path.owner),
        "group": _name_of(path.group),
    }


def _name_of(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except KeyError:
        return ""


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.uid, header.gid = size, 0o600, os.geteuid(), os.getegid()
    return header


def _digest_of(text: bytes) -> bytes:
    return sha256(text).hexdigest().encode() + b"\n"
