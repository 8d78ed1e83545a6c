"""
pytest configuration: tiers, order of files, files that share a process, time limits, and an environment without
settings of Spark or Java. Compiled code is cached for all processes that tests start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from twisted.trial import util
from xdist.scheduler import LoadFileScheduling

from tests.tiers import TIERS, install_process_guard, tier_of

# Hundreds of daemons are started; without the cache each would compile all of mediatord.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each of these variables changes the behaviour of Spark or Java.
for name in (
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_CONF_DIR",
    "SPARK_HOME",
    "SPARK_MASTER",
    "HADOOP_CONF_DIR",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
    "JDK_JAVA_OPTIONS",
):
    os.environ.pop(name, None)

# Seconds after which a test counts as stuck; generous, as tests do not assert durations.
util.DEFAULT_TIMEOUT_DURATION = 600.0
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# pytest-xdist runs a file in one process; the longest ones start first, so that the run does not end with one
# process.
LONGEST_FIRST = (
    "analytics/test_engines.py",  # and with it all others that share a Spark session
    "model/test_model.py",
    "integration/test_bench.py",
    "monitoring/test_live.py",
    "monitoring/test_rules.py",
    "store/mongo/test_enqueue.py",
    "integration/test_queue.py",
    "analytics/test_spark_session.py",
    "integration/test_torture.py",
    "integration/test_readiness.py",
    "integration/test_schemathesis.py",
    "integration/test_rotation.py",
    "integration/test_workers.py",
    "store/mongo/driver/test_server_failures.py",
    "integration/test_acapy_wallets.py",
    "integration/test_cluster_kills.py",
    "integration/test_lifecycle.py",
    "integration/test_start_failures.py",
    "integration/test_cluster_limits.py",
    "test_mongod.py",
)


# Tests with the fixture `spark` share a session and thus a process: each Java virtual machine takes seconds to warm
# up.
_SPARK_FIXTURE = re.compile(r"\bspark: SparkSession\b")


class SharedSparkScheduling(LoadFileScheduling):
    """As `--dist loadfile`, but all files with Spark tests form one scope."""

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return "spark" if _uses_spark(path) else path


@cache
def _uses_spark(path: str) -> bool:
    file = Path(__file__).parents[1] / path
    return path.startswith("tests/analytics/") and bool(_SPARK_FIXTURE.search(file.read_text("utf-8")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharedSparkScheduling | None:
    """Choose how tests are distributed over processes."""
    return SharedSparkScheduling(config, log) if config.option.dist == "loadfile" else None


_GUARD = install_process_guard()


def pytest_configure(config: pytest.Config) -> None:
    """
    Declare the tiers, and keep our order of files; pytest-xdist would begin with the files that have most tests.
    """
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: see tests/tiers.py")
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail unit tests that start processes."""
    if not item.get_closest_marker("unit"):
        return (yield)
    with _GUARD.guarding():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Mark each test with its tier, and put the longest files first.

    :raise UsageError: a file of `LONGEST_FIRST` does not exist.
    """
    for item in items:
        item.add_marker(tier_of(item, Path(__file__).parent))
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    if missing := [str(path) for path in places if not path.exists()]:
        raise pytest.UsageError(f"in LONGEST_FIRST of {__file__}, but not there: {', '.join(missing)}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
