"""
Backups: a tar file of configuration, keys and store, with a manifest.

Members are `manifest.json`, `manifest.sha256` with its digest, and then the files of the manifest in its order, each
with name, size, SHA-256, mode and owner. Other names, links and special files are refused, and names are never used
as paths. A restore writes to unused paths, completely or not at all.
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
from hashlib import file_digest, sha256
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
)
from mediatord.backup.records import (
    RECORD_KINDS,
    BackupError,
    InvalidArchiveError,
    RecordCounts,
    RecordTarget,
    shorten_value,
)
from mediatord.backup.sqlite_export import SQLiteRecordSource, check_sqlite_schema
from mediatord.backup.sqlite_import import install_database, lock_store, migrate_database, require_empty_database
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.database_file import connect

BACKUP_FORMAT, BACKUP_VERSION = "mediatord-backup", 1
CONFIG, KEYS = "mediator.yaml", "keys.jwks"
LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN = "log.key", "cluster-secret", "admin-token"
FILES = (CONFIG, KEYS, LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN)
DATABASE, RECORDS = "store.sqlite3", "store.records.gz"

_MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
# Of members that are read into memory.
MAX_MEMBER_BYTES = 16_777_216
_CHUNK_BYTES = 1 << 20

MemberProgressCallback = Callable[[int], None]


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class BackupMember(_StrictModel):
    """:param user: name of its owner, empty if unknown; `group` likewise."""

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
        """The store, which is the last member."""
        return self.members[-1]

    @property
    def files(self) -> Sequence[BackupMember]:
        """All but the store."""
        return self.members[:-1]


class _RegularFileInfo(tarfile.TarInfo):
    """Refuses headers of anything but plain files, whose content would be read into memory."""

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
    :raise InvalidArchiveError: it is torn, altered, of a newer version or something else.
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

    :raise InvalidArchiveError: while they are read: it is torn or altered.
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

    :raise InvalidArchiveError: at its end: it is not what the manifest says.
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
    found = path.stat()
    return {
        "name": name,
        "bytes": found.st_size,
        "sha256": _hash_file(path),
        "mode": found.st_mode & 0o7777,
        "user": _find_name(path.owner),
        "group": _find_name(path.group),
    }


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


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


# Copies a store to a new file; returns the number of records of each kind.
StoreCopier = Callable[[Path], RecordCounts]


def create_backup(path: Path, files: Mapping[str, Path], backend: str, copy: StoreCopier) -> BackupManifest:
    """
    Write a backup, and verify it before it gets its name.

    :param files: by their names in it.
    :raise BackupError: it could not be written; nothing is left of it.
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
            raise BackupError(f"{path} differs from what was written: is the disk damaged?")
        return manifest


def copy_sqlite_store(source: Path, to: Path) -> RecordCounts:
    """
    Copy a database into a new file, as of one moment.

    :raise BackupError: it cannot be read, or the copy is damaged.
    """
    if not source.exists():
        raise BackupError(f"{source} does not exist: no daemon has stored anything yet")
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
    Count the records of a database that no process has open, after an integrity check.

    :raise BackupError: it is damaged.
    """
    try:
        # immutable: no file is created beside it.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True, factory=StoreConnection)) as connection:
            check_sqlite_schema(connection, path)
            found = [text for (text,) in connection.execute("PRAGMA integrity_check(1)")]
            if found != ["ok"]:
                raise BackupError(f"{path} is damaged: {found[0]}")
            return SQLiteRecordSource(connection).counts()
    except sqlite3.DatabaseError as error:
        raise BackupError(f"{path} is damaged: {error}") from None


def _copy_file(source: Path, to: Path) -> Path:
    """Copy a file, which may change later, with mode and owner as far as permitted."""
    shutil.copyfile(source, to)
    shutil.copymode(source, to)
    _chown_like(source, to)
    return to


def _chown_like(source: Path, to: Path) -> None:
    """Copy the owner if permitted; it is also in the manifest."""
    found = source.stat()
    with suppress(PermissionError):
        shutil.chown(to, found.st_uid, found.st_gid)


@contextmanager
def _create_working_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside a file; one of an earlier run that was killed is deleted first."""
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
    """Path of a file until it is complete."""
    return path.with_name(f".{path.name}{_DRAFT_SUFFIX}")


