"""Tables, staged and published: what is read when, and that nothing is ever half published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analytics.errors import AnalyticsError
from analytics.job import Span
from analytics.reading.files import FileSystem
from analytics.schema import TABLES
from analytics.writing.runs import DirectoryMove, commit_publication, recover_publication
from analytics.writing.warehouse import TableMismatchError, Warehouse

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
def traffic(spark: SparkSession) -> Callable[[Rows], DataFrame]:
    """Frames of traffic_daily from (day, event, n)."""

    def make(rows: Rows) -> DataFrame:
        every = [(day, "a", "didcomm", event, n, 10 * n) for day, event, n in rows]
        return spark.createDataFrame(every, TABLES["traffic_daily"].struct())

    return make


def told(frame: DataFrame) -> list[tuple[date, str, int]]:
    """What `traffic` was given."""
    return sorted((row.dt, row.event, row.n) for row in frame.collect())


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_staged_days_overlay_published_ones(
    spark: SparkSession, files: FileSystem, tmp_path: Path, traffic: Callable[[Rows], DataFrame]
) -> None:
    """A run reads what it staged, everyone else what is published; an empty day removes the old one (T7)."""
    out = str(tmp_path)
    first = Warehouse(spark, files, out, "first")
    assert first.read("traffic_daily", BOTH).schema == TABLES["traffic_daily"].struct()
    assert told(first.read("traffic_daily", BOTH)) == []
    earlier, later = [(BEFORE, "msg.ack", 1), (BEFORE, "msg.accept", 2)], [(D, "msg.ack", 3)]
    assert first.stage("traffic_daily", traffic(earlier + later), BOTH) == 3
    first.publish(f"{out}/runs/first.json", b"{}\n", [])

    second = Warehouse(spark, files, out, "second")
    assert told(second.read("traffic_daily", BOTH)) == sorted(earlier + later)
    assert second.stage("traffic_daily", traffic([]), Span(D, D)) == 0
    assert told(second.read("traffic_daily", BOTH)) == sorted(earlier)
    assert told(Warehouse(spark, files, out).read("traffic_daily", Span(D, D))) == later
    second.publish(f"{out}/runs/second.json", b"{}\n", [])
    assert Warehouse(spark, files, out).days("traffic_daily") == [BEFORE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "tables"]


def test_one_sorted_file_a_day_and_filters_on_the_day(
    spark: SparkSession,
    files: FileSystem,
    tmp_path: Path,
    traffic: Callable[[Rows], DataFrame],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same rows in any order and layout make the same file; a plan shows which days it is about."""
    rows = [(D, f"event {n % 50}", n) for n in range(50)] + [(BEFORE, "msg.ack", 1)]
    outs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for out, frame in zip(outs, (traffic(rows), traffic(rows[::-1]).repartition(4)), strict=True):
        warehouse = Warehouse(spark, files, out, "run")
        warehouse.stage("traffic_daily", frame, BOTH)
        warehouse.publish(f"{out}/runs/run.json", b"", [])
    made = [sorted(Path(out).rglob("*.parquet")) for out in outs]
    assert len(made[0]) == 2
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]
    Warehouse(spark, files, outs[0]).read("traffic_daily", Span(D, D)).explain("formatted")
    assert f">= {D})" in capsys.readouterr().out.partition("PartitionFilters: ")[2].splitlines()[0]


