"""All that a store keeps, as an archive and back; the whole mediator as one file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import click

from mediatord.cli.options import answer, config_option, json_option
from mediatord.cli.progress import bar
from mediatord.config import Config, load
from mediatord.transfer.archive import check_archive, write_archive
from mediatord.transfer.errors import TransferError
from mediatord.transfer.importing import Comparison, CountsDiffer, import_archive
from mediatord.transfer.records import KINDS
from mediatord.transfer.stores import Source, Target

_FAILED = 1
_MEMORY = "storage.backend: what is in the memory of a daemon cannot be got from outside"

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
    with source_of(load(path), offline=offline, stopped=stopped) as store:
        counts = store.counts()
        with bar("exporting", sum(counts.values())) as tell:
            counts = write_archive(target, store.backend, store.records(), tell)
    answer(as_json, {"archive": str(target), "records": counts}, f"{counts_table(counts)}\n\nwrote {target}")


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
    with target_of(load(path), stopped=stopped) as store:
        with bar("reading") as tell:
            archive = check_archive(source, tell, store.accept)
        try:
            with bar("importing", archive.total) as tell:
                comparison = import_archive(archive, store, tell)
        except CountsDiffer as error:
            answer(as_json, _document(source, error.comparison), comparison_table(error.comparison))
            raise
    answer(as_json, _document(source, comparison), f"{comparison_table(comparison)}\n\nimported {source}")
    return 0


def source_of(config: Config, *, offline: bool = False, stopped: bool = False) -> AbstractContextManager[Source]:
    """
    The store of a configuration, to be read.

    :raise TransferError: it cannot be.
    """
    storage = config.storage
    if storage.backend == "sqlite":
        from mediatord.transfer.sqlite_source import reading_sqlite

        return reading_sqlite(storage.sqlite.path)
    if storage.backend == "mongodb":
        _need_driver()
        from mediatord.transfer.mongo_source import reading_mongodb

        return reading_mongodb(storage.mongodb.uri, offline=offline or stopped, stopped=stopped)
    raise TransferError(_MEMORY)


def target_of(config: Config, *, stopped: bool = False) -> AbstractContextManager[Target]:
    """
    The store of a configuration, to be imported into.

    :raise TransferError: it cannot be.
    """
    storage = config.storage
    if storage.backend == "sqlite":
        from mediatord.transfer.sqlite_target import writing_sqlite

        return writing_sqlite(storage.sqlite.path)
    if storage.backend == "mongodb":
        _need_driver()
        from mediatord.transfer.mongo_target import writing_mongodb

        return writing_mongodb(storage.mongodb.uri, stopped=stopped)
    raise TransferError(_MEMORY)


def comparison_table(comparison: Comparison) -> str:
    """What was in the archive and what is in the store, by kind."""
    rows = [
        (name, str(comparison.archive[kind]), str(comparison.store[kind]), _verdict(comparison, kind))
        for kind, name in KINDS.items()
    ]
    return _lines([("", "archive", "store", ""), *rows])


def _need_driver() -> None:
    if find_spec("pymongo") is None:
        raise TransferError('storage.backend mongodb needs pip install "mediatord[mongodb]"')


def _verdict(comparison: Comparison, kind: str) -> str:
    return "" if comparison.archive[kind] == comparison.store[kind] else "differs"


def counts_table(counts: Mapping[str, int]) -> str:
    """How many records there are of each kind."""
    return _lines([(name, str(counts[kind])) for kind, name in KINDS.items()])


def _lines(rows: list[tuple[str, ...]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _document(source: Path, comparison: Comparison) -> dict[str, object]:
    return {
        "archive": str(source),
        "records": comparison.archive,
        "store": comparison.store,
        "equal": comparison.is_equal,
    }