@dataclass(eq=False, slots=True)
class StagedFiles:
    """
    Drafts of files that get their names together.

    :ivar drafts: by final path, in the order of renaming.
    """

    drafts: dict[Path, Path] = field(default_factory=dict)

    def stage(self, path: Path, content: bytes, member: BackupMember) -> None:
        """
        Write a draft durably, unless a file with the same content exists.

        :raise BackupError: a different file exists.
        """
        if path.exists() or path.is_symlink():
            if not path.is_file() or path.read_bytes() != content:
                raise BackupError(f"{path} exists and differs from the backup's: move it away first")
            return
        draft = make_draft_path(path)
        draft.unlink(missing_ok=True)
        self.drafts[path] = draft
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(content)
            if member.name == CONFIG:  # all others are secrets
                os.fchmod(file.fileno(), member.mode & 0o644 | 0o600)
            chown_to_member_owner(file.fileno(), path, member)
            file.flush()
            os.fsync(file.fileno())

    def move_to_end(self, path: Path) -> None:
        """Rename this one last, so that it exists only if all do."""
        if path in self.drafts:
            self.drafts[path] = self.drafts.pop(path)

    def commit(self) -> None:
        """Give all drafts their names, or none of them."""
        placed: list[Path] = []
        try:
            for path, draft in self.drafts.items():
                os.link(draft, path)  # unlike a rename, it fails if the path exists by now
                placed.append(path)
        except OSError:
            for path in placed:
                path.unlink()
            raise
        for folder in {path.parent for path in placed}:
            sync_directory(folder)

    def discard(self) -> None:
        """Remove the drafts."""
        for draft in self.drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()


def chown_to_member_owner(file: int | Path, path: Path, member: BackupMember) -> None:
    """
    Give a file restored by root to the user and group named in the backup, or to the owner of its directory.

    :param file: descriptor or path of the draft.
    :param path: its final path.
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
    Paths that a configuration names.

    :param files: by their names in a backup, without the configuration itself.
    :param database: of a SQLite store.
    :param target: opens a MongoDB store.
    """

    files: Mapping[str, Path]
    database: Path | None
    target: Callable[[], AbstractContextManager[RecordTarget]] | None


# Reads a staged configuration, in the directory of its final path.
RestoreTargetReader = Callable[[Path], RestoreTargets]


def restore_backup(
    backup: Path, config: Path, read: RestoreTargetReader, progress: ProgressCallback = ignore_progress
) -> ImportComparison:
    """
    Restore a backup; returns the compared counts of the store.

    :param config: path of the configuration.
    :raise InvalidArchiveError: the backup cannot be used; nothing was written.
    :raise BackupError: a file exists or cannot be written; nothing is left, except for records imported into MongoDB,
        where the same command continues.
    """
    manifest = verify_backup_file(backup)
    contents = _read_small_members(backup)
    staged = StagedFiles()
    with _create_directory(config.parent, manifest.files[0]), contextlib.ExitStack() as stack:
        stack.callback(staged.discard)
        staged.stage(config, contents[CONFIG], manifest.files[0])
        places = read(staged.drafts.get(config, config))
        for member in manifest.files[1:]:
            staged.stage(_find_target(places, member), contents[member.name], member)
        staged.move_to_end(config)
        if manifest.backend == "sqlite" and places.database is not None:
            return _restore_database(backup, manifest, places.database, staged)
        if manifest.backend == "mongodb" and places.target is not None:
            return _restore_records(backup, manifest, places.target, config, staged, progress)
        raise BackupError(f"the backup is of storage.backend {manifest.backend}, the configuration has another")


def _restore_database(backup: Path, manifest: BackupManifest, path: Path, staged: StagedFiles) -> ImportComparison:
    if not path.parent.is_dir():
        raise BackupError(f"{path.parent} does not exist: create it first")
    with lock_store(path):
        if _is_same_file(path, manifest.store):
            staged.commit()
            return ImportComparison(dict(manifest.records), dict(manifest.records))
        require_empty_database(path)
        with _extract_store(backup, path, manifest.store) as draft:
            migrate_database(draft)
            comparison = ImportComparison(dict(manifest.records), count_records(draft))
            if not comparison.is_equal:
                raise _make_count_error(backup)
            install_database(draft, path)
        try:
            staged.commit()
        except OSError:
            path.unlink()
            raise
        return comparison


def _restore_records(
    backup: Path,
    manifest: BackupManifest,
    target: Callable[[], AbstractContextManager[RecordTarget]],
    config: Path,
    staged: StagedFiles,
    progress: ProgressCallback,
) -> ImportComparison:
    with _extract_store(backup, config.with_name("store.records"), manifest.store) as extracted, target() as store:
        archive = verify_archive(extracted, accept=store.accept)
        if archive.counts != manifest.records:
            raise _make_count_error(backup)
        return import_archive(archive, store, progress, staged.commit)


def _make_count_error(backup: Path) -> InvalidArchiveError:
    return InvalidArchiveError(f"{backup} cannot be used: its store differs from its manifest")


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
        raise BackupError(f"the backup has a file {member.name}, for which the configuration names no path")
    if not place.parent.is_dir():
        raise BackupError(f"{place.parent} does not exist: create it first")
    return place


def _is_same_file(path: Path, member: BackupMember) -> bool:
    """Whether a database is identical to that of the backup, after an earlier attempt to restore it."""
    if not path.is_file() or path.stat().st_size != member.bytes:
        return False
    return _hash_file(path) == member.sha256


@contextmanager
def _extract_store(backup: Path, path: Path, wanted: BackupMember) -> Iterator[Path]:
    """Extract the store of a backup to a draft beside a path, which is deleted at the end unless it was renamed."""
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
    Create a directory unless it exists; remove it if the restore fails.

    :param member: a file for it, whose owner must be able to read the directory.
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