@pytest.mark.parametrize(
    ("columns", "mistake"),
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
def test_mistakes_of_a_job_are_told(
    spark: SparkSession,
    files: FileSystem,
    tmp_path: Path,
    traffic: Callable[[Rows], DataFrame],
    columns: list[str],
    mistake: str,
) -> None:
    """By job, table and column."""
    frame = traffic([(D, "msg.ack", 1)]).selectExpr(*columns)
    with pytest.raises(TableMismatchError) as caught:
        Warehouse(spark, files, str(tmp_path), "run").stage("traffic_daily", frame, BOTH, "traffic")
    assert str(caught.value) == mistake


def test_narrow_numbers_and_nulls_are_fine(
    spark: SparkSession, files: FileSystem, tmp_path: Path, traffic: Callable[[Rows], DataFrame]
) -> None:
    """As functions of Spark return them."""
    warehouse = Warehouse(spark, files, str(tmp_path), "run")
    frame = traffic([(D, "x", 1)]).selectExpr("dt", "null as node", "proto", "event", "int(n) as n", "null as bytes")
    warehouse.stage("traffic_daily", frame, BOTH)
    [row] = warehouse.read("traffic_daily", BOTH).collect()
    assert (row.node, row.n, row.bytes) == (None, 1, None)


class Killed(BaseException):
    """The process ends here."""


class KilledFiles:
    """Files of a process that is killed before its n-th change: nothing is done from there on."""

    def __init__(self, files: FileSystem, allowed: int) -> None:
        self._files = files
        self.allowed = allowed

    def __getattr__(self, name: str) -> Any:
        if name in {"write", "move", "delete", "make_dirs"}:
            self.allowed -= 1
            if self.allowed < 0:
                raise Killed
        return getattr(self._files, name)


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Path, list[DirectoryMove]]]:
    """A directory with two published partitions and a report, and moves to replace, remove and add some."""
    for name, text in {
        "tables/t/dt=1/a": "old",
        "tables/t/dt=1/b": "old too",
        "tables/t/dt=2/a": "old",
        "report/2/index.html": "old",
        "_staging/run/t/dt=1/c": "new",
        "_staging/run/t/dt=3/a": "new",
        "_staging/run/t/dt=3/b": "new too",
        "_staging/run/report/2/index.html": "new",
        "_staging/run/report/2/csv/t.csv": "new",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield (
        tmp_path,
        [
            DirectoryMove("tables/t/dt=1", "_staging/run/t/dt=1", 1),
            DirectoryMove("tables/t/dt=2"),
            DirectoryMove("tables/t/dt=3", "_staging/run/t/dt=3", 2),
            DirectoryMove("report/2", "_staging/run/report/2", 2),
        ],
    )


OLD = {
    "tables/t/dt=1/a": b"old",
    "tables/t/dt=1/b": b"old too",
    "tables/t/dt=2/a": b"old",
    "report/2/index.html": b"old",
}
NEW = {
    "tables/t/dt=1/c": b"new",
    "tables/t/dt=3/a": b"new",
    "tables/t/dt=3/b": b"new too",
    "report/2/index.html": b"new",
    "report/2/csv/t.csv": b"new",
    "runs/run.json": b"{}",
}


@pytest.mark.parametrize("changes", range(13))
def test_a_process_killed_while_publishing(
    files: FileSystem, published: tuple[Path, list[DirectoryMove]], changes: int
) -> None:
    """Before the journal stands nothing has happened; from then on all of it will have."""
    out, moves = published
    killed = KilledFiles(files, changes)
    finished = True
    try:
        commit_publication(killed, str(out), moves, f"{out}/runs/run.json", b"{}")  # type: ignore[arg-type]
    except Killed:
        finished = False
    assert finished == (killed.allowed >= 0)
    recover_publication(files, str(out))
    assert content(out) == (NEW if changes else OLD)


def test_killed_again_and_again(files: FileSystem, published: tuple[Path, list[DirectoryMove]]) -> None:
    """Each start gets a little further, and the end is the same."""
    out, moves = published
    with pytest.raises(Killed):
        commit_publication(KilledFiles(files, 2), str(out), moves, f"{out}/runs/run.json", b"{}")  # type: ignore[arg-type]
    for allowed in range(1, 20):
        try:
            recover_publication(KilledFiles(files, allowed), str(out))  # type: ignore[arg-type]
        except Killed:
            continue
        break
    assert content(out) == NEW


def test_a_directory_that_arrived_in_part(files: FileSystem, published: tuple[Path, list[DirectoryMove]]) -> None:
    """Object stores move file by file; what is no longer in staging has arrived and is not deleted."""
    out, moves = published
    with pytest.raises(Killed):
        commit_publication(KilledFiles(files, 1), str(out), moves, f"{out}/runs/run.json", b"{}")  # type: ignore[arg-type]
    for name in ("report/2/csv/t.csv", "tables/t/dt=3/a"):
        source = out / "_staging/run" / name.removeprefix("tables/")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        source.rename(out / name)
    recover_publication(files, str(out))
    assert content(out) == NEW


def test_a_publication_that_cannot_go_on(files: FileSystem, published: tuple[Path, list[DirectoryMove]]) -> None:
    """Its journal stays for the next start, after somebody has removed the cause."""
    out, moves = published
    (out / "runs").write_text("in the way")
    with pytest.raises(AnalyticsError, match="runs"):
        commit_publication(files, str(out), moves, f"{out}/runs/run.json", b"{}")
    assert json.loads((out / "_journal.json").read_text())["manifest"] == "{}"
    (out / "runs").unlink()
    recover_publication(files, str(out))
    assert content(out) == NEW
