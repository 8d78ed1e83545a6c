"""
The nightly analysis on S3 and HDFS: the results are those on a local disk, also of runs that were killed while they
published.

The servers are installed by `make .s3 .hdfs`; `make analytics-cluster-test` runs these tests.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

import analytics
from analytics.database import Database
from analytics.errors import EXIT_OK, EXIT_USAGE, AnalyticsError
from analytics.files import FileSystem
from analytics.job import Span
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec
from analytics.spark_session import SMALL_INPUT_CONF
from analytics.writing.runs import commit_publication, has_journal, recover_publication
from analytics.writing.warehouse import Warehouse
from tests.analytics.processes import list_process_tree, wait_for_exit
from tests.analytics.publication import MANIFEST, MOVES, NEW, OLD, STAGED, KilledFileSystem, KilledProcess
from tests.analytics.stores.servers import S3Server, Store, start_hdfs, start_s3

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(analytics.__file__).parents[1]
DAY = date(2026, 11, 16)
_PUBLICATION_TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with start_s3() as server:
        yield server


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with start_hdfs(tmp_path_factory.mktemp("hdfs")) as store:
        yield store


@pytest.fixture(params=["s3", "hdfs"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each store in its own tests."""
    server: S3Server | Store = request.getfixturevalue(request.param)
    return server.store if isinstance(server, S3Server) else server


def read_tree(files: FileSystem, url: str) -> dict[str, bytes]:
    """Contents of all files below a directory."""
    return {file.path.removeprefix(f"{url}/"): files.read(file.path) for file in files.list(url)}


def write_tree(files: FileSystem, url: str, tree: dict[str, bytes]) -> None:
    files.delete(url)
    for name, content in tree.items():
        files.write(f"{url}/{name}", content)


