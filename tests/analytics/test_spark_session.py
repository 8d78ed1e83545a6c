"""Spark sessions: addresses, precedence of settings, and clean-up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import analytics
from analytics.errors import AnalyticsError
from analytics.java import find_java, set_java_home
from analytics.spark_session import (
    SessionOptions,
    _describe_error,
    _extract_java_error,
    _kill_java,
    get_default_memory,
    open_session,
)
from tests.analytics.processes import is_running, list_process_tree

ROOT = Path(analytics.__file__).parents[1]
_LISTENING = "0A"

# Prints the requested settings as JSON, then runs the given code.
PROGRAM = """
import json, os, sys
from analytics.java import find_java, set_java_home
from analytics.spark_session import SessionOptions, open_session
set_java_home(find_java())
request = json.loads(sys.argv[1])
with open_session(SessionOptions(**request["options"])) as spark:
    context = spark.sparkContext
    report = {name: context.getConf().get(name) for name in request["settings"]}
    report["heap"] = spark._jvm.java.lang.Runtime.getRuntime().maxMemory()
    report["master"] = context.master
    report["count"] = spark.range(10).repartition(4).count()
    print(json.dumps(report), flush=True)
    exec(request["then"])
"""


def start_session(
    *settings: str,
    then: str = "",
    environ: dict[str, str] | None = None,
    inside: tuple[str, ...] = (),
    **options: object,
) -> SessionProcess:
    """
    Start a process with a Spark session.

    :param then: code that it executes after it has printed the values of `settings`.
    :param inside: a command line that runs the command appended to it.
    """
    request = json.dumps({"options": options, "settings": settings, "then": then})
    return SessionProcess(
        subprocess.Popen(
            [*inside, sys.executable, "-c", PROGRAM, request],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


class SessionProcess:
    """A process with a session, and its descendants."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self.process = process
        line = process.stdout.readline()
        if not line:
            pytest.fail(f"no session: {process.communicate()[1]}")
        self.report = json.loads(line)
        self.process_tree = list(list_process_tree(process.pid))

    def wait(self) -> tuple[int, str]:
        """Exit status and standard error, after the process and its descendants have ended."""
        _, stderr = self.process.communicate()
        assert [pid for pid in self.process_tree if is_running(pid)] == []
        return self.process.returncode, stderr


def find_listening_addresses(pids: list[int]) -> set[str]:
    """Addresses, as in /proc, on which these processes listen."""
    sockets = set()
    for pid in pids:
        # The process can end meanwhile.
        with suppress(FileNotFoundError):
            for descriptor in list(Path(f"/proc/{pid}/fd").iterdir()):
                with suppress(FileNotFoundError):
                    sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_local_session_uses_loopback_and_scratch_only(tmp_path: Path) -> None:
    """The web UI too; no output, and no files are left."""
    running = start_session(
        "spark.ui.enabled",
        "spark.sql.session.timeZone",
        "spark.sql.parquet.compression.codec",
        "spark.local.dir",
        then="input()",
        memory="512m",
        scratch=str(tmp_path),
        ui=True,
    )
    report = running.report
    assert report["spark.ui.enabled"] == "true"
    assert report["spark.sql.session.timeZone"] == "UTC"
    assert report["spark.sql.parquet.compression.codec"] == "zstd"
    assert 400 << 20 < report["heap"] <= 512 << 20
    assert Path(report["spark.local.dir"]).parent == tmp_path
    assert len(running.process_tree) > 1
    addresses = find_listening_addresses(running.process_tree)
    assert addresses and addresses <= LOOPBACK
    # No open files elsewhere in /tmp, where the project itself may be.
    allowed_prefixes = (str(tmp_path), sys.prefix)
    java_process = running.process_tree[-1]
    opened = []
    for descriptor in Path(f"/proc/{java_process}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(os.readlink(descriptor))
    assert [path for path in opened if path.startswith("/tmp/") and not path.startswith(allowed_prefixes)] == []
    assert running.process.stdin
    running.process.stdin.write("\n")
    running.process.stdin.flush()
    assert running.wait() == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_configuration_overrides_defaults(tmp_path: Path) -> None:
    """spark-defaults.conf and options of spark-submit, except settings on which results depend."""
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.driver.memory 640m\n"
        "spark.sql.shuffle.partitions=3\n"
        "spark.ui.enabled false\n"
        "spark.sql.session.timeZone Asia/Tokyo\n"
        "spark.master local[1]\n"
    )
    (tmp_path / "log4j2.properties").write_text("rootLogger.level = off\nstatus = off\n")
    running = start_session(
        "spark.sql.shuffle.partitions",
        "spark.sql.parquet.compression.codec",
        "spark.sql.session.timeZone",
        "spark.app.name",
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold",
        environ={
            "SPARK_CONF_DIR": str(tmp_path),
            "PYSPARK_SUBMIT_ARGS": "--conf spark.sql.parquet.compression.codec=snappy pyspark-shell",
        },
        settings={"spark.app.name": "mine"},
        then="raise SystemExit(3)",
    )
    assert 500 << 20 < running.report.pop("heap") <= 640 << 20
    assert running.report == {
        "master": "local[1]",
        "count": 10,
        "spark.sql.shuffle.partitions": "3",
        "spark.sql.parquet.compression.codec": "snappy",
        "spark.sql.session.timeZone": "UTC",
        "spark.app.name": "mine",
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    }
    assert running.wait()[0] == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_java_ends_with_process(tmp_path: Path, number: signal.Signals) -> None:
    """During a query; no file is left."""
    # Before the query runs, py4j deletes Java objects, and an exception of a signal handler in a finalizer is lost.
    then = (
        "import signal, threading, time\n"
        "def tell():\n"
        "    while not context.statusTracker().getActiveJobsIds():\n"
        "        time.sleep(0.05)\n"
        "    print('busy', flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "threading.Thread(target=tell, daemon=True).start()\n"
        "spark.range(10**15).selectExpr('sum(id * id % 7)').collect()"
    )
    running = start_session(then=then, memory="512m", scratch=str(tmp_path))
    assert running.process.stdout and running.process.stdout.readline() == "busy\n"
    running.process.send_signal(number)
    assert running.wait()[0] != 0
    assert list(tmp_path.iterdir()) == []


