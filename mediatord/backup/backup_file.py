"""
Backups: a tar file of configuration, keys and store, with a manifest.

Members are `manifest.json`, `manifest.sha256` with its digest, and then the files of the manifest in its order, each
with name, size, SHA-256, mode and owner. Other names, links and special files are refused, and names are never used
as paths. A restore writes to unused paths, completely or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from hashlib import file_digest, sha256
from io import BytesIO
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mediatord.backup.archive import (
    ProgressCallback,
    check_format,
    describe_format,
    ignore_progress,
    import_archive,
    verify_archive,
)
from mediatord.backup.durable_files import (
    StagedFiles,
    chown_to_owner,
    create_directory,
    create_draft,
    create_file_atomically,
    report_full_disk,
    require_directory,
)
from mediatord.backup.records import (
    KINDS_BY_VERSION,
    RECORD_KINDS,
    BackupError,
    InvalidArchiveError,
    RecordCounts,
    open_record_target,
)
from mediatord.backup.sqlite_database_files import install_database, lock_store, migrate_database
from mediatord.backup.sqlite_records import count_records, require_empty_database
from mediatord.config.file import load_config
from mediatord.config.settings import Config

BACKUP_FORMAT, BACKUP_VERSION = "mediatord-backup", max(KINDS_BY_VERSION)
CONFIG, KEYS = "mediator.yaml", "keys.jwks"
LOG_KEY, CLUSTER_SECRET, ADMIN_TOKEN = "log.key", "cluster-secret", "admin-token"
DATABASE, RECORDS = "store.sqlite3", "store.records.gz"

_MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
# Of members that are read into memory.
MAX_MEMBER_BYTES = 16_777_216
_CHUNK_BYTES = 1 << 20


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
    version: Literal[1, 2, 3]
    made_at: str
    made_by: str
    backend: Literal["sqlite", "mongodb"]
    records: dict[str, Annotated[int, Field(ge=0)]]
    members: list[BackupMember]

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if list(self.records) != KINDS_BY_VERSION[self.version]:
            raise ValueError("expected all kinds of records")
        names = [member.name for member in self.members]
        small = all(member.bytes <= MAX_MEMBER_BYTES for member in self.members[:-1])
        whole = names[:2] == [CONFIG, KEYS] and names[-1:] in ([DATABASE], [RECORDS])
        if len(set(names)) < len(names) or not whole or not small:
            raise ValueError("expected configuration, keys and store, each once")
        return self

    @property
    def counts(self) -> RecordCounts:
        """Records of the store, by all kinds of today."""
        return dict.fromkeys(RECORD_KINDS, 0) | self.records

    @property
    def store(self) -> BackupMember:
        """The store, which is the last member."""
        return self.members[-1]


class _RegularFileInfo(tarfile.TarInfo):
    """Refuses headers of anything but plain files, whose content would be read into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type != tarfile.REGTYPE:
            raise InvalidArchiveError("it contains members other than regular files")
        return found


