"""
The Spark session of a run.

What is set here are defaults: `spark-submit`, `--conf` and spark-defaults.conf win, but for the two settings that
results depend on. A local master is one Java process that listens on loopback only; of others nothing is assumed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.errors import AnalyticsError, reason
from analytics.scratch import scratch as scratch_in
from analytics.stop import STOP, Stop

if TYPE_CHECKING:
    from pyspark.conf import SparkConf
    from pyspark.sql import SparkSession

_LOOPBACK = "127.0.0.1"
# Nothing has to be saved: published results are whole, staged ones are thrown away.
_PATIENCE_S = 20.0
_LOG = "java.log"

# Days are days in UTC, and a day that is made again replaces itself alone.
_FIXED = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}
_DEFAULTS = {
    "spark.app.name": "mediatord-analytics",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL_DEFAULTS = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.sql.shuffle.partitions": "8",
    "spark.ui.enabled": "false",
}

# Pauses do not matter here, work does: the default collector took about a fifth more of it, in single runs.
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_COLLECTOR = "-XX:+UseParallelGC"
# Where there is little to do, Java would spend most of the time on compiling what then runs once: two thirds of it.
SMALL = {
    _JAVA_OPTIONS: f"{_COLLECTOR} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=400m",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """
    What the operator asks for; nothing of it for a session under `spark-submit`, which has its own options.

    :param master: URL of a cluster, or `local[2]`; without one what Spark is configured for, else all processors.
    :param memory: of the driver, `1g` say; by default half of what there is, at most 4g.
    :param scratch: directory for Spark's temporary files, which end with the session, or with the next one if that is
        killed; by default that of the system.
    :param ui: serve Spark's pages, on loopback.
    :param settings: of Spark, by name; they win over everything else.
    :param small: there is little input: begin quickly rather than be fast. Of local masters only.
    :param debug: let Java write to standard error.
    """

    master: str | None = None
    memory: str | None = None
    scratch: str | None = None
    ui: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    small: bool = False
    debug: bool = False


def submitted() -> bool:
    """Whether `spark-submit` started this process, and with it Java."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def running(options: SessionOptions, stop: Stop = STOP) -> Iterator[SparkSession]:
    """
    A session. At the end, however it comes, Java ends and Spark's temporary files are deleted.

    After a signal all queries fail, while files can still be moved and deleted.

    :raise AnalyticsError: it does not start; or what was done in it failed, with all that is known as a note.
    :raise Stopped: a signal came.
    """
    # At once, since two threads that import it at the same time would both see half of it.
    import_module("pyspark.sql")
    with scratch_in(options.scratch) as scratch:
        gateway = None
        try:
            with stop.halting(lambda: _halt(gateway), lambda: _kill(gateway)):
                gateway = None if submitted() else _launch(options, scratch)
                stop.check()
                spark = _create(gateway, options, scratch)
                yield spark
                # Not after an error: it may have torn an answer of Java in two. Java's own end stops the session too.
                spark.stop()
        except Exception as error:
            told = _in_words(error, gateway, scratch)
            if told is error:
                raise
            raise told from None
        finally:
            _end(gateway)


def default_memory() -> str:
    """Half of the memory that this process may have, at most 4g."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{min([4096, installed // 2**21, *(limit // 2**21 for limit in _limits())])}m"


def _limits() -> Iterator[int]:
    """Bytes that the control groups of this process allow."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        group = root / Path("/proc/self/cgroup").read_text("utf-8").rpartition("::/")[2].strip()
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / "memory.max").exists():
                limit = (folder / "memory.max").read_text("utf-8").strip()
                if limit.isdigit():
                    yield int(limit)


def _launch(options: SessionOptions, scratch: str) -> Any:
    """Start Java. :raise AnalyticsError: it does not start."""
    from pyspark.conf import SparkConf
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    told = Path(scratch, _LOG)
    with told.open("wb") as output:
        _prepare(options, scratch)
        conf = SparkConf(loadDefaults=False)
        conf.setAll(list(_asked(options).items()))
        try:
            streams = {} if options.debug else {"stdout": output, "stderr": output}
            # A signal to the group of this process is meant for this process: Java is asked to clean up first.
            return launch_gateway(conf, {**streams, "start_new_session": True})
        except PySparkRuntimeError:
            raise AnalyticsError(f"Java does not start: {_reason(told)}") from None


def _prepare(options: SessionOptions, scratch: str) -> None:
    """The environment of Java. Variables that the operator has set stay as they are."""
    environ = os.environ
    environ.setdefault("SPARK_DRIVER_MEMORY", default_memory())
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # A master that spark-defaults.conf names is not known yet, and would not find this host there; only the pages
    # need the variable, and a host that has no address by its own name: Spark would look for one, and fail.
    if is_local(options.master or ("local" if options.ui or not _knows_itself() else "")):
        environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    java = [environ.get("SPARK_SUBMIT_OPTS", ""), f"-Djava.io.tmpdir={scratch}"]
    if not options.debug and not environ.keys() & {"SPARK_CONF_DIR", "SPARK_HOME"}:
        java.append(f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}")
    environ["SPARK_SUBMIT_OPTS"] = " ".join(java).strip()