def test_files(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    """All operations, as on a local disk."""
    files, url = store.open_files(spark), f"{store.url}/files"
    data = bytes(range(256)) * 9
    files.write(f"{url}/a/b.bin", b"before")
    files.write(f"{url}/a/b.bin", data)
    assert files.read(f"{url}/a/b.bin") == data
    assert files.read(f"{url}/a/b.bin", limit=4, offset=254) == data[254:258]
    assert files.list_names(f"{url}/a") == ["b.bin"]
    for content in (data, b"shorter"):
        (tmp_path / "local").write_bytes(content)
        files.upload(tmp_path / "local", f"{url}/a/c")
        files.download(f"{url}/a/c", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "local"]
    assert [(file.path, file.size) for file in files.list(url)] == [(f"{url}/a/b.bin", 2304), (f"{url}/a/c", 7)]
    files.move(f"{url}/a", f"{url}/new/place")
    assert files.list_names(f"{url}/new/place") == ["b.bin", "c"]
    assert files.is_directory(f"{url}/new") and not files.exists(f"{url}/a")
    with pytest.raises(AnalyticsError, match=f"^{url}/nope: no such") as caught:
        files.read(f"{url}/nope")
    assert caught.value.exit_status == EXIT_USAGE
    for mistake in (
        lambda: files.move(f"{url}/new/place/c", f"{url}/new/place/b.bin"),
        lambda: files.write(f"{url}/new/place", b""),
        lambda: files.upload(tmp_path / "nope", f"{url}/new/place/c"),
        lambda: files.upload(tmp_path, f"{url}/new/place/c"),
    ):
        with pytest.raises(AnalyticsError):
            mistake()
    assert read_tree(files, url) == {"new/place/b.bin": data, "new/place/c": b"shorter"}
    files.delete(url)
    assert not files.exists(url)


def test_publication_is_atomic_if_killed_on_s3(spark: SparkSession, s3: S3Server) -> None:
    """Killed after any request: before the journal nothing has changed, after it recovery completes all of it."""
    files, url = s3.store.open_files(spark), f"{s3.store.url}/atomic"
    # Where it was killed: before the journal, while it was there, or after it.
    phases: list[tuple[str, bool]] = []
    is_finished = False
    while not is_finished:
        write_tree(files, url, {**OLD, **STAGED})
        s3.stop_after("/_prepared", changes=len(phases))
        with suppress(AnalyticsError):
            commit_publication(files, url, MOVES, f"{url}/runs/run.json", MANIFEST)
            is_finished = True
        s3.go_on()
        found = {name: content for name, content in read_tree(files, url).items() if not name.startswith("_")}
        phase = "decided" if has_journal(files, url) else "before" if found == OLD else "after"
        recover_publication(files, url)
        assert read_tree(files, url) == (OLD if phase == "before" else NEW), len(phases)
        # Readers who find no journal find all or nothing.
        assert phase == "decided" or found in (OLD, NEW), len(phases)
        phases.append((phase, found in (OLD, NEW)))
    assert [phase for phase, _ in groupby(phases)] == [
        ("before", True),
        ("decided", True),
        ("decided", False),
        ("decided", True),
        ("after", True),
    ]


def test_publication_is_atomic_if_killed_on_hdfs(spark: SparkSession, hdfs: Store) -> None:
    """The same after any change of the name node."""
    files, url = hdfs.open_files(spark), f"{hdfs.url}/atomic"
    for changes in range(100):
        write_tree(files, url, {**OLD, **STAGED})
        killed = KilledFileSystem(files, changes)
        try:
            commit_publication(killed, url, MOVES, f"{url}/runs/run.json", MANIFEST)  # type: ignore[arg-type]
        except KilledProcess:
            recover_publication(files, url)
            assert read_tree(files, url) == (NEW if changes > 1 else OLD)
        else:
            break
    assert read_tree(files, url) == NEW


# `python -m analytics`, killed with its Java after some moves.
PROGRAM = """
import os, signal
from analytics.cli import main
from analytics.job import Span
from analytics.files import FileSystem
from tests.analytics.processes import list_process_tree
move, left = FileSystem.move, iter(range(MOVES))
def move_or_die(files, source, target):
    if next(left, None) is None:
        for pid in reversed(list(list_process_tree(os.getpid()))):
            os.kill(pid, signal.SIGKILL)
    move(files, source, target)
FileSystem.move = move_or_die
main()
"""


@dataclass(frozen=True, slots=True)
class LocalNight:
    """Logs of two days, and what `nightly` makes of them on a local disk."""

    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def start(self, logs: str, out: str, *options: str, program: Sequence[str] = ("-m", "analytics")) -> Night:
        """Start to analyse both days, with the pseudonyms of the first run."""
        days = ["--from", str(DAY), "--to", str(DAY + timedelta(1))]
        paths = ["--logs", logs, "--out", out, "--keys", str(self.folder / "pseudonyms.keys")]
        return start([sys.executable, *program, "nightly", *paths, *days, "--memory", "768m", *options])

    def start_on(self, store: Store, **program: Sequence[str]) -> Night:
        """The same for the logs in a store, into the store."""
        # As for small local input.
        small = [word for name, value in SMALL_INPUT_CONF.items() for word in ("--conf", f"{name}={value}")]
        return self.start(f"{store.url}/logs", f"{store.url}/out", *store.list_options(), *small, **program)

    def upload_logs(self, files: FileSystem, store: Store) -> None:
        for path in sorted(self.logs.rglob("*.jsonl*")):
            files.upload(path, f"{store.url}/logs/{path.relative_to(self.logs)}")


Night = subprocess.Popen[str]


def start(command: Sequence[str]) -> Night:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(night: Night) -> str:
    """Wait for its success. :return: what it has printed."""
    output, _ = night.communicate()
    assert night.returncode == EXIT_OK, output
    return output


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalNight:
    folder = tmp_path_factory.mktemp("local")
    spec = SampleSpec(DAY, 2, nodes=("a", "b"), wallets=40, messages_per_day=200, gauge_s=600, incidents=False)
    generate_logs(folder / "logs", spec)
    night = LocalNight(folder)
    finish(night.start(str(night.logs), str(night.out)))
    return night


def download(files: FileSystem, url: str, target: Path) -> None:
    """Copy a directory tree."""
    for file in files.list(url):
        path = target / file.path.removeprefix(f"{url}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.download(file.path, path)


def read_table(directory: Path) -> list[tuple[Any, ...]]:
    """All rows of a table, sorted, without what tells where the logs are."""
    parquet = f"read_parquet('{directory}/**/*.parquet', hive_partitioning = true, union_by_name = true)"
    where = "EXCLUDE (path, modified)" if directory.name == "inputs" else ""
    return sorted(duckdb.execute(f"SELECT * {where} FROM {parquet}").fetchall(), key=repr)


def read_reports(out: Path) -> dict[str, bytes]:
    """Files of all reports."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.glob("report/**/*.*")}


def hash_files(table: Path) -> Counter[tuple[str, str]]:
    """Number of the files of a table by directory and content."""
    return Counter(
        (str(path.parent.relative_to(table)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in table.rglob("*.parquet")
    )


def assert_equal_results(files: FileSystem, store: Store, local: LocalNight, target: Path) -> None:
    """Compare what is published in a store with the local results."""
    download(files, f"{store.url}/out", target)
    names = sorted(path.name for path in (local.out / "tables").iterdir())
    assert sorted(path.name for path in (target / "tables").iterdir()) == names
    for name in names:
        assert read_table(target / "tables" / name) == read_table(local.out / "tables" / name), name
    hashes = {folder: [hash_files(folder / "tables" / name) for name in names] for folder in (target, local.out)}
    different = [name for name, here, there in zip(names, *hashes.values(), strict=True) if here != there]
    # Where the logs are, and when they were written.
    assert different == ["inputs"]
    assert read_reports(target) == read_reports(local.out)
    assert sorted(path.name for path in target.iterdir()) == ["report", "runs", "tables"]


def test_night_on_s3(spark: SparkSession, s3: S3Server, local: LocalNight, tmp_path: Path) -> None:
    """The same as locally, after a run that was killed in the middle of its publication, which the next completes."""
    files, store = s3.store.open_files(spark), s3.store
    local.upload_logs(files, store)
    s3.stop_after("/_journal.json", changes=40, hang=True)
    killed = local.start_on(store)
    deadline = time.monotonic() + _PUBLICATION_TIMEOUT_S
    while not s3.has_stopped():
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[0]
        time.sleep(0.1)
    processes = list(list_process_tree(killed.pid))
    for pid in reversed(processes):
        os.kill(pid, SIGKILL)
    killed.communicate()
    assert wait_for_exit(processes) == []
    s3.go_on()
    check_interrupted(files, store)
    assert "completed an interrupted publication" in finish(local.start_on(store))
    assert_equal_results(files, store, local, tmp_path)
    command = [sys.executable, "-m", "analytics", "prune", "--dry-run", "--out", f"{store.url}/out"]
    assert finish(start([*command, *store.list_options()])).endswith("would delete 0 items\n")


def test_night_on_hdfs(spark: SparkSession, hdfs: Store, local: LocalNight, tmp_path: Path) -> None:
    """As on S3."""
    files = hdfs.open_files(spark)
    local.upload_logs(files, hdfs)
    killed = local.start_on(hdfs, program=["-c", PROGRAM.replace("MOVES", "20")])
    output, _ = killed.communicate()
    assert killed.returncode == -SIGKILL, output
    check_interrupted(files, hdfs)
    assert "completed an interrupted publication" in finish(local.start_on(hdfs))
    assert_equal_results(files, hdfs, local, tmp_path)


def check_interrupted(files: FileSystem, store: Store) -> None:
    """Some tables are published, others are not, and the journal says so."""
    out = f"{store.url}/out"
    assert has_journal(files, out)
    assert files.list(f"{out}/tables") and files.list(f"{out}/_staging")
    assert not files.exists(f"{out}/report") and not files.exists(f"{out}/runs")


def test_reads_what_it_last_wrote(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    """Local copies are replaced with the files: by a second version of a staged one, and by publication."""
    files, url = store.open_files(spark), f"{store.url}/copies"
    span = Span(DAY, DAY)

    def make_rows(n: int) -> list[dict[str, Any]]:
        return [{"dt": DAY, "node": "a", "proto": "didcomm", "event": "msg.ack", "n": n, "bytes": 0}]

    with Database(str(tmp_path)) as database:
        for run in ("first", "second"):
            warehouse = Warehouse(database, files, url, run, str(tmp_path / "local"))
            before = [row["n"] for row in warehouse.rows("traffic_daily", span)]
            for n in (2, 3) if before else (0, 1):
                warehouse.stage("traffic_daily", make_rows(n), span)
                assert [row["n"] for row in warehouse.rows("traffic_daily", span)] == [n]
            warehouse.publish(f"{url}/runs/{run}.json", b"{}", [])
            assert [row["n"] for row in warehouse.rows("traffic_daily", span)] == [n]
        assert before == [1]
        # A file of segments is rewritten where it is staged.
        files.write(f"{url}/_staging/third/events/dt={DAY}/batch={DAY}/stem.parquet", b"with repeated lines")
        warehouse = Warehouse(database, files, url, "third", str(tmp_path / "local"))
        [path] = warehouse.find_event_files(["stem"], [DAY])["stem"]
        [copy] = warehouse.localize_files([path])
        assert Path(copy).read_bytes() == b"with repeated lines"

        def rewrite(source: str, target: str) -> int:
            return Path(target).write_bytes(Path(source).read_bytes()[:4])

        warehouse.rewrite_file(path, rewrite)
        [copy] = warehouse.localize_files([path])
        assert Path(copy).read_bytes() == files.read(f"{warehouse.staging}/{path}") == b"with"
