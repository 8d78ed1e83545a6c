"""Which files begin first, how long tests may take, and compiled code for all the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from twisted.trial import util

# Hundreds of daemons are started: each of them would compile the whole of mediatord again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On a machine with other things to do, time says nothing about what is tested. Seconds after which a test is stuck:
util.DEFAULT_TIMEOUT_DURATION = 600.0
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# pytest-xdist gives a file to one process: these take longest, and are not to be what the others wait for at the end.
LONGEST_FIRST = (
    "integration/test_cluster_kills.py",
    "integration/test_decentrl_durability.py",
    "integration/test_durability.py",
    "integration/test_workers.py",
    "integration/test_bench.py",
    "integration/test_mongo_start.py",
    "integration/test_lifecycle.py",
    "integration/test_cluster_limits.py",
    "store/test_differential_decentrl.py",
    "integration/test_onion.py",
    "integration/test_cluster.py",
    "integration/test_schemathesis.py",
    "test_mongod.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist keep to the order; it would begin with the files that have the most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Longest files first, everything else as it was.

    :raise UsageError: one of them is not there.
    """
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    if missing := [str(path) for path in places if not path.exists()]:
        raise pytest.UsageError(f"in LONGEST_FIRST of {__file__}, but not there: {', '.join(missing)}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
