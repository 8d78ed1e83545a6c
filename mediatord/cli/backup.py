"""
How far something is: a bar on a terminal, nothing elsewhere.

All that a store keeps, as an archive and back; the whole mediator as one file, and back.

The whole mediator as one file, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mediatord.app.core_services import get_log_key_path
from mediatord.backup import backup_file
from mediatord.backup.archive import (
    CountMismatchError,
    ImportComparison,
    import_archive,
    verify_archive,
    write_archive,
)
from mediatord.backup.backup_file import (
    RestoreTargets,
    copy_sqlite_store,
    copy_store_records,
    create_backup,
    restore_backup,
)
from mediatord.backup.records import RECORD_KINDS, BackupError, RecordCounts, RecordSource, RecordTarget
from mediatord.cli.console import config_option, find_given_config, json_option, print_result, target_config_option
from mediatord.cli.keys import read_identity
from mediatord.config.file import load_config
from mediatord.config.settings import Config

# Calls between two looks at the bar: a million records are told of one by one.
_UPDATE_INTERVAL = 256


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """
    On standard error, as standard output is for what was asked for. What is given is to be told how much is done.

    :param total: None when that is not known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def tell(done: int) -> None:
            if done % _UPDATE_INTERVAL == 0 or done == total:
                progress.update(task, completed=done)

        yield tell


_EXIT_FAILED = 1
_MEMORY_REFUSAL = "storage.backend: what is in the memory of a daemon cannot be got from outside"

to_option = click.option(
    "--to", "target", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The archive to make."
)
from_option = click.option(
    "--from",
    "source",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The archive.",
)
offline_option = click.option(
    "--offline", is_flag=True, help="MongoDB only: no daemon runs, so take as long as it takes."
)
stopped_option = click.option(
    "--stopped", is_flag=True, help="MongoDB only: no daemon runs, although one seems to have been killed."
)


@click.command("export")
@config_option
@to_option
@offline_option
@stopped_option
@json_option
def export_command(path: Path, target: Path, offline: bool, stopped: bool, as_json: bool) -> None:
    """
    Write all that the store keeps to an archive that any backend can import. The daemon may run.

    MongoDB keeps the state that is read for five minutes (minSnapshotHistoryWindowInSeconds); if the export takes
    longer than that, stop all nodes and use --offline.
    """
    with open_record_source(load_config(path), offline=offline, stopped=stopped) as store:
        counts = store.counts()
        with progress_bar("exporting", sum(counts.values())) as progress:
            counts = write_archive(target, store.backend, store.records(), progress)
    print_result(as_json, {"archive": str(target), "records": counts}, f"{format_counts(counts)}\n\nwrote {target}")


@click.command("import")
@config_option
@from_option
@stopped_option
@json_option
def import_command(path: Path, source: Path, stopped: bool, as_json: bool) -> int:
    """
    Bring an archive into an empty store, and compare the counts. No daemon may run.

    If it is interrupted, the same command goes on where it has stopped. Exits with 1 if the counts differ.
    """
    with open_record_target(load_config(path), stopped=stopped) as store:
        with progress_bar("reading") as progress:
            archive = verify_archive(source, progress, store.accept)
        try:
            with progress_bar("importing", archive.total) as progress:
                comparison = import_archive(archive, store, progress)
        except CountMismatchError as error:
            print_result(
                as_json, _make_comparison_document(source, error.comparison), format_comparison(error.comparison)
            )
            raise
    print_result(
        as_json,
        _make_comparison_document(source, comparison),
        f"{format_comparison(comparison)}\n\nimported {source}",
    )
    return 0


def open_record_source(
    config: Config, *, offline: bool = False, stopped: bool = False
) -> AbstractContextManager[RecordSource]:
    """
    The store of a configuration, to be read.

    :raise TransferError: it cannot be.
    """
    storage = config.storage
    if storage.backend == "sqlite":
        from mediatord.backup.sqlite_export import open_sqlite_source

        return open_sqlite_source(storage.sqlite.path)
    if storage.backend == "mongodb":
        _require_pymongo()
        from mediatord.backup.mongo_export import open_mongodb_source

        return open_mongodb_source(storage.mongodb.uri, offline=offline or stopped, stopped=stopped)
    raise BackupError(_MEMORY_REFUSAL)


def open_record_target(config: Config, *, stopped: bool = False) -> AbstractContextManager[RecordTarget]:
    """
    The store of a configuration, to be imported into.

    :raise TransferError: it cannot be.
    """
    storage = config.storage
    if storage.backend == "sqlite":
        from mediatord.backup.sqlite_import import open_sqlite_target

        return open_sqlite_target(storage.sqlite.path)
    if storage.backend == "mongodb":
        _require_pymongo()
        from mediatord.backup.mongo_import import open_mongodb_target

        return open_mongodb_target(storage.mongodb.uri, stopped=stopped)
    raise BackupError(_MEMORY_REFUSAL)


