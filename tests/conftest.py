"""
Tiers of tests, which files begin first and which share a process, how long tests may take, compiled code for all the
processes that they start, and a Spark that nobody configures from outside.
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

# Hundreds of daemons are started: each of them would compile the whole of mediatord again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each of these changes what Spark or Java does.
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

# On a machine with other things to do, time says nothing about what is tested. Seconds after which a test is stuck:
util.DEFAULT_TIMEOUT_DURATION = 600.0
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# pytest-xdist gives a file to one process: these take longest, and are not to be what the others wait for at the end.
LONGEST_FIRST = (
    "analytics/jobs/test_message_ledger.py",  # and with it all others that share a Spark session
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
    "integration/test_cluster_kills.py",
    "integration/test_lifecycle.py",
    "integration/test_start_failures.py",
    "integration/test_cluster_limits.py",
    "test_mongod.py",
)


# Tests that ask for the fixture `spark` share a session, and so a process: each Java takes seconds to warm up.
_ASKS_FOR_SPARK = re.compile(r"\bspark: SparkSession\b")


class OneSpark(LoadFileScheduling):
    """As `--dist loadfile`, but all files with tests of Spark are one."""

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return "spark" if _asks_for_spark(path) else path


@cache
def _asks_for_spark(path: str) -> bool:
    file = Path(__file__).parents[1] / path
    return path.startswith("tests/analytics/") and bool(_ASKS_FOR_SPARK.search(file.read_text("utf-8")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> OneSpark | None:
    """Which tests go to which process."""
    return OneSpark(config, log) if config.option.dist == "loadfile" else None


_GUARD = install_process_guard()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the tiers, and keep to our order; pytest-xdist begins with the files that have most tests."""
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
    Give each test the mark of its tier, and put the longest files first.

    :raise UsageError: one of them is not there.
    """
    for item in items:
        item.add_marker(tier_of(item, Path(__file__).parent))
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    if missing := [str(path) for path in places if not path.exists()]:
        raise pytest.UsageError(f"in LONGEST_FIRST of {__file__}, but not there: {', '.join(missing)}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
