"""
The Spark session of a run, and its scratch directory.

Values set here are defaults: `spark-submit`, `--conf` and spark-defaults.conf override them, except the time zone,
which results depend on. A local master is one Java process that listens on loopback only; nothing is assumed of
others.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.errors import STOP_HANDLER, AnalyticsError, StopHandler, find_root_cause

if TYPE_CHECKING:
    from pyspark.conf import SparkConf
    from pyspark.sql import SparkSession

SCRATCH_PREFIX = "mediatord-analytics-"
_LOCK_FILE = "lock"


@contextmanager
def make_scratch_directory(parent: str | None) -> Iterator[str]:
    """
    Create a scratch directory, and delete those of killed processes, which would fill the disk.

    :param parent: its parent; None: the system's.
    :return: its absolute path.
    :raise OSError: it cannot be created.
    """
    directory = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent)).absolute()
    # The lock ends with this process. It gets its name once it is held.
    with (directory / "new").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, directory / _LOCK_FILE)
            _delete_abandoned_directories(directory)
            yield str(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _delete_abandoned_directories(own_directory: Path) -> None:
    """Delete unlocked scratch directories of this user."""
    for folder in own_directory.parent.glob(f"{SCRATCH_PREFIX}*"):
        # It is locked, or was deleted meanwhile.
        with suppress(OSError):
            if folder != own_directory and folder.lstat().st_uid == os.getuid():
                with (folder / _LOCK_FILE).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


_LOOPBACK = "127.0.0.1"
# Nothing needs saving: published results are complete, staged ones are discarded.
_JAVA_EXIT_TIMEOUT_S = 20.0
_JAVA_LOG = "java.log"

# Days are in UTC.
_REQUIRED_CONF = {"spark.sql.session.timeZone": "UTC"}
_DEFAULT_CONF = {
    "spark.app.name": "mediatord-analytics",
    # Spark's 300 seconds are too few on a busy machine.
    "spark.sql.broadcastTimeout": "3600",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL_DEFAULT_CONF = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.sql.shuffle.partitions": "8",
    "spark.ui.enabled": "false",
}

# Throughput matters, pauses do not: the default collector took about a fifth more CPU in single runs.
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_GARBAGE_COLLECTOR = "-XX:+UseParallelGC"
# On little input two thirds of the time would be spent on compiling code that runs once.
SMALL_INPUT_CONF = {
    _JAVA_OPTIONS: f"{_GARBAGE_COLLECTOR} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=400m",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """
    Options of a session. `spark-submit` has its own: under it only `settings` apply.

    :param master: URL of a cluster, or `local[2]`; by default what Spark is configured for, else all processors.
    :param memory: heap size of the driver, such as `1g`; by default a quarter of the memory, at most 1g.
    :param scratch: directory for Spark's temporary files, deleted at the end of the session, or by the next one if it
        is killed; by default the system's.
    :param ui: serve Spark's web UI on loopback.
    :param settings: Spark properties; they override everything else.
    :param small: optimise for a short start instead of throughput; for local masters only.
    :param debug: pass Java's output to standard error.
    """

    master: str | None = None
    memory: str | None = None
    scratch: str | None = None
    ui: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    small: bool = False
    debug: bool = False


def is_spark_submit() -> bool:
    """Whether `spark-submit` started this process and Java."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def open_session(options: SessionOptions, stop: StopHandler = STOP_HANDLER) -> Iterator[SparkSession]:
    """
    Open a session. At the end Java exits and Spark's temporary files are deleted.

    After a signal all queries fail, while files can still be moved and deleted.

    :raise AnalyticsError: it does not start, or work in it failed; details are in a note.
    :raise StoppedBySignal: a signal was received.
    """
    # Import now: two threads importing it at once would each see half of it.
    import_module("pyspark.sql")
    with make_scratch_directory(options.scratch) as scratch:
        gateway = None
        try:
            with stop.cancel_on_signal(lambda: _cancel_queries(gateway), lambda: _kill_java(gateway)):
                gateway = None if is_spark_submit() else _launch_java(options, scratch)
                stop.check()
                spark = _create_session(gateway, options, scratch)
                yield spark
                # Not after an error, which may have interrupted a response of Java. Java's exit stops the session
                # too.
                spark.stop()
        except Exception as error:
            described = _describe_error(error, gateway, scratch)
            if described is error:
                raise
            raise described from None
        finally:
            _stop_java(gateway)


