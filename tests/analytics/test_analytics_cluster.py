"""
A nightly run by `spark-submit`, and one on a Spark cluster of several processes.

The second takes minutes and gigabytes of memory: `make analytics-cluster-test`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import analytics
from analytics.errors import EXIT_OK
from analytics.java import find_java
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec, SampleTruth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = date(2026, 10, 23)
COLUMNS = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open", "orphans", "again", "overdue")
_WORKERS = 2
_START_TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> SampleTruth:
    """Logs of two days without incidents, of two nodes."""
    spec = SampleSpec(days=2, nodes=("a", "b"), wallets=40, messages_per_day=200, gauge_s=600, incidents=False)
    return generate_logs(tmp_path_factory.mktemp("logs"), spec)


def make_environment() -> dict[str, str]:
    """Environment with Java and Python for Spark."""
    return {**os.environ, "JAVA_HOME": str(find_java().home), "PYSPARK_PYTHON": sys.executable}


def find_spark_home() -> Path:
    """Directory of Spark's scripts and jars."""
    import pyspark

    return Path(pyspark.__file__).parent


def run_spark_submit(truth: SampleTruth, out: Path, *options: str) -> None:
    """Analyse both days with `spark-submit`."""
    program = Path(analytics.__file__).with_name("__main__.py")
    nightly = ["nightly", "--logs", str(truth.directory), "--out", str(out), "--from", "2026-10-22", "--to", str(DAY)]
    completed = subprocess.run(
        [find_spark_home() / "bin/spark-submit", *options, program, *nightly],
        capture_output=True,
        text=True,
        env=make_environment(),
        cwd=out.parent,
        check=False,
    )
    # spark-submit sends both streams of Python to standard output.
    assert completed.returncode == EXIT_OK, completed.stdout + completed.stderr
    assert completed.stdout.splitlines()[-1:] == [f"{out}/report/{DAY}/index.html"]


def check_results(spark: SparkSession, truth: SampleTruth, out: Path) -> None:
    """Assert that the ledger of both days agrees with the ground truth."""
    rows = spark.read.parquet(f"{out}/tables/ledger_daily").orderBy("dt").collect()
    assert [row.dt for row in rows] == list(truth.days)
    for row in rows:
        ledger = truth.days[row.dt].ledger
        expected = {name: getattr(ledger, name) for name in COLUMNS if name != "orphans"}
        assert {name: row[name] for name in expected} == expected
    events = spark.read.parquet(f"{out}/tables/events").groupBy("dt").count().collect()
    assert {row.dt: row["count"] for row in events if row.dt in truth.days} == {
        day: facts.lines for day, facts in truth.days.items()
    }


def test_runs_with_spark_submit(spark: SparkSession, truth: SampleTruth, tmp_path: Path) -> None:
    conf = ["--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.ui.enabled=false"]
    run_spark_submit(truth, tmp_path / "out", "--master", "local[2]", "--driver-memory", "1g", *conf)
    check_results(spark, truth, tmp_path / "out")


def test_runs_on_cluster(spark: SparkSession, truth: SampleTruth, tmp_path: Path) -> None:
    """A master and two workers with executors, all separate processes."""
    with start_cluster(tmp_path) as master:
        conf = ["spark.driver.host=127.0.0.1", "spark.executor.memory=512m", "spark.sql.shuffle.partitions=4"]
        options = [word for setting in conf for word in ("--conf", setting)]
        run_spark_submit(truth, tmp_path / "out", "--master", master, "--driver-memory", "1g", *options)
        # Both workers took part.
        assert len(list((tmp_path / "work").glob("*/app-*/*/stderr"))) >= _WORKERS
    check_results(spark, truth, tmp_path / "out")


@contextmanager
def start_cluster(directory: Path) -> Iterator[str]:
    """
    Run a standalone cluster on loopback.

    :return: the URL of its master.

    :return: the URL of its master.
    """
    with ExitStack() as stack:
        log = directory / "master.log"
        stack.enter_context(start_spark_daemon(log, "master.Master", "--host", "127.0.0.1", "--port", "0"))
        [url] = wait_for_log(log, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)\n", 1)
        for number in range(_WORKERS):
            work_directory = directory / f"work/{number}"
            work_directory.mkdir(parents=True)
            options = [
                "--host",
                "127.0.0.1",
                "--cores",
                "1",
                "--memory",
                "1g",
                "--work-dir",
                str(work_directory),
                url,
            ]
            stack.enter_context(start_spark_daemon(directory / f"worker-{number}.log", "worker.Worker", *options))
        wait_for_log(log, r"Registering worker 127\.0\.0\.1:\d+", _WORKERS)
        yield url


@contextmanager
def start_spark_daemon(log: Path, name: str, *options: str) -> Iterator[None]:
    """Run a daemon of Spark, as Spark's own scripts do."""
    program = str(find_spark_home() / "bin/spark-class")
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, f"org.apache.spark.deploy.{name}", "--webui-port", "0", *options],
            stdout=output,
            stderr=output,
            env={**make_environment(), "SPARK_LOCAL_IP": "127.0.0.1"},
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def wait_for_log(log: Path, pattern: str, count: int) -> list[str]:
    """Wait until a log has `count` matches of a pattern; the matches."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while len(found := re.findall(pattern, log.read_text())) < count:
        if time.monotonic() > deadline:
            pytest.fail(f"{log.name} does not say {pattern} {count} times")
        time.sleep(0.1)
    return found
