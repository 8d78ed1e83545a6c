"""
A night given to `spark-submit`, and one on a Spark cluster of several processes.

The second takes minutes and gigabytes, so it runs when asked for: `make analytics-cluster-test`.
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
_PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> SampleTruth:
    """Logs of two quiet days of two nodes."""
    spec = SampleSpec(days=2, nodes=("a", "b"), wallets=40, messages_per_day=200, gauge_s=600, incidents=False)
    return generate_logs(tmp_path_factory.mktemp("logs"), spec)


def environment() -> dict[str, str]:
    """As on a machine where Spark is installed and Java is known."""
    return {**os.environ, "JAVA_HOME": str(find_java().home), "PYSPARK_PYTHON": sys.executable}


def spark_home() -> Path:
    """Where the scripts and jars of the package are."""
    import pyspark

    return Path(pyspark.__file__).parent


def submit(truth: SampleTruth, out: Path, *options: str) -> None:
    """Have both days analysed by `spark-submit`."""
    program = Path(analytics.__file__).with_name("__main__.py")
    nightly = ["nightly", "--logs", str(truth.directory), "--out", str(out), "--from", "2026-10-22", "--to", str(DAY)]
    done = subprocess.run(
        [spark_home() / "bin/spark-submit", *options, program, *nightly],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=out.parent,
        check=False,
    )
    # Of Python, spark-submit sends both to standard output.
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1:] == [f"{out}/report/{DAY}/index.html"]


def check(spark: SparkSession, truth: SampleTruth, out: Path) -> None:
    """The ledger of both days is what is known of them."""
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


def test_spark_submit(spark: SparkSession, truth: SampleTruth, tmp_path: Path) -> None:
    """The same program, unchanged, with the options of spark-submit."""
    conf = ["--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.ui.enabled=false"]
    submit(truth, tmp_path / "out", "--master", "local[2]", "--driver-memory", "1g", *conf)
    check(spark, truth, tmp_path / "out")


def test_cluster(spark: SparkSession, truth: SampleTruth, tmp_path: Path) -> None:
    """A master and two workers, each a process, and executors of their own; as one machine has it."""
    with cluster(tmp_path) as master:
        conf = ["spark.driver.host=127.0.0.1", "spark.executor.memory=512m", "spark.sql.shuffle.partitions=4"]
        options = [word for setting in conf for word in ("--conf", setting)]
        submit(truth, tmp_path / "out", "--master", master, "--driver-memory", "1g", *options)
        # Both workers had a part in it.
        assert len(list((tmp_path / "work").glob("*/app-*/*/stderr"))) >= _WORKERS
    check(spark, truth, tmp_path / "out")


@contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """A standalone cluster on loopback. :return: the URL of its master."""
    with ExitStack() as stack:
        log = directory / "master.log"
        stack.enter_context(started(log, "master.Master", "--host", "127.0.0.1", "--port", "0"))
        [url] = waited_for(log, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)\n", 1)
        for number in range(_WORKERS):
            place = directory / f"work/{number}"
            place.mkdir(parents=True)
            options = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--work-dir", str(place), url]
            stack.enter_context(started(directory / f"worker-{number}.log", "worker.Worker", *options))
        waited_for(log, r"Registering worker 127\.0\.0\.1:\d+", _WORKERS)
        yield url


@contextmanager
def started(log: Path, name: str, *options: str) -> Iterator[None]:
    """A daemon of Spark, as its own scripts start it."""
    program = str(spark_home() / "bin/spark-class")
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, f"org.apache.spark.deploy.{name}", "--webui-port", "0", *options],
            stdout=output,
            stderr=output,
            env={**environment(), "SPARK_LOCAL_IP": "127.0.0.1"},
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def waited_for(log: Path, pattern: str, count: int) -> list[str]:
    """What a log says, once it has said it so often."""
    until = time.monotonic() + _PATIENCE_S
    while len(found := re.findall(pattern, log.read_text())) < count:
        if time.monotonic() > until:
            pytest.fail(f"{log.name} does not say {pattern} {count} times")
        time.sleep(0.1)
    return found
