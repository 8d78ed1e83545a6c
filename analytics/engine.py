"""
Engines run scans: SQL over many lines, whose few rows become a table of the database.

DuckDB reads Parquet in this process. Spark reads it on all processors of a machine or of a cluster. Both run the
same statements (:mod:`analytics.sql_functions`) and give the same rows.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

from analytics.database import Database, Row
from analytics.schema import Table
from analytics.sql_functions import create_spark_functions, quote_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from analytics.files import FileSystem


ReportPlan = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AnalysisSession:
    """
    What a run works with.

    :param scratch: local directory for temporary files, deleted at the end.
    :param spark: runs scans and ingest; None: DuckDB and processes of this machine do.
    """

    files: FileSystem
    database: Database
    scratch: str
    spark: SparkSession | None = None

    def make_engine(self, staging: str, report_plan: ReportPlan | None = None) -> Engine:
        """
        :param staging: directory on the file system of the results.
        :param report_plan: receives the query plan of each scan.
        """
        if self.spark is None:
            return DuckDBEngine(self.database, report_plan)
        from analytics.spark_session import is_local_master

        is_local = is_local_master(self.spark.sparkContext.master or "local")
        workspace = f"file:{self.scratch}/scans" if is_local else f"{staging}/_scans"
        local = f"{self.scratch}/copies/_scans"
        return SparkEngine(self.spark, self.files, self.database, workspace, local, report_plan)


class Engine(Protocol):
    """Runs scans."""

    def read(self, table: Table, paths: Sequence[str]) -> None:
        """Let scans read a table from Parquet files below directories `dt=<day>`."""

    def scan(self, name: str, query: str, small: Sequence[str] = ()) -> None:
        """
        Run a query; its rows become a table of the database, which later scans can read.

        :param small: tables of the database that it reads, each at most some thousand rows.
        """


class DuckDBEngine:
    """Runs scans in this process."""

    def __init__(self, database: Database, report_plan: ReportPlan | None = None) -> None:
        self._database = database
        self._report_plan = report_plan

    def read(self, table: Table, paths: Sequence[str]) -> None:
        """As :class:`Engine`: they read it from the database, as everybody does."""

    def scan(self, name: str, query: str, small: Sequence[str] = ()) -> None:
        """As :class:`Engine`."""
        if self._report_plan:
            (plan,) = self._database.rows(f"EXPLAIN {query}")
            self._report_plan(f"{name}\n{plan['explain_value']}")
        self._database.define(name, query)


class SparkEngine:
    """
    Runs scans with Spark.

    :param workspace: directory that all executors can write, for results.
    :param local: local directory for copies of them.
    """

    def __init__(
        self,
        spark: SparkSession,
        files: FileSystem,
        database: Database,
        workspace: str,
        local: str,
        report_plan: ReportPlan | None = None,
    ) -> None:
        self._spark, self._files, self._database = spark, files, database
        self._workspace, self._local, self._report_plan = workspace, local, report_plan
        create_spark_functions(spark)
        # Both engines quote names alike.
        spark.conf.set("spark.sql.ansi.doubleQuotedIdentifiers", "true")

    def read(self, table: Table, paths: Sequence[str]) -> None:
        """As :class:`Engine`."""
        struct = table.struct()
        # Published and staged files are below different directories, and the paths name the days.
        bases: dict[str, list[str]] = {}
        for path in paths:
            base = path.partition("/dt=")[0]
            # Spark reads paths as patterns, except this option.
            bases.setdefault(base, []).append(re.sub(r"([\\*?\[\]{}])", r"\\\1", path))
        read = self._spark.read.schema(struct)
        frames = [read.option("basePath", base).parquet(*own).select(struct.names) for base, own in bases.items()]
        frame = (
            reduce(lambda one, other: one.union(other), frames) if frames else self._spark.createDataFrame([], struct)
        )
        frame.createOrReplaceTempView(table.name)

    def scan(self, name: str, query: str, small: Sequence[str] = ()) -> None:
        """As :class:`Engine`."""
        for table in small:
            self._share(table)
        target = f"{self._workspace}/{name}"
        frame = self._spark.sql(query)
        if self._report_plan:
            self._report_plan(f"{name}\n{_format_plan(frame)}")
        frame.write.mode("overwrite").parquet(target)
        self._spark.read.schema(frame.schema).parquet(target).createOrReplaceTempView(name)
        parts = self._files.localize(target, f"{self._local}/{name}")
        listed = ", ".join(quote_text(part) for part in parts if part.endswith(".parquet"))
        times = [column for column, kind in frame.dtypes if kind == "timestamp"]
        naive = ", ".join(f'CAST("{column}" AS TIMESTAMP) AS "{column}"' for column in times)
        self._database.define_view(
            name, f"SELECT *{f' REPLACE ({naive})' if times else ''} FROM read_parquet([{listed}])"
        )

    def _share(self, name: str) -> None:
        """Let scans read a small table of the database."""
        columns = self._database.describe(f'SELECT * FROM "{name}"')
        rows: list[Row] = self._database.rows(f'SELECT * FROM "{name}"')
        declared = ", ".join(f"`{column}` {_get_spark_type(kind)}" for column, kind in columns.items())
        values: list[tuple[Any, ...]] = [tuple(row.values()) for row in rows]
        # Spark does not know that it is small, and would sort both sides of a join.
        self._spark.createDataFrame(values, declared).hint("broadcast").createOrReplaceTempView(name)


def _format_plan(frame: DataFrame) -> str:
    with redirect_stdout(io.StringIO()) as output:
        frame.explain("formatted")
    return output.getvalue()


_SPARK_TYPES: Mapping[str, str] = {
    "VARCHAR": "string",
    "BIGINT": "bigint",
    "INTEGER": "int",
    "DOUBLE": "double",
    "BOOLEAN": "boolean",
    "DATE": "date",
}


def _get_spark_type(kind: str) -> str:
    """:raise KeyError: small tables have other types only by mistake."""
    return _SPARK_TYPES[kind]