def _knows_itself() -> bool:
    """Whether the name of this host has an address, which only DNS may know, where the unit lets nobody ask."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except (OSError, UnicodeError):  # it may be no name at all to DNS
        return False
    return True


def _asked(options: SessionOptions) -> dict[str, str]:
    """What the command line asks for, as Spark's settings."""
    asked = {"spark.master": options.master, "spark.driver.memory": options.memory}
    ui = {"spark.ui.enabled": "true"} if options.ui else {}
    java = {} if os.environ.keys() & {"SPARK_CONF_DIR", "SPARK_HOME"} else {_JAVA_OPTIONS: _COLLECTOR}
    small = SMALL if options.small and is_local(options.master or "local") else {}
    return java | {name: value for name, value in asked.items() if value} | ui | small | dict(options.settings)


def _reason(told: Path) -> str:
    """The first lines of Java that are not about how it was started, with the cause of all causes if there is one."""
    lines = told.read_text("utf-8", "replace").splitlines()
    chatter = ("WARNING:", "NOTE:", "Picked up ")
    said = [line.strip() for line in lines if line.strip() and not line.startswith(chatter)]
    causes = [line for line in said if line.startswith("Caused by: ")]
    return "; ".join([*said[:1], causes[-1]] if causes else said[:2]) or "it says nothing"


def _in_words(error: Exception, gateway: Any, scratch: str) -> AnalyticsError:
    """An error that can be read once Java is gone, or says that it went before its time."""
    if gateway and gateway.proc.poll() is not None:
        status = gateway.proc.returncode
        cause = f"by signal {-status}" if status < 0 else f"with status {status}"
        told = AnalyticsError(f"Java ended {cause}: {_reason(Path(scratch, _LOG))}; --memory gives it more")
    elif isinstance(error, AnalyticsError):
        return error
    else:
        # Of Java the text begins with the name of its own exception.
        kind = "" if type(error).__name__ == "Py4JJavaError" else f"{type(error).__name__}: "
        told = AnalyticsError(kind + reason(error))
    told.add_note("".join(traceback.format_exception(error)))
    return told


def _create(gateway: Any, options: SessionOptions, scratch: str) -> SparkSession:
    from pyspark.conf import SparkConf
    from pyspark.core.context import SparkContext
    from pyspark.sql import SparkSession

    # From here on SparkConf knows what Java was given: by spark-submit, its options and spark-defaults.conf.
    SparkContext._ensure_initialized(gateway=gateway)
    conf = SparkConf()
    _set_defaults(conf, scratch)
    if submitted():
        conf.setAll(list(options.settings.items()))
    interrupted = signal.getsignal(signal.SIGINT)
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    if threading.current_thread() is threading.main_thread():
        # Spark has put a handler there that asks Java in the middle of whatever goes on.
        signal.signal(signal.SIGINT, interrupted)
    _quieten(spark)
    return spark


def _quieten(spark: SparkSession) -> None:
    """Let the thread that waits for figures from Python on executors, where there is none, end without a word."""
    server: Any = spark.sparkContext._accumulatorServer
    server.handle_error = lambda *_: None


def _halt(gateway: Any) -> None:
    """Make every query fail, by a connection of this thread's own. Before there is a session Java ends instead."""
    from pyspark.core.context import SparkContext

    session = getattr(SparkContext._active_spark_context, "_jsc", None)
    if session is None:
        _kill(gateway)
        return
    # Java may be gone meanwhile.
    with suppress(Exception):
        session.stop()


def _kill(gateway: Any) -> None:
    """End Java at once, unless it was `spark-submit` that started it."""
    if gateway:
        gateway.proc.kill()
        return
    # While it starts nothing is known of it but that it leads a group of its own.
    for children in Path("/proc/self/task").glob("*/children"):
        # A thread may end while they are listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text("ascii").split():
                with suppress(ProcessLookupError):
                    os.killpg(int(child), signal.SIGKILL)


def _set_defaults(conf: SparkConf, scratch: str) -> None:
    conf.setAll(list(_FIXED.items()))
    defaults = dict(_DEFAULTS)
    if is_local(conf.get("spark.master", "local") or "local"):
        # Java was started with the scratch directory, unless by spark-submit.
        folders = (
            {} if submitted() else {"spark.local.dir": scratch, "spark.sql.warehouse.dir": f"{scratch}/warehouse"}
        )
        defaults |= _LOCAL_DEFAULTS | folders
    for name, value in defaults.items():
        conf.setIfMissing(name, value)


def is_local(master: str) -> bool:
    """Whether a master is this process and no other."""
    return master == "local" or master.startswith("local[")


def _end(gateway: Any) -> None:
    """Java ends when what it reads from does; its last act is to stop the session."""
    from pyspark.core.context import SparkContext

    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None
    process: subprocess.Popen[bytes] = gateway.proc
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
