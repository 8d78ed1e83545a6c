"""Staged and published tables: what a run reads, and that publication is atomic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analytics.errors import AnalyticsError
from analytics.job import Span
from analytics.reading.files import FileSystem
from analytics.schema import TABLES
from analytics.writing.runs import commit_publication, recover_publication
from analytics.writing.warehouse import TableMismatchError, Warehouse
from tests.analytics.publication import MANIFEST, MOVES, NEW, OLD, STAGED, KilledFileSystem, KilledProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

D = date(2026, 11, 20)
BEFORE = D - timedelta(1)
BOTH = Span(BEFORE, D)
Rows = list[tuple[Any, ...]]


@pytest.fixture
def files(spark: SparkSession) -> FileSystem:
    return FileSystem(spark)


@pytest.fixture
def make_traffic(spark: SparkSession) -> Callable[[Rows], DataFrame]:
    """Makes frames of traffic_daily from (day, event, n)."""

    def make(rows: Rows) -> DataFrame:
        tuples = [(day, "a", "didcomm", event, n, 10 * n) for day, event, n in rows]
        return spark.createDataFrame(tuples, TABLES["traffic_daily"].struct())

    return make


def list_rows(frame: DataFrame) -> list[tuple[date, str, int]]:
    """Rows in the form that `make_traffic` takes."""
    return sorted((row.dt, row.event, row.n) for row in frame.collect())


def read_tree(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a directory."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_staged_days_overlay_published_ones(
    spark: SparkSession, files: FileSystem, tmp_path: Path, make_traffic: Callable[[Rows], DataFrame]
) -> None:
    """A run reads what it staged, all others what is published; an empty staged day removes the published one."""
    out = str(tmp_path)
    first_run = Warehouse(spark, files, out, "first")
    assert first_run.read("traffic_daily", BOTH).schema == TABLES["traffic_daily"].struct()
    assert list_rows(first_run.read("traffic_daily", BOTH)) == []
    earlier, later = [(BEFORE, "msg.ack", 1), (BEFORE, "msg.accept", 2)], [(D, "msg.ack", 3)]
    assert first_run.stage("traffic_daily", make_traffic(earlier + later), BOTH) == 3
    first_run.publish(f"{out}/runs/first.json", b"{}\n", [])

    second_run = Warehouse(spark, files, out, "second")
    assert list_rows(second_run.read("traffic_daily", BOTH)) == sorted(earlier + later)
    assert second_run.stage("traffic_daily", make_traffic([]), Span(D, D)) == 0
    assert list_rows(second_run.read("traffic_daily", BOTH)) == sorted(earlier)
    assert list_rows(Warehouse(spark, files, out).read("traffic_daily", Span(D, D))) == later
    second_run.publish(f"{out}/runs/second.json", b"{}\n", [])
    assert Warehouse(spark, files, out).days("traffic_daily") == [BEFORE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "tables"]


def test_writes_one_sorted_file_per_day(
    spark: SparkSession,
    files: FileSystem,
    tmp_path: Path,
    make_traffic: Callable[[Rows], DataFrame],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The order and partitions of rows do not matter; a reader prunes partitions."""
    rows = [(D, f"event {n % 50}", n) for n in range(50)] + [(BEFORE, "msg.ack", 1)]
    outs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for out, frame in zip(outs, (make_traffic(rows), make_traffic(rows[::-1]).repartition(4)), strict=True):
        warehouse = Warehouse(spark, files, out, "run")
        warehouse.stage("traffic_daily", frame, BOTH)
        warehouse.publish(f"{out}/runs/run.json", b"", [])
    parquet_files = [sorted(Path(out).rglob("*.parquet")) for out in outs]
    assert len(parquet_files[0]) == 2
    assert [path.read_bytes() for path in parquet_files[0]] == [path.read_bytes() for path in parquet_files[1]]
    Warehouse(spark, files, outs[0]).read("traffic_daily", Span(D, D)).explain("formatted")
    assert f">= {D})" in capsys.readouterr().out.partition("PartitionFilters: ")[2].splitlines()[0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["dt", "node", "proto", "event", "n"], "traffic: traffic_daily: no column bytes"),
        (["dt", "node", "proto", "event", "n", "bytes", "n as m"], "traffic: traffic_daily: undeclared column m"),
        (
            ["dt", "node", "proto", "event", "n", "cast(bytes as string) as bytes"],
            "traffic: traffic_daily: column bytes is string, declared as bigint",
        ),
        (
            ["date_add(dt, 1) as dt", "node", "proto", "event", "n", "bytes"],
            "traffic: traffic_daily: column dt has 2026-11-21, not of 2026-11-19 to 2026-11-20",
        ),
    ],
)
def test_rejects_undeclared_output_of_job(
    spark: SparkSession,
    files: FileSystem,
    tmp_path: Path,
    make_traffic: Callable[[Rows], DataFrame],
    columns: list[str],
    message: str,
) -> None:
    """By job, table and column."""
    frame = make_traffic([(D, "msg.ack", 1)]).selectExpr(*columns)
    with pytest.raises(TableMismatchError) as caught:
        Warehouse(spark, files, str(tmp_path), "run").stage("traffic_daily", frame, BOTH, "traffic")
    assert str(caught.value) == message


