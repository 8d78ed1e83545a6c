"""Staged and published tables: what a run reads, and that publication is atomic."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from analytics.database import get_duckdb_type
from analytics.engine import AnalysisSession
from analytics.errors import AnalyticsError
from analytics.files import FileSystem, LocalFileSystem
from analytics.job import Span
from analytics.schema import TABLES
from analytics.writing.runs import commit_publication, recover_publication
from analytics.writing.warehouse import TableMismatchError, Warehouse
from tests.analytics.publication import MANIFEST, MOVES, NEW, OLD, STAGED, KilledFileSystem, KilledProcess

D = date(2026, 11, 20)
BEFORE = D - timedelta(1)
BOTH = Span(BEFORE, D)
Rows = list[tuple[Any, ...]]


@pytest.fixture
def files() -> FileSystem:
    return LocalFileSystem()


def make_traffic(rows: Rows) -> list[dict[str, Any]]:
    """Rows of traffic_daily from (day, event, n)."""
    return [
        {"dt": day, "node": "a", "proto": "didcomm", "event": event, "n": n, "bytes": 10 * n}
        for day, event, n in rows
    ]


def open_warehouse(session: AnalysisSession, out: str, run_id: str = "") -> Warehouse:
    return Warehouse(session.database, session.files, out, run_id)


def list_rows(warehouse: Warehouse, span: Span) -> Rows:
    """Rows in the form that `make_traffic` takes."""
    return sorted((row["dt"], row["event"], row["n"]) for row in warehouse.rows("traffic_daily", span))


def read_tree(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a directory."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_staged_days_overlay_published_ones(session: AnalysisSession, tmp_path: Path) -> None:
    """A run reads what it staged, all others what is published; an empty staged day removes the published one."""
    out = str(tmp_path)
    first_run = open_warehouse(session, out, "first")
    first_run.open_table("traffic_daily", BOTH)
    assert session.database.describe("SELECT * FROM traffic_daily") == {
        column.name: get_duckdb_type(column) for column in TABLES["traffic_daily"].columns
    }
    assert list_rows(first_run, BOTH) == []
    earlier, later = [(BEFORE, "msg.ack", 1), (BEFORE, "msg.accept", 2)], [(D, "msg.ack", 3)]
    assert first_run.stage("traffic_daily", make_traffic(earlier + later), BOTH) == 3
    first_run.publish(f"{out}/runs/first.json", b"{}\n", [])

    second_run = open_warehouse(session, out, "second")
    assert list_rows(second_run, BOTH) == sorted(earlier + later)
    assert second_run.stage("traffic_daily", make_traffic([]), Span(D, D)) == 0
    assert list_rows(second_run, BOTH) == sorted(earlier)
    assert list_rows(open_warehouse(session, out), Span(D, D)) == later
    second_run.publish(f"{out}/runs/second.json", b"{}\n", [])
    assert open_warehouse(session, out).days("traffic_daily") == [BEFORE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "tables"]


def test_writes_one_sorted_file_per_day(session: AnalysisSession, tmp_path: Path) -> None:
    """The order of rows does not matter."""
    rows: Rows = [(D, f"event {n % 50}", n) for n in range(50)] + [(BEFORE, "msg.ack", 1)]
    outs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for out, ordered in zip(outs, (rows, rows[::-1]), strict=True):
        warehouse = open_warehouse(session, out, "run")
        warehouse.stage("traffic_daily", make_traffic(ordered), BOTH)
        warehouse.publish(f"{out}/runs/run.json", b"", [])
    parquet_files = [sorted(Path(out).rglob("*.parquet")) for out in outs]
    assert len(parquet_files[0]) == 2
    assert [path.read_bytes() for path in parquet_files[0]] == [path.read_bytes() for path in parquet_files[1]]
    assert open_warehouse(session, outs[0]).list_files("traffic_daily", Span(D, D)) == [
        f"file:{outs[0]}/tables/traffic_daily/dt={D}/part-0.parquet"
    ]


_SELECT = f"SELECT {{}} FROM (SELECT DATE '{D}' AS dt, 'a' AS node, '' AS proto, 'x' AS event, 1 AS n, 2 AS bytes)"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("dt, node, proto, event, n", "traffic: traffic_daily: no column bytes"),
        ("*, n AS m", "traffic: traffic_daily: undeclared column m"),
        (
            "* REPLACE (bytes::VARCHAR AS bytes)",
            "traffic: traffic_daily: column bytes is VARCHAR, declared as bigint",
        ),
        (
            "* REPLACE (dt + 1 AS dt)",
            "traffic: traffic_daily: column dt has 2026-11-21, not of 2026-11-19 to 2026-11-20",
        ),
    ],
)
def test_rejects_undeclared_output_of_job(
    session: AnalysisSession, tmp_path: Path, columns: str, message: str
) -> None:
    """By job, table and column."""
    with pytest.raises(TableMismatchError) as caught:
        open_warehouse(session, str(tmp_path), "run").stage("traffic_daily", _SELECT.format(columns), BOTH, "traffic")
    assert str(caught.value) == message


def test_accepts_other_integers_and_nulls(session: AnalysisSession, tmp_path: Path) -> None:
    """As functions return them."""
    warehouse = open_warehouse(session, str(tmp_path), "run")
    warehouse.stage("traffic_daily", _SELECT.format("* REPLACE (NULL AS node, n::HUGEINT AS n, NULL AS bytes)"), BOTH)
    [row] = warehouse.rows("traffic_daily", BOTH)
    assert (row["node"], row["n"], row["bytes"]) == (None, 1, None)


def test_files_do_not_depend_on_other_days(session: AnalysisSession, tmp_path: Path) -> None:
    """Whether a column has nulls on another day of the run."""
    rows = make_traffic([(BEFORE, "msg.ack", 1), (D, "msg.ack", 2)])
    rows[0]["bytes"] = None
    for name, span in (("both", BOTH), ("one", Span(D, D))):
        warehouse = open_warehouse(session, str(tmp_path / name), "run")
        warehouse.stage("traffic_daily", [row for row in rows if row["dt"] in span], span)
        warehouse.publish(f"{tmp_path}/{name}/runs/run.json", b"{}", [])
    path = f"tables/traffic_daily/dt={D}/part-0.parquet"
    assert (tmp_path / "both" / path).read_bytes() == (tmp_path / "one" / path).read_bytes()


class RemoteFileSystem:
    """Files at `remote:/...`, in a local directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getattr__(self, name: str) -> Any:
        method = getattr(LocalFileSystem(), name)

        def call(*args: Any) -> Any:
            local = [
                str(one).replace("remote:", str(self._root)) if str(one).startswith("remote:") else one
                for one in args
            ]
            found = method(*local)
            if name != "list":
                return found
            return [replace(file, path=file.path.replace(f"file:{self._root}", "remote:")) for file in found]

        return call


