"""Sessions for tests of the analysis: DuckDB alone, and one Spark session for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from analytics.database import Database
from analytics.engine import AnalysisSession
from analytics.errors import AnalyticsError
from analytics.files import LocalFileSystem
from analytics.java import find_java, require_packages, set_java_home
from analytics.spark_session import SessionOptions, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = SessionOptions(master="local[2]", memory="1g", small=True)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Session with the options of a nightly run on small input; without Java the test is skipped."""
    try:
        require_packages()
        set_java_home(find_java())
    except AnalyticsError as error:
        pytest.skip(f"Spark cannot run, `make test` installs what it needs: {error}")
    with open_session(OPTIONS) as session:
        yield session


@pytest.fixture
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A database of its own for each test."""
    with Database(str(tmp_path_factory.mktemp("scratch"))) as found:
        yield found


@pytest.fixture
def session(database: Database) -> AnalysisSession:
    """A session without Spark."""
    return AnalysisSession(LocalFileSystem(), database, database.scratch)
