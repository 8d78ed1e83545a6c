"""The tables in the results directory: published ones, and those that a run stages until it publishes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from analytics.database import Database, get_duckdb_type
from analytics.job import Span
from analytics.reading.files import FileSystem, get_local_path
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
# Written by ingest, which replaces batches of segments as a whole.
BATCH_TABLES = ("events", "quarantine", "inputs")
# Columns of `inputs` about the file; the others are about what was read.
_FILE_COLUMNS = ("path", "bytes", "modified", "packed", "state", "remarks")
ALL_TABLES: dict[str, Table] = {**TABLES, "events": make_events_table()}


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
        self._batches: frozenset[date] = frozenset()
        self._listings: dict[str, Sequence[str]] = {}
        self._published: dict[str, dict[str, list[str]]] = {}

    @property
    def staging(self) -> str:
        """Directory for `<table>/dt=<day>/` of ingest and other files to publish."""
        return f"{self._out}/{self._get_staged_path()}"

    def days(self, table: str) -> list[date]:
        """Published days of a table, in order."""
        return _parse_partition_dates(self._list_directory(_get_published_path(table)), "dt")

    def event_days(self, batches: Iterable[date], staged: bool = False) -> set[date]:
        """Days with events of any of these batches."""
        return {day for days in self.days_by_batch(batches, staged).values() for day in days}

    def days_by_batch(self, batches: Iterable[date], staged: bool = False) -> dict[date, list[date]]:
        """Days with events, by batch. Events are at most a day from their batch."""
        base = self._get_staged_path("events") if staged else _get_published_path("events")
        found: dict[date, list[date]] = {batch: [] for batch in batches}
        near = {batch + timedelta(n) for batch in found for n in (-1, 0, 1)}
        for day in near.intersection(_parse_partition_dates(self._list_directory(base), "dt")):
            for batch in found.keys() & _parse_partition_dates(self._list_directory(f"{base}/dt={day}"), "batch"):
                found[batch].append(day)
        return found

    def has_events(self, day: date) -> bool:
        """Whether there are events of a day, staged or kept."""
        return bool(self.list_files("events", Span(day, day)))

    def event_bytes(self, batches: Iterable[date]) -> int:
        """Bytes of the published events of these batches."""
        partitions = [path for batch in batches for path in self._list_batch_partitions("events", batch)]
        return sum(file.size for path in partitions for file in self._files.list(f"{self._out}/{path}"))

    def list_files(self, name: str, span: Span) -> list[str]:
        """Parquet files of a table, in order; staged days replace published ones."""
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

    def read_inputs(self, stems: Iterable[str]) -> list[dict[str, Any]]:
        """Staged rows of `inputs` about these segments."""
        rows = self.rows("inputs", Span(min(self._batches), max(self._batches)))
        wanted = set(stems)
        return [row for row in rows if row["stem"] in wanted]

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
        columns = ", ".join(_make_parquet_column(column) for column in table.columns if column.name != "dt")
        self._database.execute(
            f"COPY (SELECT {columns} FROM {_STAGED_TABLE} WHERE dt = {quote_day(day)})"
            f" TO {quote_text(str(path))} (FORMAT parquet, COMPRESSION zstd)"
        )
        if get_local_path(url) is None:
            self._files.upload(path, url)

    def _localize(self, url: str) -> str:
        """Local path of a file; a remote one is copied once."""
        here = get_local_path(url)
        if here is None:
            here = Path(self._local, "copies", url.partition(f"{self._out}/")[2] or url)
            if not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True)
                self._files.download(url, here)
        return str(here)

    def mark_batches_staged(self, batches: Iterable[date]) -> None:
        """Note that ingest has staged these batches completely; they replace what is published of them."""
        self._batches = frozenset(batches)

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
        self._batches = frozenset()

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
        days = {day: f"{_get_published_path(name)}/dt={day}" for day in self.days(name) if day in span}
        if name != "events":
            return [path for day, path in days.items() if day not in gone]
        return [
            f"{path}/batch={batch}"
            for path in days.values()
            for batch in _parse_partition_dates(self._list_directory(path), "batch")
            if batch not in gone
        ]

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
        if name in BATCH_TABLES:
            return self._batches
        return frozenset(self._staged[name].days) if name in self._staged else frozenset()

    def _list_batch_partitions(self, name: str, batch: date) -> list[str]:
        """Published partitions of a batch."""
        if name == "events":
            return [
                f"{_get_published_path(name)}/dt={day}/batch={batch}"
                for day in sorted(self.days_by_batch([batch])[batch])
            ]
        return [f"{_get_published_path(name)}/dt={batch}"] if batch in self.days(name) else []

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

    def _make_batch_moves(self) -> list[tuple[str, str]]:
        moves = {
            path: ""
            for batch in sorted(self._batches)
            for name in BATCH_TABLES
            for path in self._list_batch_partitions(name, batch)
        }
        for name in BATCH_TABLES if self._batches else ():
            base = self._get_staged_path(name)
            days = [f"dt={day}" for day in _parse_partition_dates(self._list_directory(base), "dt")]
            if name == "events":
                days = [
                    f"{day}/batch={one}"
                    for day in days
                    for one in _parse_partition_dates(self._list_directory(f"{base}/{day}"), "batch")
                ]
            moves |= {f"{_get_published_path(name)}/{partition}": f"{base}/{partition}" for partition in days}
        return list(moves.items())

    def _count_files(self, moves: Iterable[tuple[str, str]]) -> list[DirectoryMove]:
        """Add the number of files of each move, by one listing."""
        counts: Counter[str] = Counter()
        for file in self._files.list(self.staging) if self._files.exists(self.staging) else ():
            folder = self._get_staged_path() + file.path.partition(self._get_staged_path())[2]
            while folder := folder.rpartition("/")[0]:
                counts[folder] += 1
        return [DirectoryMove(target, staged, counts[staged]) for target, staged in moves]

    def _list_published_files(self, name: str, partition: str) -> list[str]:
        """Published files of a partition; all of a table are listed at once."""
        if name not in self._published:
            found: dict[str, list[str]] = {}
            for file in self._files.list(f"{self._out}/{_get_published_path(name)}"):
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


def _make_parquet_column(column: Column) -> str:
    """Times in Parquet are in UTC, not local."""
    name = f'"{column.name}"'
    return f"CAST({name} AS TIMESTAMPTZ) AS {name}" if column.type == "timestamp" else name


def _get_published_path(table: str) -> str:
    return f"{TABLES_DIRECTORY}/{table}"


def _parse_partition_dates(names: Iterable[str], column: str) -> list[date]:
    return sorted(date.fromisoformat(name.partition("=")[2]) for name in names if name.startswith(f"{column}="))