def test_reads_published_remote_files_again(session: AnalysisSession, tmp_path: Path) -> None:
    """Copies of what a run has replaced are not read after its publication."""
    files: Any = RemoteFileSystem(tmp_path / "remote")
    for number in (1, 2):
        warehouse = Warehouse(
            session.database, files, "remote:/out", f"run{number}", str(tmp_path / f"local{number}")
        )
        # As a run does, which reads the history of its span.
        warehouse.open_table("traffic_daily", BOTH)
        warehouse.stage("traffic_daily", make_traffic([(D, "msg.ack", number)]), BOTH)
        warehouse.publish(f"remote:/out/runs/{number}.json", b"{}", [])
        assert list_rows(warehouse, BOTH) == [(D, "msg.ack", number)]


def test_reads_files_without_later_columns(session: AnalysisSession, tmp_path: Path) -> None:
    """Earlier versions wrote fewer columns; all are there, and null."""
    path = tmp_path / "tables" / "traffic_daily" / f"dt={D}" / "old.parquet"
    path.parent.mkdir(parents=True)
    session.database.execute(f"COPY (SELECT 'msg.ack' AS event, 3 AS n) TO '{path}'")
    [row] = open_warehouse(session, str(tmp_path)).rows("traffic_daily", BOTH)
    assert (row["dt"], row["event"], row["n"], row["node"]) == (D, "msg.ack", 3, None)


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