def test_accepts_narrow_numbers_and_nulls(
    spark: SparkSession, files: FileSystem, tmp_path: Path, make_traffic: Callable[[Rows], DataFrame]
) -> None:
    """As Spark functions return them."""
    warehouse = Warehouse(spark, files, str(tmp_path), "run")
    frame = make_traffic([(D, "x", 1)]).selectExpr(
        "dt", "null as node", "proto", "event", "int(n) as n", "null as bytes"
    )
    warehouse.stage("traffic_daily", frame, BOTH)
    [row] = warehouse.read("traffic_daily", BOTH).collect()
    assert (row.node, row.n, row.bytes) == (None, 1, None)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A directory with published and staged files."""
    for name, content in {**OLD, **STAGED}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("changes", range(14))
def test_publication_is_atomic_if_killed(files: FileSystem, published: Path, changes: int) -> None:
    """Before the journal is written nothing has changed; afterwards recovery completes all of it."""
    out = published
    dying_files = KilledFileSystem(files, changes)
    is_finished = True
    try:
        commit_publication(dying_files, str(out), MOVES, f"{out}/runs/run.json", MANIFEST)  # type: ignore[arg-type]
    except KilledProcess:
        is_finished = False
    assert is_finished == (dying_files.changes_left >= 0)
    recover_publication(files, str(out))
    # The journal is the second file.
    assert read_tree(out) == (NEW if changes > 1 else OLD)


def test_publication_completes_after_repeated_kills(files: FileSystem, published: Path) -> None:
    out = published
    with pytest.raises(KilledProcess):
        commit_publication(KilledFileSystem(files, 3), str(out), MOVES, f"{out}/runs/run.json", MANIFEST)  # type: ignore[arg-type]
    for changes_left in range(1, 20):
        try:
            recover_publication(KilledFileSystem(files, changes_left), str(out))  # type: ignore[arg-type]
        except KilledProcess:
            continue
        break
    assert read_tree(out) == NEW


def test_completes_partial_move(files: FileSystem, published: Path) -> None:
    """Object stores move file by file; files no longer staged have arrived and are not deleted."""
    out = published
    with pytest.raises(KilledProcess):
        commit_publication(KilledFileSystem(files, 2), str(out), MOVES, f"{out}/runs/run.json", MANIFEST)  # type: ignore[arg-type]
    for name in ("report/2/csv/t.csv", "tables/t/dt=3/a"):
        source = out / "_staging/run" / name.removeprefix("tables/")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        source.rename(out / name)
    recover_publication(files, str(out))
    assert read_tree(out) == NEW


def test_failed_publication_keeps_journal(files: FileSystem, published: Path) -> None:
    """The next start completes it, once the cause is removed."""
    out = published
    (out / "runs").write_text("in the way")
    with pytest.raises(AnalyticsError, match="runs"):
        commit_publication(files, str(out), MOVES, f"{out}/runs/run.json", MANIFEST)
    assert json.loads((out / "_journal.json").read_text())["manifest"] == "{}"
    (out / "runs").unlink()
    recover_publication(files, str(out))
    assert read_tree(out) == NEW


def test_journal_without_staged_files_is_an_error(files: FileSystem, published: Path) -> None:
    """Otherwise everything would count as moved. Nothing changes, until the journal is deleted, too."""
    out = published
    with pytest.raises(KilledProcess):
        commit_publication(KilledFileSystem(files, 2), str(out), MOVES, f"{out}/runs/run.json", MANIFEST)  # type: ignore[arg-type]
    shutil.rmtree(out / "_staging")
    for _ in range(2):
        with pytest.raises(AnalyticsError, match=rf"^{out}/_journal.json: .* deleted; .* {out}/runs/run.json again$"):
            recover_publication(files, str(out))
    (out / "_journal.json").unlink()
    assert not recover_publication(files, str(out))
    assert read_tree(out) == OLD