def format_comparison(comparison: ImportComparison) -> str:
    """What was in the archive and what is in the store, by kind."""
    rows = [
        (name, str(comparison.archive[kind]), str(comparison.store[kind]), _compare_counts(comparison, kind))
        for kind, name in RECORD_KINDS.items()
    ]
    return _format_columns([("", "archive", "store", ""), *rows])


def _require_pymongo() -> None:
    if find_spec("pymongo") is None:
        raise BackupError('storage.backend mongodb needs pip install "mediatord[mongodb]"')


def _compare_counts(comparison: ImportComparison, kind: str) -> str:
    return "" if comparison.archive[kind] == comparison.store[kind] else "differs"


def format_counts(counts: Mapping[str, int]) -> str:
    """How many records there are of each kind."""
    return _format_columns([(name, str(counts[kind])) for kind, name in RECORD_KINDS.items()])


def _format_columns(rows: list[tuple[str, ...]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _make_comparison_document(source: Path, comparison: ImportComparison) -> dict[str, object]:
    return {
        "archive": str(source),
        "records": comparison.archive,
        "store": comparison.store,
        "equal": comparison.is_equal,
    }


@click.command("backup")
@config_option
@to_option
@offline_option
@stopped_option
@json_option
def backup_command(path: Path, target: Path, offline: bool, stopped: bool, as_json: bool) -> None:
    """
    Write configuration, keys and the store to one file, consistently, while the daemon runs.

    It has all secrets of the mediator in the clear: keep it where the keys may be kept.
    """
    config = load_config(path)
    read_identity(config)

    def copy(to: Path) -> RecordCounts:
        if config.storage.backend == "sqlite":
            return copy_sqlite_store(config.storage.sqlite.path, to)
        with open_record_source(config, offline=offline, stopped=stopped) as store:
            with progress_bar("reading", sum(store.counts().values())) as progress:
                return copy_store_records(store, to, progress)

    files = {backup_file.CONFIG: path, **_list_member_paths(config)}
    if not files[backup_file.LOG_KEY].exists():  # it is made when it is first needed
        del files[backup_file.LOG_KEY]
    manifest = create_backup(target, files, config.storage.backend, copy)
    members = [member.name for member in manifest.members]
    told = f"{format_counts(manifest.records)}\n\nwrote {target}: {', '.join(members)}"
    print_result(as_json, {"backup": str(target), "members": members, "records": manifest.records}, told)


@click.command("restore")
@from_option
@target_config_option
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory to write it into; made if it is not there.",
)
@stopped_option
@json_option
def restore_command(source: Path, path: Path | None, directory: Path | None, stopped: bool, as_json: bool) -> None:
    """
    Bring back a backup where nothing is yet. No daemon may run.

    The other files go where the configuration in the backup wants them. What is there already is not touched: a store
    with anything in it, or another file than that of the backup, is in the way. Messages that were acknowledged since
    the backup are delivered again.
    """
    # A variable is for all commands, and an option for this one.
    chosen = path if directory is None else find_given_config(click.get_current_context())
    if (chosen is None) == (directory is None):
        raise click.UsageError("expected either --config PATH or --dir DIR")
    config = (chosen or Path(directory or ".") / backup_file.CONFIG).absolute()

    def read(file: Path) -> RestoreTargets:
        return _make_restore_targets(load_config(file), stopped=stopped)

    with progress_bar("restoring") as progress:
        comparison = restore_backup(source, config, read, progress)
    read_identity(load_config(config))
    told = f"{format_comparison(comparison)}\n\nrestored {source}; next: mediatord run --config {config}"
    print_result(as_json, {"config": str(config), "records": comparison.archive, "store": comparison.store}, told)


def _list_member_paths(config: Config) -> dict[str, Path]:
    """What is to be kept beside configuration and store, by its name in a backup."""
    places = {
        backup_file.KEYS: config.identity.keys,
        backup_file.LOG_KEY: get_log_key_path(config),
        backup_file.CLUSTER_SECRET: config.cluster.secret_file,
        backup_file.ADMIN_TOKEN: config.admin.token_file,
    }
    return {name: place for name, place in places.items() if place is not None}


def _make_restore_targets(config: Config, *, stopped: bool) -> RestoreTargets:
    backend = config.storage.backend
    return RestoreTargets(
        files=_list_member_paths(config),
        database=config.storage.sqlite.path if backend == "sqlite" else None,
        target=(lambda: open_record_target(config, stopped=stopped)) if backend == "mongodb" else None,
    )