def get_default_memory() -> str:
    """A quarter of the memory available to this process, at most 1g: neither engine holds lines in memory."""
    return f"{min(1024, get_available_memory() // 2**22)}m"


def get_available_memory() -> int:
    """Bytes of memory that this process may use: of the machine, or fewer if its control groups allow fewer."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *_read_cgroup_limits()])


def _read_cgroup_limits() -> Iterator[int]:
    """Memory limits of this process's control groups, in bytes."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        group = root / Path("/proc/self/cgroup").read_text("utf-8").rpartition("::/")[2].strip()
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / "memory.max").exists():
                limit = (folder / "memory.max").read_text("utf-8").strip()
                if limit.isdigit():
                    yield int(limit)


def _launch_java(options: SessionOptions, scratch: str) -> Any:
    """Start Java. :raise AnalyticsError: it does not start."""
    from pyspark.conf import SparkConf
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    log = Path(scratch, _JAVA_LOG)
    with log.open("wb") as output:
        _set_environment(options, scratch)
        conf = SparkConf(loadDefaults=False)
        conf.setAll(list(_make_requested_conf(options).items()))
        try:
            streams = {} if options.debug else {"stdout": output, "stderr": output}
            # Java must not receive signals to the process group: it is asked to clean up first.
            return launch_gateway(conf, {**streams, "start_new_session": True})
        except PySparkRuntimeError:
            raise AnalyticsError(f"Java did not start: {_extract_java_error(log)}") from None


def _set_environment(options: SessionOptions, scratch: str) -> None:
    """Set environment variables for Java; existing ones stay."""
    environ = os.environ
    environ.setdefault("SPARK_DRIVER_MEMORY", get_default_memory())
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # The master in spark-defaults.conf is not known yet, and a remote one would not find this host at loopback. Only
    # the web UI needs the variable, and hosts that cannot resolve their own name, on which Spark would fail.
    if is_local_master(options.master or ("local" if options.ui or not _hostname_resolves() else "")):
        environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    java = [environ.get("SPARK_SUBMIT_OPTS", ""), f"-Djava.io.tmpdir={scratch}"]
    if not options.debug and not environ.keys() & {"SPARK_CONF_DIR", "SPARK_HOME"}:
        java.append(f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}")
    environ["SPARK_SUBMIT_OPTS"] = " ".join(java).strip()


def _hostname_resolves() -> bool:
    """Whether the host's name has an address; DNS may be unreachable within the systemd unit."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except (OSError, UnicodeError):  # the name may be invalid in DNS
        return False
    return True


def _make_requested_conf(options: SessionOptions) -> dict[str, str]:
    """Spark settings requested on the command line."""
    requested = {"spark.master": options.master, "spark.driver.memory": options.memory}
    ui = {"spark.ui.enabled": "true"} if options.ui else {}
    java = {} if os.environ.keys() & {"SPARK_CONF_DIR", "SPARK_HOME"} else {_JAVA_OPTIONS: _GARBAGE_COLLECTOR}
    small = SMALL_INPUT_CONF if options.small and is_local_master(options.master or "local") else {}
    return java | {name: value for name, value in requested.items() if value} | ui | small | dict(options.settings)


def _extract_java_error(log: Path) -> str:
    """First lines of Java's output that are not about its start, and the innermost cause."""
    lines = log.read_text("utf-8", "replace").splitlines()
    chatter = ("WARNING:", "NOTE:", "Picked up ")
    lines = [line.strip() for line in lines if line.strip() and not line.startswith(chatter)]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return "; ".join([*lines[:1], causes[-1]] if causes else lines[:2]) or "no output"