def write_backup_file(
    file: BinaryIO, backend: str, records: Mapping[str, int], members: Mapping[str, Path]
) -> BackupManifest:
    """
    Write a backup to a file that is open.

    :param members: the files by name, in the order of a backup; last comes the store.
    :raise OSError: one of them cannot be read.
    """
    manifest = BackupManifest.model_validate(
        {
            **describe_format(BACKUP_FORMAT, BACKUP_VERSION),
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


def _describe_member(name: str, path: Path) -> dict[str, object]:
    found, user, group = path.stat(), "", ""
    with suppress(KeyError):
        user = path.owner()
    with suppress(KeyError):
        group = path.group()
    member = {"name": name, "bytes": found.st_size, "sha256": _hash_file(path), "mode": found.st_mode & 0o7777}
    return {**member, "user": user, "group": group}


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _make_header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.uid, header.gid = size, 0o600, os.geteuid(), os.getegid()
    return header


def _compute_digest(text: bytes) -> bytes:
    return sha256(text).hexdigest().encode() + b"\n"


def read_backup_file(
    path: Path, file: BinaryIO | None = None, store_target: BinaryIO | None = None
) -> tuple[BackupManifest, dict[str, bytes]]:
    """
    Read a backup from end to end: its manifest, and the content of all members but the store by their names.

    :param file: where it is open already.
    :param store_target: what the store is written to; if this fails, part of it may have been written.
    :raise InvalidArchiveError: it is torn, altered, of a newer version or something else.
    """
    with ExitStack() as stack:
        file = file or stack.enter_context(path.open("rb"))
        file.seek(0)
        try:
            tar = stack.enter_context(tarfile.open(fileobj=file, mode="r|", tarinfo=_RegularFileInfo))
            text = _open_next_member(tar, _MANIFEST).read(MAX_MEMBER_BYTES)
            if _open_next_member(tar, _DIGEST).read(MAX_MEMBER_BYTES) != _compute_digest(text):
                raise InvalidArchiveError("its digest does not match")
            manifest = _parse_manifest(text)
            contents: dict[str, bytes] = {}
            for member in manifest.members[:-1]:
                contents[member.name] = b"".join(_read_chunks(tar, member))
            for chunk in _read_chunks(tar, manifest.store):
                if store_target is not None:
                    store_target.write(chunk)
            if tar.next() is not None:
                raise InvalidArchiveError("it contains members that its manifest does not list")
        except InvalidArchiveError as error:
            raise InvalidArchiveError(f"cannot read {path}: {error}") from None
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError):
            raise InvalidArchiveError(f"cannot read {path}: truncated, modified, or not a mediatord backup") from None
    return manifest, contents


def _parse_manifest(text: bytes) -> BackupManifest:
    check_format(json.loads(text), BACKUP_FORMAT, "not a mediatord backup")
    try:
        return BackupManifest.model_validate_json(text)
    except ValidationError as error:
        raise InvalidArchiveError(f"its manifest is invalid: {error.errors(include_url=False)[0]['msg']}") from None


def _read_chunks(tar: tarfile.TarFile, member: BackupMember) -> Iterator[bytes]:
    """All of a member. :raise InvalidArchiveError: at its end: it is not what the manifest says."""
    content, digest, size = _open_next_member(tar, member.name, member.bytes), sha256(), 0
    while chunk := content.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if size != member.bytes or digest.hexdigest() != member.sha256:
        raise InvalidArchiveError(f"its member {member.name} does not match the manifest")


def _open_next_member(tar: tarfile.TarFile, name: str, size: int | None = None) -> BinaryIO:
    """:param size: None if it may have any up to that of a member that is read into memory."""
    found = tar.next()
    if found is None or found.name != name:
        raise InvalidArchiveError(f"its member {name} is missing")
    if found.size != size and (size is not None or found.size > MAX_MEMBER_BYTES):
        raise InvalidArchiveError(f"its member {name} does not match the manifest")
    content = tar.extractfile(found)
    assert content is not None
    return content  # type: ignore[return-value]  # typeshed knows that it is buffered only


def create_backup(
    path: Path,
    config_path: Path,
    config: Config,
    copy: Callable[[Path], RecordCounts],
    show_step: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> BackupManifest:
    """
    Write a backup, and verify it before it gets its name.

    :param config_path: of the configuration.
    :param copy: copies the store to a new file, and returns the number of records of each kind.
    :param show_step: shows a step that may last, by name.
    :raise BackupError: it could not be written; nothing is left of it.
    :raise OSError: likewise.
    """
    files = {CONFIG: config_path, **_list_file_paths(config)}
    if not files[LOG_KEY].exists():  # created when it is first needed
        del files[LOG_KEY]
    backend = config.storage.backend
    with create_file_atomically(path) as file, _create_working_directory(path) as directory:
        store = directory / (DATABASE if backend == "sqlite" else RECORDS)
        counts = copy(store)
        copies = {name: _copy_file(source, directory / name) for name, source in files.items()}
        with show_step("writing"):
            manifest = write_backup_file(file, backend, counts, {**copies, store.name: store})
            file.flush()
        with show_step("verifying"):
            written, _ = read_backup_file(path, file)
        if written != manifest:
            raise BackupError(f"{path} differs from what was written; check the disk")
        return manifest


def _list_file_paths(config: Config) -> dict[str, Path]:
    """Files of a backup beside configuration and store, by their names in it."""
    paths = {
        KEYS: config.identity.keys,
        LOG_KEY: config.log_key_path,
        CLUSTER_SECRET: config.cluster.secret_file,
        ADMIN_TOKEN: config.admin.token_file,
    }
    return {name: path for name, path in paths.items() if path is not None}


def _copy_file(source: Path, to: Path) -> Path:
    """Copy a file, which may change later, with mode, and with the owner if permitted; they are in the manifest."""
    shutil.copyfile(source, to)
    shutil.copymode(source, to)
    found = source.stat()
    with suppress(PermissionError):
        shutil.chown(to, found.st_uid, found.st_gid)
    return to


@contextmanager
def _create_working_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside a file; one of an earlier run that was killed is deleted first."""
    directory = path.with_name(f".{path.name}.parts")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def restore_backup(
    backup: Path, config_path: Path, progress: ProgressCallback = ignore_progress, *, stopped: bool = False
) -> RecordCounts:
    """
    Restore a backup; returns the counts of the records in the store, which are those of the backup.

    :param config_path: of the configuration.
    :param stopped: as for :func:`~mediatord.backup.records.open_record_target`.
    :raise InvalidArchiveError: the backup cannot be used; nothing was written.
    :raise BackupError: a file exists or cannot be written; nothing is left, except for records imported into MongoDB,
        where the same command continues.
    """
    manifest, contents = read_backup_file(backup)
    first, *others = manifest.members[:-1]
    with create_directory(config_path.parent, first.user, first.group), StagedFiles() as staged:
        # All others are secrets.
        staged.stage(config_path, contents[CONFIG], first.mode & 0o644 | 0o600, first.user, first.group)
        # Read beside its place, as paths are relative to that.
        config = load_config(staged.drafts.get(config_path, config_path))
        paths = _list_file_paths(config)
        for member in others:
            if member.name not in paths:
                raise BackupError(f"the backup contains {member.name}, but its configuration sets no path for it")
            require_directory(paths[member.name].parent)
            staged.stage(paths[member.name], contents[member.name], 0o600, member.user, member.group)
        if manifest.backend != config.storage.backend:
            raise BackupError(
                f"the backup was made with storage.backend {manifest.backend}, which differs from its configuration"
            )

        def commit() -> None:
            staged.commit(last=config_path)

        if manifest.backend == "sqlite":
            _restore_database(backup, manifest, config.storage.sqlite.path, commit)
        else:
            path = config_path.with_name("store.records")
            with (
                _extract_store(backup, path, manifest.store) as extracted,
                open_record_target(config.storage, stopped=stopped) as target,
            ):
                archive = verify_archive(extracted, accept=target.accept)
                _check_counts(backup, manifest, archive.counts)
                import_archive(archive, target, progress, commit)
    return manifest.counts


def _restore_database(backup: Path, manifest: BackupManifest, path: Path, commit: Callable[[], None]) -> None:
    require_directory(path.parent)
    with lock_store(path):
        store = manifest.store
        # The same, after an earlier attempt to restore it.
        if path.is_file() and path.stat().st_size == store.bytes and _hash_file(path) == store.sha256:
            commit()
            return
        require_empty_database(path)
        with _extract_store(backup, path, store) as draft:
            migrate_database(draft)
            _check_counts(backup, manifest, count_records(draft))
            install_database(draft, path)
        try:
            commit()
        except OSError:
            path.unlink()
            raise


def _check_counts(backup: Path, manifest: BackupManifest, counts: RecordCounts) -> None:
    if counts != manifest.counts:
        raise InvalidArchiveError(f"cannot use {backup}: its store does not match its manifest")


@contextmanager
def _extract_store(backup: Path, path: Path, store: BackupMember) -> Iterator[Path]:
    """Extract the store of a backup to a draft beside a path, which is deleted at the end unless it was renamed."""
    draft, file = create_draft(path)
    try:
        with report_full_disk(path), file:
            manifest, _ = read_backup_file(backup, store_target=file)
            if manifest.store != store:
                raise InvalidArchiveError(f"cannot use {backup}: it changed while it was read")
            chown_to_owner(file.fileno(), path, store.user, store.group)
        yield draft
    finally:
        draft.unlink(missing_ok=True)
