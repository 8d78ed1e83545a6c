"""One Spark session for all tests of the jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from analytics import java, session
from analytics.errors import AnalyticsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = session.SessionOptions(master="local[2]", memory="1g", small=True)

# Whole months through all jobs: minutes on a slow machine.
LONG = ("test_incidents.py", "test_back_fill_and_nights_with_all_jobs", "test_stopped_at_any_moment")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless it is asked for."""
    if os.environ.get("ANALYTICS_LONG"):
        return
    skip = pytest.mark.skip(reason="takes minutes: `make analytics-test` runs it")
    for item in items:
        if "tests/analytics/" in item.nodeid and any(name in item.nodeid for name in LONG):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session of a nightly run, made for small frames; without Java its tests are skipped."""
    try:
        java.require_packages()
        java.use(java.find_java())
    except AnalyticsError as error:
        pytest.skip(f"Spark cannot run, `make test` installs what it needs: {error}")
    with session.running(OPTIONS) as running:
        yield running
