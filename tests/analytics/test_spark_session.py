"""The Spark session of a run: where it listens, what wins over its defaults, and that nothing of it is left."""

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
from tests.analytics.processes import family, lives

ROOT = Path(analytics.__file__).parents[1]
_LISTENING = "0A"

# Prints the requested settings as JSON, then runs the given code.
PROGRAM = """
import json, os, sys
from analytics.java import find_java, set_java_home
from analytics.spark_session import SessionOptions, open_session
set_java_home(find_java())
asked = json.loads(sys.argv[1])
with open_session(SessionOptions(**asked["options"])) as spark:
    context = spark.sparkContext
    told = {name: context.getConf().get(name) for name in asked["settings"]}
    told["heap"] = spark._jvm.java.lang.Runtime.getRuntime().maxMemory()
    told["master"] = context.master
    told["count"] = spark.range(10).repartition(4).count()
    print(json.dumps(told), flush=True)
    exec(asked["then"])
"""


def start(
    *settings: str,
    then: str = "",
    environ: dict[str, str] | None = None,
    inside: tuple[str, ...] = (),
    **options: object,
) -> Running:
    """
    A process with a session.

    :param then: what it does, once it has said which `settings` it has.
    :param inside: a command that runs the one that follows it.
    """
    asked = json.dumps({"options": options, "settings": settings, "then": then})
    return Running(
        subprocess.Popen(
            [*inside, sys.executable, "-c", PROGRAM, asked],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


class Running:
    """A process with a session, and all that it starts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self.process = process
        line = process.stdout.readline()
        if not line:
            pytest.fail(f"no session: {process.communicate()[1]}")
        self.told = json.loads(line)
        self.family = list(family(process.pid))

    def ended(self) -> tuple[int, str]:
        """Its status and what it wrote to standard error; everything that it started has ended."""
        _, stderr = self.process.communicate()
        assert [pid for pid in self.family if lives(pid)] == []
        return self.process.returncode, stderr


def find_listening_addresses(pids: list[int]) -> set[str]:
    """Addresses, as /proc has them, that these processes take connections on."""
    sockets = set()
    for pid in pids:
        # It may have ended, and close what it has open.
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


def test_local_mode(tmp_path: Path) -> None:
    """Loopback only, its pages too; temporary files in one place; quiet; and at the end nothing is left."""
    running = start(
        "spark.ui.enabled",
        "spark.sql.session.timeZone",
        "spark.sql.parquet.compression.codec",
        "spark.local.dir",
        then="input()",
        memory="512m",
        scratch=str(tmp_path),
        ui=True,
    )
    told = running.told
    assert told["spark.ui.enabled"] == "true"
    assert told["spark.sql.session.timeZone"] == "UTC"
    assert told["spark.sql.parquet.compression.codec"] == "zstd"
    assert 400 << 20 < told["heap"] <= 512 << 20
    assert Path(told["spark.local.dir"]).parent == tmp_path
    assert len(running.family) > 1
    addresses = find_listening_addresses(running.family)
    assert addresses and addresses <= LOOPBACK
    # Nothing of it is anywhere else; the project itself may be.
    places = (str(tmp_path), sys.prefix)
    java_process = running.family[-1]
    opened = []
    for descriptor in Path(f"/proc/{java_process}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(os.readlink(descriptor))
    assert [path for path in opened if path.startswith("/tmp/") and not path.startswith(places)] == []
    assert running.process.stdin
    running.process.stdin.write("\n")
    running.process.stdin.flush()
    assert running.ended() == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_what_is_configured_wins(tmp_path: Path) -> None:
    """spark-defaults.conf and the options of spark-submit, but for what results depend on."""
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.driver.memory 640m\n"
        "spark.sql.shuffle.partitions=3\n"
        "spark.ui.enabled false\n"
        "spark.sql.session.timeZone Asia/Tokyo\n"
        "spark.master local[1]\n"
    )
    (tmp_path / "log4j2.properties").write_text("rootLogger.level = off\nstatus = off\n")
    running = start(
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
    assert 500 << 20 < running.told.pop("heap") <= 640 << 20
    assert running.told == {
        "master": "local[1]",
        "count": 10,
        "spark.sql.shuffle.partitions": "3",
        "spark.sql.parquet.compression.codec": "snappy",
        "spark.sql.session.timeZone": "UTC",
        "spark.app.name": "mine",
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    }
    assert running.ended()[0] == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_java_ends_with_the_process(tmp_path: Path, number: signal.Signals) -> None:
    """In the middle of a query, and before the process does; no file is left."""
    # Before the query has begun, objects of Java are deleted, and what a handler raises meanwhile is lost.
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
    running = start(then=then, memory="512m", scratch=str(tmp_path))
    assert running.process.stdout and running.process.stdout.readline() == "busy\n"
    running.process.send_signal(number)
    assert running.ended()[0] != 0
    assert list(tmp_path.iterdir()) == []


def test_java_that_is_killed(tmp_path: Path) -> None:
    """By the system, when memory is short: that is told, and not what became of the call that was going on."""
    (tmp_path / "java.log").touch()
    process = subprocess.Popen(["sleep", "inf"])
    gateway, error = SimpleNamespace(proc=process), AnalyticsError("a job: connection refused")
    assert _describe_error(error, gateway, str(tmp_path)) is error
    process.kill()
    process.wait()
    told = _describe_error(error, gateway, str(tmp_path))
    assert str(told) == "Java exited by signal 9: no output; --memory sets its heap size"
    assert "connection refused" in told.__notes__[0]


NAMELESS = ("unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname nobody.invalid && exec "$@"', "sh")


@pytest.mark.exhaustive
def test_a_host_whose_name_has_no_address(tmp_path: Path) -> None:
    """As where only DNS knows it and the unit allows no question: a session of this host alone does not need it."""
    if subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no other host name can be had here: util-linux, and user namespaces or root, are needed")
    running = start(inside=NAMELESS, memory="512m", scratch=str(tmp_path))
    assert running.told["count"] == 10
    status, stderr = running.ended()
    assert (status, "UnknownHost" in stderr) == (0, False)


def test_why_java_does_not_start(tmp_path: Path) -> None:
    """The last cause says what to do something about."""
    log = tmp_path / "java.log"
    log.write_text("Picked up X\nException: a\n\tat b\nCaused by: c\n\tat d\nCaused by: e: f\n\t... 3 more\n")
    assert _extract_java_error(log) == "Exception: a; Caused by: e: f"


def test_java_that_does_not_start(tmp_path: Path) -> None:
    """Is told in a line, with the reason that Java gives."""
    set_java_home(find_java())
    options = SessionOptions(memory="100000g", scratch=str(tmp_path))
    with pytest.raises(AnalyticsError, match="^Java did not start: .*heap"), open_session(options):
        pytest.fail("with a heap that no machine has")
    assert list(tmp_path.iterdir()) == []


def test_default_memory() -> None:
    """At most half of what there is."""
    megabytes = int(get_default_memory().removesuffix("m"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < megabytes <= min(4096, total // 2**21)


def test_java_that_starts_is_killed_though_a_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the threads that may have started Java, one that has ended meanwhile is passed over."""
    with subprocess.Popen(["sleep", "inf"], process_group=0) as child:
        listed = [Path(f"/proc/self/task/{thread}/children") for thread in ("0", str(os.getpid()))]
        monkeypatch.setattr("analytics.spark_session.Path", lambda path: SimpleNamespace(glob=lambda pattern: listed))
        # The test process has children of others; none of them may be killed.
        monkeypatch.setattr(os, "killpg", lambda pid, number: child.send_signal(number) if pid == child.pid else None)
        _kill_java(None)
        assert child.wait(60) == -signal.SIGKILL
