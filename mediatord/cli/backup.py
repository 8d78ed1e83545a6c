"""`mediatord export`, `import`, `backup` and `restore`."""

from __future__ import annotations

from pathlib import Path

import click

from mediatord.backup.archive import CountMismatchError, import_archive, verify_archive, write_archive
from mediatord.backup.backup_file import CONFIG, create_backup, restore_backup
from mediatord.backup.records import RECORD_KINDS, RecordCounts, open_record_source, open_record_target
from mediatord.backup.sqlite_records import copy_sqlite_store
from mediatord.cli.console import (
    align_columns,
    config_option,
    find_given_config,
    json_option,
    print_result,
    target_config_option,
)
from mediatord.cli.keys import read_identity
from mediatord.config.file import load_config
from mediatord.runtime.progress_bar import progress_bar

to_option = click.option(
    "--to", "target", required=True, metavar="FILE", type=click.Path(path_type=Path), help="File to write."
)
from_option = click.option(
    "--from",
    "source",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File to read.",
)
offline_option = click.option(
    "--offline",
    is_flag=True,
    help="MongoDB: read without a snapshot and without a time limit; stop all nodes first.",
)
stopped_option = click.option(
    "--stopped", is_flag=True, help="MongoDB: ignore the lease of a killed node; stop all nodes first."
)


@click.command("export")
@config_option
@to_option
@offline_option
@stopped_option
@json_option
def export_command(path: Path, target: Path, offline: bool, stopped: bool, as_json: bool) -> None:
    """
    Export the store to an archive that any backend can import. The daemon can keep running.

    MongoDB keeps a snapshot for five minutes (minSnapshotHistoryWindowInSeconds). If the export takes longer, stop
    all nodes and use --offline.
    """
    with open_record_source(load_config(path).storage, offline=offline, stopped=stopped) as store:
        with progress_bar("counting"):
            counts = store.counts()
        with progress_bar("exporting", sum(counts.values())) as progress:
            counts = write_archive(target, store.backend, store.records(), progress)
    print_result(as_json, {"archive": str(target), "records": counts}, f"{format_counts(counts)}\n\nwrote {target}")


@click.command("import")
@config_option
@from_option
@stopped_option
@json_option
def import_command(path: Path, source: Path, stopped: bool, as_json: bool) -> None:
    """
    Import an archive into an empty store. Stop all daemons first.

    Compares the counts afterwards and exits with 1 if they differ. Run the same command again to resume an
    interrupted import.
    """
    with open_record_target(load_config(path).storage, stopped=stopped) as store:
        with progress_bar("reading") as progress:
            archive = verify_archive(source, progress, store.accept)
        try:
            with progress_bar("importing", archive.total) as progress:
                counts = import_archive(archive, store, progress)
        except CountMismatchError as error:
            _print_comparison(source, error.archive, error.store, as_json)
            raise
    _print_comparison(source, counts, counts, as_json)


def measure_file(path: Path) -> int:
    """Size in bytes; 0 of a file that does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _print_comparison(source: Path, archive: RecordCounts, store: RecordCounts, as_json: bool) -> None:
    value = {"archive": str(source), "records": archive, "store": store, "equal": archive == store}
    after = f"\n\nimported {source}" if archive == store else ""
    print_result(as_json, value, f"{format_comparison(archive, store)}{after}")


def format_comparison(archive: RecordCounts, store: RecordCounts) -> str:
    """A table of the counts in the archive and in the store, by kind."""
    rows = [
        (name, f"{archive[kind]}", f"{store[kind]}", "" if archive[kind] == store[kind] else "differs")
        for kind, name in RECORD_KINDS.items()
    ]
    return align_columns([("", "archive", "store", ""), *rows], (False, True, True, True))


def format_counts(counts: RecordCounts) -> str:
    """A table of the number of records of each kind."""
    return align_columns([(name, str(counts[kind])) for kind, name in RECORD_KINDS.items()], (False, True))


@click.command("backup")
@config_option
@to_option
@offline_option
@stopped_option
@json_option
def backup_command(path: Path, target: Path, offline: bool, stopped: bool, as_json: bool) -> None:
    """
    Back up configuration, keys and store to one file; the daemon can keep running.

    Protect the file: it contains the secrets of the mediator.
    """
    config = load_config(path)
    read_identity(config)

    def copy(to: Path) -> RecordCounts:
        if config.storage.backend == "sqlite":
            database = config.storage.sqlite.path
            with progress_bar("copying", measure_file(database), measure=lambda: measure_file(to)):
                return copy_sqlite_store(database, to)
        with open_record_source(config.storage, offline=offline, stopped=stopped) as store:
            with progress_bar("counting"):
                total = sum(store.counts().values())
            with progress_bar("copying", total) as progress:
                return write_archive(to, store.backend, store.records(), progress)

    manifest = create_backup(target, path, config, copy, progress_bar)
    members = [member.name for member in manifest.members]
    text = f"{format_counts(manifest.records)}\n\nwrote {target}: {', '.join(members)}"
    print_result(as_json, {"backup": str(target), "members": members, "records": manifest.records}, text)


@click.command("restore")
@from_option
@target_config_option
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write mediator.yaml to; created if missing.",
)
@stopped_option
@json_option
def restore_command(source: Path, path: Path | None, directory: Path | None, stopped: bool, as_json: bool) -> None:
    """
    Restore a backup without overwriting anything. Stop all daemons first.

    Requires either --config or --dir. Writes files to the paths in the restored configuration. Fails if the store is
    not empty, or if a file exists and differs. Messages acknowledged since the backup are delivered again.
    """
    # MEDIATORD_CONFIG does not count beside --dir.
    chosen = path if directory is None else find_given_config(click.get_current_context())
    if (chosen is None) == (directory is None):
        raise click.UsageError("expected either --config PATH or --dir DIR")
    config = (chosen or Path(directory or ".") / CONFIG).absolute()

    with progress_bar("restoring") as progress:
        counts = restore_backup(source, config, progress, stopped=stopped)
    read_identity(load_config(config))
    text = f"{format_comparison(counts, counts)}\n\nrestored {source}; next: mediatord run --config {config}"
    print_result(as_json, {"config": str(config), "records": counts, "store": counts}, text)
