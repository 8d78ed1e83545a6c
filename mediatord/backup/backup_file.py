"""
Backups: a tar file with everything that a mediator needs, and a manifest of it.

Its members are `manifest.json`, `manifest.sha256` with the digest of that, and then what the manifest lists, in that
order: of each the name, which says what it is, bytes, SHA-256, mode and owner. No other names, links, or anything
that is no plain file is taken, and names are never used as paths.

Making backups while the daemon runs.

Files that take their places together, or none of them.

Bringing back a backup: into places where nothing is, or the same; all of it or nothing.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mediatord import __version__
from mediatord.backup.archive import (
    ImportComparison,
    ProgressCallback,
    create_file_atomically,
    ignore_progress,
    import_archive,
    report_full_disk,
    sync_directory,
    verify_archive,
    write_archive,
)
from mediatord.backup.records import (
    RECORD_KINDS,
    BackupError,
    InvalidArchiveError,
    RecordCounts,
    RecordSource,
    RecordTarget,
    shorten_value,
)
from mediatord.backup.sqlite_export import SQLiteRecordSource, check_sqlite_schema
from mediatord.backup.sqlite_import import install_database, lock_store, migrate_database, require_empty_database
from mediatord.store.sqlite.database_file import connect

BACKUP_FORMAT, BACKUP_VERSION = "mediatord-backup", 1
CONFIG, KEYS = "mediator.yaml", "keys.jwks"
LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN = "log.key", "cluster-secret", "admin-token"
FILES = (CONFIG, KEYS, LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN)
DATABASE, RECORDS = "store.sqlite3", "store.records.gz"

_MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
# What is read into memory is not larger.
MAX_MEMBER_BYTES = 16_777_216
_CHUNK_BYTES = 1 << 20

MemberProgressCallback = Callable[[int], None]


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class BackupMember(_StrictModel):
    """:param user: name of its owner, empty if it has none; `group` likewise."""

    name: Literal[
        "mediator.yaml", "keys.jwks", "log.key", "cluster-secret", "admin-token", "store.sqlite3", "store.records.gz"
    ]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    user: str
    group: str


class BackupManifest(_StrictModel):
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
    members: list[BackupMember]

    @field_validator("records")
    @classmethod
    def _has_all_kinds(cls, records: Mapping[str, int]) -> Mapping[str, int]:
        if list(records) != list(RECORD_KINDS):
            raise ValueError("expected all kinds of records")
        return records

    @field_validator("members")
    @classmethod
    def _has_each_once(cls, members: Sequence[BackupMember]) -> Sequence[BackupMember]:
        names = [member.name for member in members]
        small = all(member.bytes <= MAX_MEMBER_BYTES for member in members[:-1])
        whole = names[:2] == [CONFIG, KEYS] and names[-1:] in ([DATABASE], [RECORDS])
        if len(set(names)) < len(names) or not whole or not small:
            raise ValueError("expected configuration, keys and store, each once")
        return members

    @property
    def store(self) -> BackupMember:
        """The store, which comes last."""
        return self.members[-1]

    @property
    def files(self) -> Sequence[BackupMember]:
        """All but the store."""
        return self.members[:-1]


class _RegularFileInfo(tarfile.TarInfo):
    """A header of a plain file; the content of any other, which can be long, would be read into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type != tarfile.REGTYPE:
            raise InvalidArchiveError("it has something else than plain files in it")
        return found


class _ReadableStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def write_backup_file(
    file: BinaryIO, backend: str, records: Mapping[str, int], members: Mapping[str, Path]
) -> BackupManifest:
    """
    Write a backup to a file that is open.

    :param members: the files by name, in the order of :data:`CERTIFICATE_PARAMETERS`; last comes the store.
    :raise OSError: one of them cannot be read.
    """
    manifest = BackupManifest.model_validate(
        {
            "format": BACKUP_FORMAT,
            "version": BACKUP_VERSION,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "made_by": f"mediatord {__version__}",
            "backend": backend,
            "records": dict(records),
            "members": [_describe_member(name, path) for name, path in members.items()],
        }
    )
    text = manifest.model_dump_json(indent=1).encode()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in ((_MANIFEST, text), (_DIGEST, _compute_digest(text))):
            tar.addfile(_make_header(name, len(content)), BytesIO(content))
        for member, path in zip(manifest.members, members.values(), strict=True):
            with path.open("rb") as source:
                tar.addfile(_make_header(member.name, member.bytes), source)
    return manifest


