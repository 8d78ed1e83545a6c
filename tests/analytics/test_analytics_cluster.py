"""
A nightly run by `spark-submit`, and one on a Spark cluster of several processes: the tables are those of a run with
DuckDB, byte by byte.

The second takes minutes and gigabytes of memory: `make analytics-cluster-test`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import click
import orjson
import pytest

import analytics
from analytics.benchmark import digest_files
from analytics.errors import EXIT_OK
from analytics.java import find_java
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec

ROOT = Path(analytics.__file__).parents[1]
DAY = date(2026, 10, 23)
_WORKERS = 2
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ComparedNight:
    """
    :param tables: path to digest of the files of all tables that a run with DuckDB has written.
    :param seconds: duration of that run.
    """

    folder: Path
    tables: dict[str, str]
    seconds: float


def make_nightly_arguments(folder: Path, out: Path) -> list[str]:
    """Analyse both days with the pseudonyms of the first run."""
    paths = ["--logs", f"{folder}/logs", "--out", str(out), "--keys", f"{folder}/pseudonyms.keys"]
    return ["nightly", *paths, "--from", "2026-10-22", "--to", str(DAY)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ComparedNight:
    """Two days of two nodes, analysed with DuckDB."""
    folder = tmp_path_factory.mktemp("local")
    spec = SampleSpec(days=2, nodes=("a", "b"), wallets=40, messages_per_day=200, gauge_s=600, incidents=False)
    generate_logs(folder / "logs", spec)
    command = ["-m", "analytics", *make_nightly_arguments(folder, folder / "out"), "--engine", "duckdb"]
    started = time.monotonic()
    subprocess.run([sys.executable, *command], env=make_environment(), cwd=ROOT, check=True, capture_output=True)
    return ComparedNight(folder, digest_files(folder / "out/tables"), time.monotonic() - started)


def make_environment() -> dict[str, str]:
    """Environment with Java and Python for Spark."""
    return {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }


def find_spark_home() -> Path:
    """Directory of Spark's scripts and jars."""
    import pyspark

    return Path(pyspark.__file__).parent


def run_spark_submit(local: ComparedNight, out: Path, *options: str, conf: Sequence[str]) -> float:
    """Analyse both days with `spark-submit`, and compare the tables. :return: seconds."""
    program = Path(analytics.__file__).with_name("__main__.py")
    settings = [word for setting in conf for word in ("--conf", setting)]
    started = time.monotonic()
    completed = subprocess.run(
        [
            find_spark_home() / "bin/spark-submit",
            *options,
            *("--driver-memory", "1g"),
            *settings,
            program,
            *make_nightly_arguments(local.folder, out),
        ],
        capture_output=True,
        text=True,
        env=make_environment(),
        cwd=out.parent,
        check=False,
    )
    seconds = time.monotonic() - started
    # spark-submit sends both streams of Python to standard output.
    assert completed.returncode == EXIT_OK, completed.stdout + completed.stderr
    assert completed.stdout.splitlines()[-1:] == [f"{out}/report/{DAY}/index.html"]
    assert digest_files(out / "tables") == local.tables
    return seconds


def test_runs_with_spark_submit(local: ComparedNight, tmp_path: Path) -> None:
    conf = ["spark.sql.shuffle.partitions=2", "spark.ui.enabled=false"]
    run_spark_submit(local, tmp_path / "out", "--master", "local[2]", conf=conf)


def test_runs_on_cluster(local: ComparedNight, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A master and two workers with executors, all separate processes."""
    event_logs = tmp_path / "events"
    event_logs.mkdir()
    conf = [
        "spark.driver.host=127.0.0.1",
        "spark.executor.memory=512m",
        f"spark.executorEnv.PYTHONPATH={ROOT}",
        "spark.sql.shuffle.partitions=4",
        "spark.eventLog.enabled=true",
        f"spark.eventLog.dir={event_logs.as_uri()}",
        "spark.eventLog.compress=false",
        "spark.eventLog.rolling.enabled=false",
    ]
    with start_cluster(tmp_path) as master:
        seconds = run_spark_submit(local, tmp_path / "out", "--master", master, conf=conf)
    (event_log,) = event_logs.iterdir()
    events = [orjson.loads(line) for line in event_log.read_bytes().splitlines()]
    used = {event["Task Info"]["Executor ID"] for event in events if event["Event"] == "SparkListenerTaskEnd"}
    assert len(used) == _WORKERS
    with capsys.disabled():
        click.echo(f"\ntwo days on a cluster of {_WORKERS}: {seconds:.0f} s; with DuckDB: {local.seconds:.0f} s")


@contextmanager
def start_cluster(directory: Path) -> Iterator[str]:
    """
    Run a standalone cluster on loopback.

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
            env={**make_environment(), "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""},
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
