"""The tables in the results directory: published ones, and those that a run stages until it publishes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from analytics.database import Database, get_duckdb_type
from analytics.files import FileSystem, get_local_path
from analytics.job import Span
from analytics.schema import TABLES, Column, Table, make_events_table
from analytics.sql_functions import quote_day, quote_text
from analytics.writing.runs import STAGING_DIRECTORY, DirectoryMove, commit_publication, has_journal


class TableMismatchError(TypeError):
    """A job returned columns or days other than declared: a programming error."""


def make_table_query(database: Database, table: Table, content: str | Iterable[Mapping[str, Any]], job: str) -> str:
    """
    Query for the rows that a job made of a table: declared columns and types, in the order of its key.

    :param content: a query, or rows.
    :raise TableMismatchError: columns or types differ from the declaration.
    """
    names = [column.name for column in table.columns]
    if isinstance(content, str):
        query, found = content, database.describe(content)
    else:
        rows = [dict(row) for row in content]
        found = dict.fromkeys(rows[0] if rows else names, "")
        query = f"SELECT * FROM {_ROWS_TABLE}"
    for what, wrong in (("no", set(names) - set(found)), ("undeclared", set(found) - set(names))):
        if wrong:
            raise TableMismatchError(f"{job}: {table.name}: {what} column {', '.join(sorted(wrong))}")
    if not isinstance(content, str):
        declared = ", ".join(f'"{column.name}" {get_duckdb_type(column)}' for column in table.columns)
        database.insert(_ROWS_TABLE, declared, ([row[name] for name in names] for row in rows))
    for column in table.columns:
        kind = found[column.name].partition("(")[0]
        # Rows have no types; they are checked when they are inserted.
        if kind and kind not in {*_COMPATIBLE_TYPES[column.type], _NULL_TYPE}:
            raise TableMismatchError(
                f"{job}: {table.name}: column {column.name} is {kind}, declared as {column.type}"
            )
    columns = ", ".join(
        f'CAST("{column.name}" AS {get_duckdb_type(column)}) AS "{column.name}"' for column in table.columns
    )
    order = ", ".join(f'"{name}"' for name in table.key or names)
    return f"SELECT {columns} FROM ({query}) ORDER BY {order}"


_NULL_TYPE = '"NULL"'
_ROWS_TABLE = "rows_of_job"
_STAGED_TABLE = "staged_rows"
_COUNT_BY_DAY = f"SELECT dt, count(*) AS n FROM {_STAGED_TABLE} GROUP BY dt"
_INTEGERS = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"}
_COMPATIBLE_TYPES = {
    "bigint": _INTEGERS,
    "int": _INTEGERS - {"HUGEINT"},
    "double": {*_INTEGERS, "FLOAT", "DOUBLE", "DECIMAL"},
    "string": {"VARCHAR"},
    "boolean": {"BOOLEAN"},
    "date": {"DATE"},
    "timestamp": {"TIMESTAMP"},
}

TABLES_DIRECTORY = "tables"
# Has a row for every computed day.
COMPUTED_DAYS_TABLE = "ledger_daily"
# Written by ingest, and replaced file by file: a file of `events` or `quarantine` has the rows of one segment.
BATCH_TABLES = ("events", "quarantine", "inputs")
ALL_TABLES: dict[str, Table] = {**TABLES, "events": make_events_table()}


_PARTITIONS = ("dt", "batch")
# Of files with rows of several segments.
_SHARED_FILE_PREFIX = "part-"


class Warehouse:
    """
    Reads published tables overlaid by what this run has staged; stages; publishes.

    A table that was never written, or not for these days, is empty and has its declared schema.

    :param out: results directory with `tables/<name>/dt=<day>/`.
    :param run_id: names the staging directory; needed only to stage and publish.
    :param local: local directory for copies, if the results are elsewhere.
    """

    def __init__(self, database: Database, files: FileSystem, out: str, run_id: str = "", local: str = "") -> None:
        self._database = database
        self._files = files
        self._out = out
        self._run_id = run_id
        self._local = local
        self._staged: dict[str, Span] = {}
        self._replaced: set[str] = set()
        self._copies: dict[str, Path] = {}
        self._listings: dict[str, Sequence[str]] = {}
        self._published: dict[str, dict[str, list[str]]] = {}

    @property
    def staging(self) -> str:
        """Directory for `<table>/dt=<day>/` of ingest and other files to publish."""
        return f"{self._out}/{self._get_staged_path()}"

    def days(self, table: str) -> list[date]:
        """Published days of a table, in order."""
        return _parse_partition_dates(self._list_directory(_get_published_path(table)), "dt")

    def days_by_batch(self, batches: Iterable[date]) -> dict[date, list[date]]:
        """Published days with events, by batch. Events are at most a day from their batch."""
        base = _get_published_path("events")
        found: dict[date, list[date]] = {batch: [] for batch in batches}
        near = {batch + timedelta(n) for batch in found for n in (-1, 0, 1)}
        for day in near.intersection(_parse_partition_dates(self._list_directory(base), "dt")):
            for batch in found.keys() & _parse_partition_dates(self._list_directory(f"{base}/dt={day}"), "batch"):
                found[batch].append(day)
        return found

    def has_events(self, day: date) -> bool:
        """Whether there are events of a day, staged or kept."""
        return bool(self.list_files("events", Span(day, day)))

    def list_files(self, name: str, span: Span) -> list[str]:
        """Parquet files of a table, in order; what is staged replaces what is published."""
        if name in BATCH_TABLES:
            files = self._list_batch_files(name)
            return [f"{base}/{path}" for path, base in files.items() if parse_day(path) in span]
        kept = [
            path
            for partition in self._list_kept_partitions(name, span)
            for path in self._list_published_files(name, partition)
        ]
        staged = [
            file.path
            for partition in self._list_staged_partitions(name, span)
            for file in self._files.list(f"{self._out}/{partition}")
        ]
        return sorted(path for path in (*kept, *staged) if path.endswith(".parquet"))

    def open_table(self, name: str, span: Span) -> None:
        """Let the database read the rows of a span under the name of the table."""
        files = [self._localize(url) for url in self.list_files(name, span)]
        self._database.define_view(name, self._database.make_parquet_query(ALL_TABLES[name], files))

    def rows(self, name: str, span: Span, columns: str = "*", where: str = "true") -> list[dict[str, Any]]:
        """Rows of a span in the order of the key."""
        table = ALL_TABLES[name]
        files = [self._localize(url) for url in self.list_files(name, span)]
        order = ", ".join(f'"{column}"' for column in table.key) or "ALL"
        return self._database.rows(
            f"SELECT {columns} FROM (SELECT * FROM ({self._database.make_parquet_query(table, files)})"
            f" WHERE {where} ORDER BY {order})"
        )

    def stage(self, name: str, content: str | Iterable[Mapping[str, Any]], span: Span, job: str = "") -> int:
        """
        Write the rows of a table for all days of a span, replacing what is published of these days.

        :param content: a query of the database, or rows.
        :return: number of rows.
        :raise TableMismatchError: columns, types or days differ from the declaration.
        """
        table = TABLES[name]
        self._database.define(_STAGED_TABLE, make_table_query(self._database, table, content, job))
        counts = {row["dt"]: row["n"] for row in self._database.rows(_COUNT_BY_DAY)}
        if outside := [str(day) for day in sorted(counts) if day not in span]:
            days = f"{span.first} to {span.last}"
            raise TableMismatchError(f"{job}: {name}: column dt has {', '.join(outside)}, not of {days}")
        for day in sorted(counts):
            self._write_day(table, day)
        self._staged[name] = span
        return sum(counts.values())

    def _write_day(self, table: Table, day: date) -> None:
        """Write the rows of a day, in order, as one file: equal rows make equal files."""
        url = f"{self._out}/{self._get_staged_path(table.name)}/dt={day}/part-0.parquet"
        path = get_local_path(url) or Path(self._local, table.name, f"dt={day}", "part-0.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        # DuckDB declares a column as never null if it is so on all days of a run: a file must not depend on others.
        columns = ", ".join(
            f'CASE WHEN dt = {quote_day(day)} THEN {_convert_for_parquet(column)} END AS "{column.name}"'
            for column in table.columns
            if column.name != "dt"
        )
        self._database.execute(
            f"COPY (SELECT {columns} FROM {_STAGED_TABLE} WHERE dt = {quote_day(day)})"
            f" TO {quote_text(str(path))} (FORMAT parquet, COMPRESSION zstd)"
        )
        self._upload(path, url)

    def _localize(self, url: str) -> str:
        """Local path of a file; a remote one is copied once."""
        here = get_local_path(url) or self._copies.get(url)
        if here is None:
            here = self._copies[url] = Path(self._local, "copies", url.partition(f"{self._out}/")[2] or url)
            here.parent.mkdir(parents=True, exist_ok=True)
            self._files.download(url, here)
        return str(here)

    def _upload(self, path: Path, url: str) -> None:
        """Write a file from a local one, which is read instead of it from now on; neither is done if it is local."""
        if get_local_path(url) is None:
            self._files.upload(path, url)
            self._copies[url] = path

    def find_event_files(self, stems: Collection[str], batches: Iterable[date]) -> dict[str, list[str]]:
        """Event files of segments of these batches, staged or kept: `events/dt=.../batch=.../<stem>.parquet`."""
        inner = {f"batch={batch}" for batch in batches}
        found: dict[str, list[str]] = {stem: [] for stem in stems}
        for path in self._list_batch_files("events"):
            stem = parse_stem(path)
            if stem in found and path.split("/")[2] in inner:
                found[stem].append(path)
        return found

    def localize_files(self, paths: Iterable[str]) -> dict[str, str]:
        """Files of segments, as in :meth:`find_event_files`, by their local paths."""
        bases = self._list_batch_files("events")
        return {self._localize(f"{bases[path]}/{path}"): path for path in paths}

    def replace_segments(self, stems: Collection[str]) -> None:
        """Note that ingest has staged these segments completely; they replace what is published of them."""
        for name in ("events", "quarantine"):
            self._replaced |= {path for path in self._list_published(name) if parse_stem(path) in stems}

    def discard_segments(self, stems: Collection[str]) -> None:
        """Delete what ingest has staged of these segments."""
        for name in ("events", "quarantine"):
            for path in self._list_staged(name):
                if parse_stem(path) in stems:
                    self._files.delete(f"{self.staging}/{path}")

    def split_shared_files(self, batches: Collection[date], read: Collection[str]) -> set[date]:
        """
        Replace files with rows of several segments, which earlier versions wrote, by one for each segment.

        :param read: segments that ingest has staged; their earlier rows are dropped.
        :return: days of these rows.
        """
        days = set()
        for name in ("events", "quarantine"):
            shared: dict[str, list[str]] = {}
            for path in self._list_published(name):
                folder, _, file = path.rpartition("/")
                if file.startswith(_SHARED_FILE_PREFIX) and _parse_batch(path) in batches:
                    shared.setdefault(folder, []).append(path)
            for folder, paths in shared.items():
                self._replaced.update(paths)
                stems = self._define_rows_of_files(name, paths)
                if name == "events" and not stems.isdisjoint(read):
                    days.add(parse_day(paths[0]))
                for stem in sorted(stems.difference(read)):
                    self._write_staged(f"{folder}/{stem}.parquet", f"stem = {quote_text(stem)}", name)
        return days

    def _define_rows_of_files(self, name: str, paths: Iterable[str]) -> set[str]:
        """Read published files into a table; return the stems in it."""
        files = [self._localize(f"{self._out}/{TABLES_DIRECTORY}/{path}") for path in paths]
        self._database.define(_STAGED_TABLE, self._database.make_parquet_query(ALL_TABLES[name], files))
        return {row["stem"] for row in self._database.rows(f"SELECT DISTINCT stem FROM {_STAGED_TABLE}")}

    def _write_staged(self, path: str, condition: str, name: str) -> None:
        """Write rows of the staged table to a staged file, in order."""
        url = f"{self.staging}/{path}"
        here = get_local_path(url) or Path(self._local, "rewritten", path)
        here.parent.mkdir(parents=True, exist_ok=True)
        table = ALL_TABLES[name]
        columns = ", ".join(
            f'{_convert_for_parquet(column)} AS "{column.name}"'
            for column in table.columns
            if column.name not in _PARTITIONS
        )
        order = "node, boot, seq" if name == "events" else "ALL"
        self._database.execute(
            f"COPY (SELECT {columns} FROM {_STAGED_TABLE} WHERE {condition} ORDER BY {order})"
            f" TO {quote_text(str(here))} (FORMAT parquet, COMPRESSION zstd)"
        )
        if get_local_path(url) is None:
            self._files.upload(here, url)

    def rewrite_file(self, path: str, rewrite: Callable[[str, str], int]) -> None:
        """
        Stage another version of a file of segments.

        :param path: as in :meth:`find_event_files`.
        :param rewrite: receives local paths of the file and of its replacement; returns the number of rows. A file
            without rows is deleted.
        """
        source = self._localize(f"{self._list_batch_files(path.partition('/')[0])[path]}/{path}")
        target = f"{self.staging}/{path}"
        here = get_local_path(target) or Path(self._local, "rewritten", path)
        here.parent.mkdir(parents=True, exist_ok=True)
        self._replaced.add(path)
        if not rewrite(source, str(here)):
            self._files.delete(target)
        else:
            self._upload(here, target)

    def stage_inputs(self, rows: Iterable[Mapping[str, Any]], batches: Iterable[date]) -> None:
        """Replace the rows of `inputs` of these batches."""
        table = TABLES["inputs"]
        self._database.define(_STAGED_TABLE, make_table_query(self._database, table, rows, "ingest"))
        for batch in batches:
            self._replaced |= {path for path in self._list_published("inputs") if parse_day(path) == batch}
            self._write_day(table, batch)

    def publish(self, manifest_path: str, manifest: bytes, further: Iterable[str]) -> None:
        """
        Replace published directories by staged ones, atomically.

        :param further: other directories to replace, each by the staged one of the same name.
        """
        moves = [
            *self._make_table_moves(),
            *self._make_batch_moves(),
            *((path, self._get_staged_path(path)) for path in further),
        ]
        commit_publication(self._files, self._out, self._count_files(moves), manifest_path, manifest)
        self._listings.clear()
        self._published.clear()
        self._staged.clear()
        self._replaced.clear()
        self._copies.clear()

    def discard_staged(self) -> None:
        """Delete staged files, unless their publication was decided."""
        if not has_journal(self._files, self._out):
            self._files.delete(f"{self._out}/{STAGING_DIRECTORY}")

    def _get_staged_path(self, *parts: str) -> str:
        """Path in staging; paths from here on are relative to the results directory."""
        return "/".join((STAGING_DIRECTORY, self._run_id, *parts))

    def _list_kept_partitions(self, name: str, span: Span) -> list[str]:
        """Published partitions of a span that are not replaced."""
        gone = self._get_replaced_days(name)
        return [f"{_get_published_path(name)}/dt={day}" for day in self.days(name) if day in span and day not in gone]

    def _list_staged_partitions(self, name: str, span: Span) -> list[str]:
        """Staged partitions of a span."""
        if not self._get_replaced_days(name):
            return []
        return [
            f"{self._get_staged_path(name)}/dt={day}"
            for day in _parse_partition_dates(self._list_directory(self._get_staged_path(name)), "dt")
            if day in span
        ]

    def _get_replaced_days(self, name: str) -> frozenset[date]:
        """Staged days of a table, with or without rows."""
        return frozenset(self._staged[name].days) if name in self._staged else frozenset()

    def _list_batch_files(self, name: str) -> dict[str, str]:
        """Files of a table of ingest, in order, each with the directory that it is in; staged ones replace others."""
        published = dict.fromkeys(self._list_published(name), f"{self._out}/{TABLES_DIRECTORY}")
        kept = {path: base for path, base in published.items() if path not in self._replaced}
        return dict(sorted({**kept, **dict.fromkeys(self._list_staged(name), self.staging)}.items()))

    def _list_published(self, name: str) -> list[str]:
        """Published files of a table: `<name>/dt=.../...`."""
        self._list_published_files(name, "")
        return _get_paths_in_table((path for paths in self._published[name].values() for path in paths), name)

    def _list_staged(self, name: str) -> list[str]:
        """Staged files of a table: `<name>/dt=.../...`."""
        base = f"{self.staging}/{name}"
        return (
            _get_paths_in_table((file.path for file in self._files.list(base)), name)
            if self._files.exists(base)
            else []
        )

    def _make_table_moves(self) -> Iterator[tuple[str, str]]:
        """Published partitions and the staged ones that replace them; empty if without rows."""
        for name, span in self._staged.items():
            fresh = set(self._list_staged_partitions(name, span))
            for day in span.days:
                staged = f"{self._get_staged_path(name)}/dt={day}"
                if staged in fresh:
                    yield f"{_get_published_path(name)}/dt={day}", staged
                elif day in self.days(name):
                    yield f"{_get_published_path(name)}/dt={day}", ""

    def _make_batch_moves(self) -> Iterator[tuple[str, str]]:
        """Published files and the staged ones that replace them, if any."""
        staged = {path for name in BATCH_TABLES for path in self._list_staged(name)}
        for path in sorted(self._replaced | staged):
            yield f"{TABLES_DIRECTORY}/{path}", self._get_staged_path(path) if path in staged else ""

    def _count_files(self, moves: Iterable[tuple[str, str]]) -> list[DirectoryMove]:
        """Add the number of files of each move, by one listing."""
        counts: Counter[str] = Counter()
        for file in self._files.list(self.staging) if self._files.exists(self.staging) else ():
            path = self._get_staged_path() + file.path.partition(self._get_staged_path())[2]
            while path:
                counts[path] += 1
                path = path.rpartition("/")[0]
        return [DirectoryMove(target, staged, counts[staged]) for target, staged in moves]

    def _list_published_files(self, name: str, partition: str) -> list[str]:
        """Published files of a partition; all of a table are listed at once."""
        if name not in self._published:
            found: dict[str, list[str]] = {}
            base = f"{self._out}/{_get_published_path(name)}"
            for file in self._files.list(base) if self._files.exists(base) else ():
                folder = _get_published_path(name) + file.path.partition(_get_published_path(name))[2]
                found.setdefault(folder.rpartition("/")[0], []).append(file.path)
            self._published[name] = found
        return self._published[name].get(partition, [])

    def _list_directory(self, path: str) -> Sequence[str]:
        """Names in a directory, if it exists; cached for published ones, which do not change before publication."""
        found = self._listings.get(path)
        if found is None:
            full = f"{self._out}/{path}"
            found = self._files.list_names(full) if self._files.exists(full) else []
            if path.startswith(TABLES_DIRECTORY):
                self._listings[path] = found
        return found


def _convert_for_parquet(column: Column) -> str:
    """Times in Parquet are in UTC, not local."""
    name = f'"{column.name}"'
    return f"CAST({name} AS TIMESTAMPTZ)" if column.type == "timestamp" else name


def _get_published_path(table: str) -> str:
    return f"{TABLES_DIRECTORY}/{table}"


def _get_paths_in_table(paths: Iterable[str], name: str) -> list[str]:
    """The ends of paths of Parquet files from the name of the table on: `<name>/dt=.../...`."""
    return [f"{name}/dt={path.rpartition(f'/{name}/dt=')[2]}" for path in paths if path.endswith(".parquet")]


def parse_day(path: str) -> date:
    """Day of a path `<name>/dt=<day>/...`."""
    return date.fromisoformat(path.split("/")[1].removeprefix("dt="))


def _parse_batch(path: str) -> date:
    """Batch of a path `events/dt=<day>/batch=<day>/...`; of other tables, the day."""
    return date.fromisoformat(path.rpartition("/")[0].rpartition("=")[2])


def parse_stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".parquet")


def _parse_partition_dates(names: Iterable[str], column: str) -> list[date]:
    return sorted(date.fromisoformat(name.partition("=")[2]) for name in names if name.startswith(f"{column}="))