def _describe_error(error: Exception, gateway: Any, scratch: str) -> AnalyticsError:
    """Convert an error to one that is readable after Java exits, or that reports Java's premature exit."""
    if gateway and gateway.proc.poll() is not None:
        status = gateway.proc.returncode
        cause = f"by signal {-status}" if status < 0 else f"with status {status}"
        described = AnalyticsError(
            f"Java exited {cause}: {_extract_java_error(Path(scratch, _JAVA_LOG))}; --memory sets its heap size"
        )
    elif isinstance(error, AnalyticsError):
        return error
    else:
        # Java's text begins with the name of its exception.
        kind = "" if type(error).__name__ == "Py4JJavaError" else f"{type(error).__name__}: "
        described = AnalyticsError(kind + find_root_cause(error))
    described.add_note("".join(traceback.format_exception(error)))
    return described


def _create_session(gateway: Any, options: SessionOptions, scratch: str) -> SparkSession:
    from pyspark.conf import SparkConf
    from pyspark.core.context import SparkContext
    from pyspark.sql import SparkSession

    # From here on SparkConf has Java's settings: those of spark-submit, its options and spark-defaults.conf.
    SparkContext._ensure_initialized(gateway=gateway)
    conf = SparkConf()
    _set_default_conf(conf, scratch)
    if is_spark_submit():
        conf.setAll(list(options.settings.items()))
    interrupted = signal.getsignal(signal.SIGINT)
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    if threading.current_thread() is threading.main_thread():
        # Spark installs a handler that calls Java in the middle of other calls.
        signal.signal(signal.SIGINT, interrupted)
    _silence_accumulator_server(spark)
    return spark


def _silence_accumulator_server(spark: SparkSession) -> None:
    """Let the accumulator thread, which is unused, end silently."""
    server: Any = spark.sparkContext._accumulatorServer
    server.handle_error = lambda *_: None


def _cancel_queries(gateway: Any) -> None:
    """Make all queries fail, on a connection of this thread. Before there is a session, kill Java."""
    from pyspark.core.context import SparkContext

    session = getattr(SparkContext._active_spark_context, "_jsc", None)
    if session is None:
        _kill_java(gateway)
        return
    # Java may have exited meanwhile.
    with suppress(Exception):
        session.stop()


def _kill_java(gateway: Any) -> None:
    """Kill Java, unless `spark-submit` started it."""
    if gateway:
        gateway.proc.kill()
        return
    # While it starts it is known only as the leader of its own process group.
    for children in Path("/proc/self/task").glob("*/children"):
        # A thread may end during the listing.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text("ascii").split():
                with suppress(ProcessLookupError):
                    os.killpg(int(child), signal.SIGKILL)


def _set_default_conf(conf: SparkConf, scratch: str) -> None:
    conf.setAll(list(_REQUIRED_CONF.items()))
    defaults = dict(_DEFAULT_CONF)
    if is_local_master(conf.get("spark.master", "local") or "local"):
        # Java got the scratch directory, unless spark-submit started it.
        folders = (
            {}
            if is_spark_submit()
            else {"spark.local.dir": scratch, "spark.sql.warehouse.dir": f"{scratch}/warehouse"}
        )
        defaults |= _LOCAL_DEFAULT_CONF | folders
    for name, value in defaults.items():
        conf.setIfMissing(name, value)


def is_local_master(master: str) -> bool:
    """Whether a master runs in this process only."""
    return master == "local" or master.startswith("local[")


def _stop_java(gateway: Any) -> None:
    """Java exits when its standard input closes; it stops the session last."""
    from pyspark.core.context import SparkContext

    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None
    process: subprocess.Popen[bytes] = gateway.proc
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(_JAVA_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
