"""The whole mediator as one file, and back."""

from __future__ import annotations

from pathlib import Path

import click

from mediatord.cli.mediator import identity_of
from mediatord.cli.options import answer, config_option, given_config, json_option, target_config_option
from mediatord.cli.progress import bar
from mediatord.cli.transfer import (
    comparison_table,
    counts_table,
    from_option,
    offline_option,
    source_of,
    stopped_option,
    target_of,
    to_option,
)
from mediatord.config import Config, load
from mediatord.transfer import bundle
from mediatord.transfer.backing import backup, copy_records, copy_sqlite
from mediatord.transfer.records import Counts
from mediatord.transfer.restoring import Places, restore
from mediatord.wiring.base import log_key


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
    config = load(path)
    identity_of(config)

    def copy(to: Path) -> Counts:
        if config.storage.backend == "sqlite":
            return copy_sqlite(config.storage.sqlite.path, to)
        with source_of(config, offline=offline, stopped=stopped) as store:
            with bar("reading", sum(store.counts().values())) as tell:
                return copy_records(store, to, tell)

    files = {bundle.CONFIG: path, **_files(config)}
    if not files[bundle.LOG_KEY].exists():  # it is made when it is first needed
        del files[bundle.LOG_KEY]
    manifest = backup(target, files, config.storage.backend, copy)
    members = [member.name for member in manifest.members]
    told = f"{counts_table(manifest.records)}\n\nwrote {target}: {', '.join(members)}"
    answer(as_json, {"backup": str(target), "members": members, "records": manifest.records}, told)


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
    chosen = path if directory is None else given_config(click.get_current_context())
    if (chosen is None) == (directory is None):
        raise click.UsageError("expected either --config PATH or --dir DIR")
    config = (chosen or Path(directory or ".") / bundle.CONFIG).absolute()

    def read(file: Path) -> Places:
        return _places(load(file), stopped=stopped)

    with bar("restoring") as tell:
        comparison = restore(source, config, read, tell)
    identity_of(load(config))
    told = f"{comparison_table(comparison)}\n\nrestored {source}; next: mediatord run --config {config}"
    answer(as_json, {"config": str(config), "records": comparison.archive, "store": comparison.store}, told)


def _files(config: Config) -> dict[str, Path]:
    """What is to be kept beside configuration and store, by its name in a backup."""
    places = {
        bundle.KEYS: config.identity.keys,
        bundle.LOG_KEY: log_key(config),
        bundle.CLUSTER_SECRET: config.cluster.secret_file,
        bundle.ADMIN_TOKEN: config.admin.token_file,
    }
    return {name: place for name, place in places.items() if place is not None}


def _places(config: Config, *, stopped: bool) -> Places:
    backend = config.storage.backend
    return Places(
        files=_files(config),
        database=config.storage.sqlite.path if backend == "sqlite" else None,
        target=(lambda: target_of(config, stopped=stopped)) if backend == "mongodb" else None,
    )
