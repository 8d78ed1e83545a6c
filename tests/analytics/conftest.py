"""One Spark session for all tests of the jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from analytics import java, session
from analytics.errors import AnalyticsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = session.SessionOptions(master="local[2]", memory="1g", small=True)


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
