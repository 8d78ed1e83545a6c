"""Bringing back a backup: into places where nothing is, or the same; all of it or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mediatord.transfer.archive import Tell, check_archive, silent
from mediatord.transfer.backing import counted
from mediatord.transfer.bundle import CONFIG, FILES, Manifest, Member, check_bundle, chunks, reading
from mediatord.transfer.draft import naming, sync_directory
from mediatord.transfer.errors import ArchiveRefused, TransferError
from mediatord.transfer.importing import Comparison, import_archive
from mediatord.transfer.placing import Placing, draft_beside, give
from mediatord.transfer.sqlite_target import bring_up_to_date, place_database, refuse_kept, sole_use
from mediatord.transfer.stores import Target


@dataclass(frozen=True, slots=True)
class Places:
    """
    Where a configuration wants things to be.

    :param files: by their names in a backup, but for the configuration itself.
    :param database: of a SQLite store.
    :param target: opens a MongoDB store.
    """

    files: Mapping[str, Path]
    database: Path | None
    target: Callable[[], AbstractContextManager[Target]] | None


# Reads a configuration that is here for now and will be there; its paths are relative to the same directory.
ReadPlaces = Callable[[Path], Places]


def restore(backup: Path, config: Path, read: ReadPlaces, tell: Tell = silent) -> Comparison:
    """
    Bring back a backup; the counts of the store, compared.

    :param config: where the configuration is to be.
    :raise ArchiveRefused: the backup cannot be used; nothing was written.
    :raise TransferError: something is in the way, or could not be written; nothing is left of it, but for what was
        imported into MongoDB, with which the same command goes on.
    """
    manifest = check_bundle(backup)
    contents = _small_contents(backup)
    placing = Placing()
    with _directory(config.parent, manifest.files[0]), contextlib.ExitStack() as stack:
        stack.callback(placing.clean)
        placing.stage(config, contents[CONFIG], manifest.files[0])
        places = read(placing.drafts.get(config, config))
        for member in manifest.files[1:]:
            placing.stage(_place(places, member), contents[member.name], member)
        placing.let_be_last(config)
        if manifest.backend == "sqlite" and places.database is not None:
            return _restore_database(backup, manifest, places.database, placing)
        if manifest.backend == "mongodb" and places.target is not None:
            return _restore_records(backup, manifest, places.target, config, placing, tell)
        raise TransferError(f"the backup is of storage.backend {manifest.backend}, the configuration wants another")


def _restore_database(backup: Path, manifest: Manifest, path: Path, placing: Placing) -> Comparison:
    if not path.parent.is_dir():
        raise TransferError(f"{path.parent} is not there: make it first")
    with sole_use(path):
        if _is_same(path, manifest.store):
            placing.place()
            return Comparison(dict(manifest.records), dict(manifest.records))
        refuse_kept(path)
        with _extracted(backup, path, manifest.store) as draft:
            bring_up_to_date(draft)
            comparison = Comparison(dict(manifest.records), counted(draft))
            if not comparison.is_equal:
                raise _differs(backup)
            place_database(draft, path)
        try:
            placing.place()
        except OSError:
            path.unlink()
            raise
        return comparison


def _restore_records(
    backup: Path,
    manifest: Manifest,
    target: Callable[[], AbstractContextManager[Target]],
    config: Path,
    placing: Placing,
    tell: Tell,
) -> Comparison:
    with _extracted(backup, config.with_name("store.records"), manifest.store) as extracted, target() as store:
        archive = check_archive(extracted, accept=store.accept)
        if archive.counts != manifest.records:
            raise _differs(backup)
        return import_archive(archive, store, tell, placing.place)


def _differs(backup: Path) -> ArchiveRefused:
    return ArchiveRefused(f"{backup} cannot be used: its store is not what its manifest says")


def _small_contents(backup: Path) -> dict[str, bytes]:
    with reading(backup) as (_, contents):
        return {
            member.name: b"".join(chunks(member, content)) for member, content in contents if member.name in FILES
        }


def _place(places: Places, member: Member) -> Path:
    place = places.files.get(member.name)
    if place is None:
        raise TransferError(f"the backup has a file {member.name}, for which the configuration names no place")
    if not place.parent.is_dir():
        raise TransferError(f"{place.parent} is not there: make it first")
    return place


def _is_same(path: Path, member: Member) -> bool:
    """Whether a database is the very file of the backup, which an earlier attempt may have restored."""
    if not path.is_file() or path.stat().st_size != member.bytes:
        return False
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == member.sha256


@contextmanager
def _extracted(backup: Path, path: Path, wanted: Member) -> Iterator[Path]:
    """The store of a backup as a file beside a place, for as long as it is needed, or until it is renamed."""
    draft = draft_beside(path)
    draft.unlink(missing_ok=True)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with naming(path), os.fdopen(descriptor, "wb") as file, reading(backup) as (_, contents):
            for member, content in contents:
                for chunk in chunks(member, content):
                    if member == wanted:
                        file.write(chunk)
            if file.tell() != wanted.bytes:
                raise ArchiveRefused("it has changed while it was read")
            give(descriptor, path, wanted)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _directory(path: Path, member: Member) -> Iterator[None]:
    """
    A directory that is made if it is not there, and goes again if what was to be in it failed.

    :param member: what will be in it; whoever may read that has to get there.
    """
    if path.is_dir():
        yield
        return
    path.mkdir(mode=0o750, parents=True)
    try:
        give(path, path, member)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise
    sync_directory(path.parent)