def verify_backup_file(path: Path, file: BinaryIO | None = None) -> BackupManifest:
    """
    Read a backup from end to end.

    :param file: where it is open already.
    :raise ArchiveRefused: it is torn, altered, of a newer version or something else.
    """
    with open_backup_file(path, file) as (manifest, contents):
        for member, content in contents:
            for _ in read_member_chunks(member, content):
                pass
        return manifest


@contextmanager
def open_backup_file(
    path: Path, file: BinaryIO | None = None
) -> Iterator[tuple[BackupManifest, Iterator[tuple[BackupMember, _ReadableStream]]]]:
    """
    A backup's manifest and its members, of which each is to be read before the next.

    :raise ArchiveRefused: while they are read: it is torn or altered.
    """
    try:
        if file is None:
            with path.open("rb") as opened, tarfile.open(fileobj=opened, mode="r|", tarinfo=_RegularFileInfo) as tar:
                yield _read_manifest(tar)
        else:
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r|", tarinfo=_RegularFileInfo) as tar:
                yield _read_manifest(tar)
    except InvalidArchiveError as error:
        raise InvalidArchiveError(f"{path} cannot be used: {error}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError):
        raise InvalidArchiveError(
            f"{path} cannot be used: it is torn or altered, or no backup of mediatord"
        ) from None


def read_member_chunks(member: BackupMember, content: _ReadableStream) -> Iterator[bytes]:
    """
    All of a member.

    :raise ArchiveRefused: at its end: it is not what the manifest says.
    """
    digest, size = sha256(), 0
    while chunk := content.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if size != member.bytes or digest.hexdigest() != member.sha256:
        raise InvalidArchiveError(f"{member.name} in it is not what its manifest says")


def _read_manifest(tar: tarfile.TarFile) -> tuple[BackupManifest, Iterator[tuple[BackupMember, _ReadableStream]]]:
    text = _read_small_member(tar, _MANIFEST)
    if _read_small_member(tar, _DIGEST) != _compute_digest(text):
        raise InvalidArchiveError("it is not what its digest says")
    return _parse_manifest(text), _read_members(tar, _parse_manifest(text))


def _parse_manifest(text: bytes) -> BackupManifest:
    given = json.loads(text)
    if not isinstance(given, dict) or given.get("format") != BACKUP_FORMAT:
        raise InvalidArchiveError("it is no backup of mediatord")
    if given.get("version") != BACKUP_VERSION:
        raise InvalidArchiveError(
            f"it is of version {shorten_value(given.get('version'))}, this mediatord knows {BACKUP_VERSION}"
        )
    try:
        return BackupManifest.model_validate_json(text)
    except ValidationError as error:
        raise InvalidArchiveError(f"its manifest: {error.errors(include_url=False)[0]['msg']}") from None


def _read_members(tar: tarfile.TarFile, manifest: BackupManifest) -> Iterator[tuple[BackupMember, _ReadableStream]]:
    for member in manifest.members:
        yield member, _open_next_member(tar, member.name, member.bytes)
    if tar.next() is not None:
        raise InvalidArchiveError("there is more in it than its manifest says")


def _read_small_member(tar: tarfile.TarFile, name: str) -> bytes:
    return _open_next_member(tar, name, MAX_MEMBER_BYTES, exactly=False).read(MAX_MEMBER_BYTES)


def _open_next_member(tar: tarfile.TarFile, name: str, size: int, *, exactly: bool = True) -> _ReadableStream:
    found = tar.next()
    if found is None or found.name != name:
        raise InvalidArchiveError(f"expected {name} in it")
    if found.size > size or (exactly and found.size != size):
        raise InvalidArchiveError(f"{name} in it is not what its manifest says")
    content = tar.extractfile(found)
    assert content is not None
    return content


def _describe_member(name: str, path: Path) -> dict[str, object]:
    digest, found = sha256(), path.stat()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {
        "name": name,
        "bytes": found.st_size,
        "sha256": digest.hexdigest(),
        "mode": found.st_mode & 0o7777,
        "user": _find_name(path.owner),
        "group": _find_name(path.group),
    }


def _find_name(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except KeyError:
        return ""


def _make_header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.uid, header.gid = size, 0o600, os.geteuid(), os.getegid()
    return header


def _compute_digest(text: bytes) -> bytes:
    return sha256(text).hexdigest().encode() + b"\n"


# Copies a store to a new file, and says how many records of each kind are in that.
StoreCopier = Callable[[Path], RecordCounts]


def create_backup(path: Path, files: Mapping[str, Path], backend: str, copy: StoreCopier) -> BackupManifest:
    """
    Make a backup, and read it back before it gets its name.

    :param files: by their names in it.
    :raise TransferError: it could not be made; nothing is left of it.
    :raise OSError: likewise.
    """
    with create_file_atomically(path) as file, _create_working_directory(path) as workshop:
        name = DATABASE if backend == "sqlite" else RECORDS
        store = workshop / name
        counts = copy(store)
        copies = {name: _copy_file(source, workshop / name) for name, source in files.items()}
        manifest = write_backup_file(file, backend, counts, {**copies, name: store})
        file.flush()
        if verify_backup_file(path, file) != manifest:
            raise BackupError(f"{path} is not what was written: is the disk damaged?")
        return manifest


def copy_sqlite_store(source: Path, to: Path) -> RecordCounts:
    """
    Copy a database as it is at one time, whatever is written meanwhile, into a file of its own.

    :raise TransferError: it cannot be read, or the copy is damaged.
    """
    if not source.exists():
        raise BackupError(f"{source} is not there: nothing has been kept yet")
    to.touch(mode=0o600)
    try:
        with closing(connect(source)) as connection:
            check_sqlite_schema(connection, source)
            connection.execute("VACUUM INTO ?", (str(to),))
        _chown_like(source, to)
        return count_records(to)
    except sqlite3.DatabaseError as error:
        raise BackupError(f"{source} cannot be copied to {to.parent}: {error}") from None


def count_records(path: Path) -> RecordCounts:
    """
    The records in a database that nobody else has open, after looking whether it is sound.

    :raise TransferError: it is not.
    """
    try:
        # Nothing is written beside it.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            check_sqlite_schema(connection, path)
            found = [text for (text,) in connection.execute("PRAGMA integrity_check(1)")]
            if found != ["ok"]:
                raise BackupError(f"{path} is damaged: {found[0]}")
            return SQLiteRecordSource(connection).counts()
    except sqlite3.DatabaseError as error:
        raise BackupError(f"{path} is damaged: {error}") from None


def copy_store_records(source: RecordSource, to: Path, progress: ProgressCallback = ignore_progress) -> RecordCounts:
    """As an archive of records."""
    return write_archive(to, source.backend, source.records(), progress)


def _copy_file(source: Path, to: Path) -> Path:
    """As it is now: it may change before all is written. With mode and owner, as far as those can be given."""
    shutil.copyfile(source, to)
    shutil.copymode(source, to)
    _chown_like(source, to)
    return to


def _chown_like(source: Path, to: Path) -> None:
    """As far as that can be done: whose it was is in the manifest."""
    found = source.stat()
    with suppress(PermissionError):
        shutil.chown(to, found.st_uid, found.st_gid)


@contextmanager
def _create_working_directory(path: Path) -> Iterator[Path]:
    """A directory beside a file that is being made; what an earlier run that was killed has left goes first."""
    workshop = path.with_name(f".{path.name}.parts")
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir(mode=0o700)
    try:
        yield workshop
    finally:
        shutil.rmtree(workshop)


IdT = TypeVar("IdT")

_DRAFT_SUFFIX = ".restore"


def make_draft_path(path: Path) -> Path:
    """Where a file is before it has its place."""
    return path.with_name(f".{path.name}{_DRAFT_SUFFIX}")


@dataclass(eq=False, slots=True)
class StagedFiles:
    """
    Drafts beside the places that they are to take.

    :ivar drafts: by place, in the order in which they take them.
    """

    drafts: dict[Path, Path] = field(default_factory=dict)

    def stage(self, path: Path, content: bytes, member: BackupMember) -> None:
        """
        Write a draft, durably, unless the very same is there already.

        :raise TransferError: something else is there.
        """
        if path.exists() or path.is_symlink():
            if not path.is_file() or path.read_bytes() != content:
                raise BackupError(f"{path} is there already and differs from the backup's: move it away first")
            return
        draft = make_draft_path(path)
        draft.unlink(missing_ok=True)
        self.drafts[path] = draft
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(content)
            if member.name == CONFIG:  # all others have secrets
                os.fchmod(file.fileno(), member.mode & 0o644 | 0o600)
            chown_to_member_owner(file.fileno(), path, member)
            file.flush()
            os.fsync(file.fileno())

    def move_to_end(self, path: Path) -> None:
        """Where this one is, everything is."""
        if path in self.drafts:
            self.drafts[path] = self.drafts.pop(path)

    def place(self) -> None:
        """Let all drafts take their places, which are free; those that have, leave again if one cannot."""
        placed: list[Path] = []
        try:
            for path, draft in self.drafts.items():
                os.link(draft, path)  # unlike a rename, it fails where something stands by now
                placed.append(path)
        except OSError:
            for path in placed:
                path.unlink()
            raise
        for folder in {path.parent for path in placed}:
            sync_directory(folder)

    def clean(self) -> None:
        """Remove the drafts, which are not needed any more."""
        for draft in self.drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()


def chown_to_member_owner(file: int | Path, path: Path, member: BackupMember) -> None:
    """
    What root restores belongs to the users of the same names as before, or to the owner of its directory.

    :param file: what is to be given.
    :param path: what it will be called.
    """
    if os.geteuid() != 0:
        return
    folder = path.parent.stat()
    user = _find_id(lambda: pwd.getpwnam(member.user).pw_uid, folder.st_uid)
    group = _find_id(lambda: grp.getgrnam(member.group).gr_gid, folder.st_gid)
    os.chown(file, user, group)


def _find_id(ask: Callable[[], IdT], otherwise: IdT) -> IdT:
    try:
        return ask()
    except KeyError:
        return otherwise


@dataclass(frozen=True, slots=True)
class RestoreTargets:
    """
    Where a configuration wants things to be.

    :param files: by their names in a backup, but for the configuration itself.
    :param database: of a SQLite store.
    :param target: opens a MongoDB store.
    """

    files: Mapping[str, Path]
    database: Path | None
    target: Callable[[], AbstractContextManager[RecordTarget]] | None


# Reads a configuration that is here for now and will be there; its paths are relative to the same directory.
RestoreTargetReader = Callable[[Path], RestoreTargets]


def restore_backup(
    backup: Path, config: Path, read: RestoreTargetReader, progress: ProgressCallback = ignore_progress
) -> ImportComparison:
    """
    Bring back a backup; the counts of the store, compared.

    :param config: where the configuration is to be.
    :raise ArchiveRefused: the backup cannot be used; nothing was written.
    :raise TransferError: something is in the way, or could not be written; nothing is left of it, but for what was
        imported into MongoDB, with which the same command goes on.
    """
    manifest = verify_backup_file(backup)
    contents = _read_small_members(backup)
    placing = StagedFiles()
    with _create_directory(config.parent, manifest.files[0]), contextlib.ExitStack() as stack:
        stack.callback(placing.clean)
        placing.stage(config, contents[CONFIG], manifest.files[0])
        places = read(placing.drafts.get(config, config))
        for member in manifest.files[1:]:
            placing.stage(_find_target(places, member), contents[member.name], member)
        placing.move_to_end(config)
        if manifest.backend == "sqlite" and places.database is not None:
            return _restore_database(backup, manifest, places.database, placing)
        if manifest.backend == "mongodb" and places.target is not None:
            return _restore_records(backup, manifest, places.target, config, placing, progress)
        raise BackupError(f"the backup is of storage.backend {manifest.backend}, the configuration wants another")


def _restore_database(backup: Path, manifest: BackupManifest, path: Path, placing: StagedFiles) -> ImportComparison:
    if not path.parent.is_dir():
        raise BackupError(f"{path.parent} is not there: make it first")
    with lock_store(path):
        if _is_same_file(path, manifest.store):
            placing.place()
            return ImportComparison(dict(manifest.records), dict(manifest.records))
        require_empty_database(path)
        with _extract_store(backup, path, manifest.store) as draft:
            migrate_database(draft)
            comparison = ImportComparison(dict(manifest.records), count_records(draft))
            if not comparison.is_equal:
                raise _make_count_error(backup)
            install_database(draft, path)
        try:
            placing.place()
        except OSError:
            path.unlink()
            raise
        return comparison


def _restore_records(
    backup: Path,
    manifest: BackupManifest,
    target: Callable[[], AbstractContextManager[RecordTarget]],
    config: Path,
    placing: StagedFiles,
    progress: ProgressCallback,
) -> ImportComparison:
    with _extract_store(backup, config.with_name("store.records"), manifest.store) as extracted, target() as store:
        archive = verify_archive(extracted, accept=store.accept)
        if archive.counts != manifest.records:
            raise _make_count_error(backup)
        return import_archive(archive, store, progress, placing.place)


def _make_count_error(backup: Path) -> InvalidArchiveError:
    return InvalidArchiveError(f"{backup} cannot be used: its store is not what its manifest says")


def _read_small_members(backup: Path) -> dict[str, bytes]:
    with open_backup_file(backup) as (_, contents):
        return {
            member.name: b"".join(read_member_chunks(member, content))
            for member, content in contents
            if member.name in FILES
        }


def _find_target(places: RestoreTargets, member: BackupMember) -> Path:
    place = places.files.get(member.name)
    if place is None:
        raise BackupError(f"the backup has a file {member.name}, for which the configuration names no place")
    if not place.parent.is_dir():
        raise BackupError(f"{place.parent} is not there: make it first")
    return place


def _is_same_file(path: Path, member: BackupMember) -> bool:
    """Whether a database is the very file of the backup, which an earlier attempt may have restored."""
    if not path.is_file() or path.stat().st_size != member.bytes:
        return False
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == member.sha256


@contextmanager
def _extract_store(backup: Path, path: Path, wanted: BackupMember) -> Iterator[Path]:
    """The store of a backup as a file beside a place, for as long as it is needed, or until it is renamed."""
    draft = make_draft_path(path)
    draft.unlink(missing_ok=True)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with report_full_disk(path), os.fdopen(descriptor, "wb") as file, open_backup_file(backup) as (_, contents):
            for member, content in contents:
                for chunk in read_member_chunks(member, content):
                    if member == wanted:
                        file.write(chunk)
            if file.tell() != wanted.bytes:
                raise InvalidArchiveError("it has changed while it was read")
            chown_to_member_owner(descriptor, path, wanted)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _create_directory(path: Path, member: BackupMember) -> Iterator[None]:
    """
    A directory that is made if it is not there, and goes again if what was to be in it failed.

    :param member: what will be in it; whoever may read that has to get there.
    """
    if path.is_dir():
        yield
        return
    path.mkdir(mode=0o750, parents=True)
    try:
        chown_to_member_owner(path, path, member)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise
    sync_directory(path.parent)
