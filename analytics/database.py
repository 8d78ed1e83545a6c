"""
The DuckDB database of a run, in its scratch directory: it makes tables from the results of scans, and reads Parquet.

Times are `TIMESTAMP` in UTC, and naive `datetime` in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from analytics.errors import EXIT_USAGE, AnalyticsError
from analytics.schema import Column, Table
from analytics.sql_functions import create_duckdb_functions, quote_text

Row = dict[str, Any]

_TYPES = {
    "string": "VARCHAR",
    "bigint": "BIGINT",
    "int": "INTEGER",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
}
MIB = 2**20
# Of each thread's intermediate results.
_THREAD_BYTES = 128 * MIB
FORBIDDEN_CHARACTERS = "=?*[]"


class Database:
    """
    :param scratch: an existing directory; rows that do not fit in memory spill to it.
    :param memory: bytes of memory.
    :raise AnalyticsError: DuckDB cannot use a directory of this name.
    """

    def __init__(self, scratch: str, memory: int = 512 * MIB, threads: int = 2) -> None:
        import duckdb

        check_directory_name(scratch, FORBIDDEN_CHARACTERS)
        self.scratch = scratch
        self.connection = duckdb.connect(
            f"{scratch}/night.duckdb",
            config={
                "threads": max(1, min(threads, memory // _THREAD_BYTES)),
                "memory_limit": f"{memory // MIB}MiB",
                "temp_directory": f"{scratch}/spill",
                # Nothing is loaded from elsewhere.
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        for statement in ("LOAD icu", "LOAD parquet", "SET TimeZone = 'UTC'", "SET enable_progress_bar = false"):
            self.connection.execute(statement)
        create_duckdb_functions(self.connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def execute(self, query: str) -> None:
        """Execute a statement."""
        self.connection.execute(query)

    def rows(self, query: str) -> list[Row]:
        """Rows of a query."""
        found = self.connection.execute(query)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def row(self, query: str) -> Row:
        """The only row of a query."""
        (row,) = self.rows(query)
        return row

    def define(self, name: str, query: str) -> None:
        """Create or replace a table with the rows of a query."""
        self._drop_view(name)
        self.connection.execute(f'CREATE OR REPLACE TABLE "{name}" AS {query}')

    def define_view(self, name: str, query: str) -> None:
        """Create or replace a view."""
        if not self._is_view(name):
            self.connection.execute(f'DROP TABLE IF EXISTS "{name}"')
        self.connection.execute(f'CREATE OR REPLACE VIEW "{name}" AS {query}')

    def insert(self, name: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
        """
        Create or replace a table with these rows.

        :param columns: names and types: `dt DATE, n BIGINT`.
        """
        import pyarrow

        self._drop_view(name)
        self.connection.execute(f'CREATE OR REPLACE TABLE "{name}" ({columns})')
        if found := [pyarrow.array(values) for values in zip(*rows, strict=True)]:
            # Parameters of a statement cost milliseconds for each row.
            self.connection.register("inserted_rows", pyarrow.table(found, [str(n) for n in range(len(found))]))
            self.connection.execute(f'INSERT INTO "{name}" SELECT * FROM inserted_rows')
            self.connection.unregister("inserted_rows")

    def describe(self, query: str) -> dict[str, str]:
        """Columns of a query with their types."""
        return {row["column_name"]: row["column_type"] for row in self.rows(f"DESCRIBE {query}")}

    def make_parquet_query(self, table: Table, files: Sequence[str]) -> str:
        """
        Query for the rows of a table in Parquet files below directories `dt=<day>`.

        :param files: local paths; files of earlier versions may lack columns.
        """
        if not files:
            return make_empty_query(table)
        partitions = _find_partitions(files[0])
        for file in files:
            check_directory_name(file.partition("/dt=")[0], FORBIDDEN_CHARACTERS)
        listed = ", ".join(quote_text(file) for file in [self._write_schema_file(table, partitions), *files])
        types = ", ".join(f"'{name}': DATE" for name in partitions)
        columns = ", ".join(
            f'CAST("{column.name}" AS {get_duckdb_type(column)}) AS "{column.name}"' for column in table.columns
        )
        return (
            f"SELECT {columns} FROM read_parquet([{listed}], union_by_name = true, hive_partitioning = true,"
            f" hive_types = {{{types}}})"
        )

    def _write_schema_file(self, table: Table, partitions: Sequence[str]) -> str:
        """Write a Parquet file without rows that has all columns, so that each column is in a file."""
        directory = "/".join([self.scratch, "schemas", table.name, *(f"{name}=1970-01-01" for name in partitions)])
        path = f"{directory}/schema.parquet"
        if not Path(path).exists():
            Path(directory).mkdir(parents=True)
            columns = ", ".join(f'"{column.name}"' for column in table.columns if column.name not in partitions)
            self.execute(f"COPY (SELECT {columns} FROM ({make_empty_query(table)})) TO {quote_text(path)}")
        return path

    def close(self) -> None:
        """Close the database; its file is deleted with the scratch directory."""
        self.connection.close()

    def _drop_view(self, name: str) -> None:
        if self._is_view(name):
            self.connection.execute(f'DROP VIEW "{name}"')

    def _is_view(self, name: str) -> bool:
        return bool(self.rows(f"SELECT 1 FROM duckdb_views() WHERE view_name = {quote_text(name)} AND NOT internal"))


def check_directory_name(path: str, forbidden: str) -> None:
    """
    Refuse names that DuckDB takes for something else: `name=value` for a column, `?` for options, patterns.

    :raise AnalyticsError: the path has one of these characters.
    """
    if found := set(forbidden).intersection(path):
        raise AnalyticsError(f"{path}: the name of a directory contains {min(found)!r}", EXIT_USAGE)


def get_duckdb_type(column: Column) -> str:
    """DuckDB's name for the type of a column."""
    return _TYPES[column.type]


def make_empty_query(table: Table) -> str:
    """Query for no rows with the columns of a table."""
    columns = ", ".join(f'CAST(NULL AS {get_duckdb_type(column)}) AS "{column.name}"' for column in table.columns)
    return f"SELECT {columns} WHERE false"


def _find_partitions(file: str) -> list[str]:
    return [part.partition("=")[0] for part in Path(file).parts if "=" in part]