def test_reports_killed_java(tmp_path: Path) -> None:
    """For example by the OOM killer; the error of the interrupted call is a note."""
    (tmp_path / "java.log").touch()
    process = subprocess.Popen(["sleep", "inf"])
    gateway, error = SimpleNamespace(proc=process), AnalyticsError("a job: connection refused")
    assert _describe_error(error, gateway, str(tmp_path)) is error
    process.kill()
    process.wait()
    report = _describe_error(error, gateway, str(tmp_path))
    assert str(report) == "Java exited by signal 9: no output; --memory sets its heap size"
    assert "connection refused" in report.__notes__[0]


UNRESOLVABLE_HOST = ("unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname nobody.invalid && exec "$@"', "sh")


@pytest.mark.exhaustive
def test_starts_on_host_without_address(tmp_path: Path) -> None:
    """As where only DNS knows the host name and the unit forbids DNS."""
    if subprocess.run([*UNRESOLVABLE_HOST, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no other host name can be had here: util-linux, and user namespaces or root, are needed")
    running = start_session(inside=UNRESOLVABLE_HOST, memory="512m", scratch=str(tmp_path))
    assert running.report["count"] == 10
    status, stderr = running.wait()
    assert (status, "UnknownHost" in stderr) == (0, False)


def test_extracts_last_cause_of_java_error(tmp_path: Path) -> None:
    log = tmp_path / "java.log"
    log.write_text("Picked up X\nException: a\n\tat b\nCaused by: c\n\tat d\nCaused by: e: f\n\t... 3 more\n")
    assert _extract_java_error(log) == "Exception: a; Caused by: e: f"


def test_failed_java_start_is_one_line(tmp_path: Path) -> None:
    """With Java's reason."""
    set_java_home(find_java())
    options = SessionOptions(memory="100000g", scratch=str(tmp_path))
    with pytest.raises(AnalyticsError, match="^Java did not start: .*heap"), open_session(options):
        pytest.fail("with a heap that no machine has")
    assert list(tmp_path.iterdir()) == []


def test_default_memory_is_at_most_a_quarter() -> None:
    megabytes = int(get_default_memory().removesuffix("m"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < megabytes <= min(1024, total // 2**22)


def test_kills_starting_java_though_a_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ended meanwhile is ignored."""
    with subprocess.Popen(["sleep", "inf"], process_group=0) as child:
        children_files = [Path(f"/proc/self/task/{thread}/children") for thread in ("0", str(os.getpid()))]
        monkeypatch.setattr(
            "analytics.spark_session.Path", lambda path: SimpleNamespace(glob=lambda pattern: children_files)
        )
        # The test process has children of others; none of them may be killed.
        monkeypatch.setattr(os, "killpg", lambda pid, number: child.send_signal(number) if pid == child.pid else None)
        _kill_java(None)
        assert child.wait(60) == -signal.SIGKILL
