"""
Which tests `make check`, `make test` and `make test-all` run.

========== ================================================== ==============================
tier       what its tests may use                             run by
========== ================================================== ==============================
unit       this process, its threads, sockets on loopback     all three
system     processes, MongoDB, Spark, a browser               `make test`, `make test-all`
exhaustive the same: kill loops, models, corpora, long Spark  `make test-all`
========== ================================================== ==============================

A test is a unit test unless it, its class or its module has the mark of another tier, or :data:`TIER_OF_PATH` names
its file. A unit test that starts a process fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest

TIERS = ("unit", "system", "exhaustive")

# Files below tests/ without marks of their own; the first pattern that fits decides.
TIER_OF_PATH: tuple[tuple[str, str], ...] = (
    ("admin/test_browser.py", "system"),
    ("analytics/test_analytics_cluster.py", "exhaustive"),
    ("analytics/test_object_storage.py", "exhaustive"),
    ("analytics/sample/test_incidents.py", "exhaustive"),
    ("analytics/test_interrupted_runs.py", "exhaustive"),
    ("analytics/*", "system"),
    ("audit/*", "system"),
    ("backup/*", "system"),
    ("cli/test_man.py", "system"),
    ("cluster/test_daemons.py", "system"),
    ("docs/test_embedding_programs.py", "system"),
    ("docs/test_site.py", "system"),
    ("docs/test_site_browser.py", "exhaustive"),
    ("foreign/credo/*", "exhaustive"),
    ("foreign/*", "system"),
    ("fuzz/test_corpus.py", "system"),
    ("integration/test_bench_floods.py", "exhaustive"),
    ("integration/test_cluster_kills.py", "exhaustive"),
    ("integration/test_schemathesis.py", "exhaustive"),
    ("integration/test_torture.py", "exhaustive"),
    ("integration/*", "system"),
    ("model/*", "exhaustive"),
    ("monitoring/*", "system"),
    ("packaging/*", "system"),
    ("peers/*", "system"),
    ("ratelimit/test_distributed_limiter_mongo.py", "system"),
    ("store/mongo/driver/test_uri.py", "unit"),
    ("store/mongo/*", "system"),
    ("store/test_differential*.py", "system"),
    ("test_external_programs.py", "system"),
    ("test_mongod.py", "system"),
    ("test_walk.py", "system"),
    ("torture/*", "system"),
)

_PROCESS_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"})


class ProcessGuard:
    """
    Audit hook that refuses to start processes while a unit test runs.

    :ivar refused: the audited events that were refused since the test began.
    """

    def __init__(self) -> None:
        self._guarding = False
        self.refused: list[str] = []

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Refuse within this context, and fail the test at its end if anything was refused."""
        self.refused.clear()
        before = _children()
        self._guarding = True
        try:
            yield
        finally:
            self._guarding = False
        # Not all ways to start a process are audited.
        self.refused.extend(f"child {pid}" for pid in _children() - before)
        if self.refused:
            pytest.fail(f"a unit test starts a process ({self.refused[0]}); mark it system, see tests/tiers.py")

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """
        Called by the interpreter for every audited event, in every thread.

        :raise RuntimeError: a process would start.
        """
        if self._guarding and event in _PROCESS_EVENTS:
            self.refused.append(event)
            raise RuntimeError("unit tests start no processes")


def tier_of(item: pytest.Item, root: Path) -> str:
    """
    The tier of a test.

    :param root: the directory `tests`.
    """
    for tier in reversed(TIERS):
        if item.get_closest_marker(tier):
            return tier
    path = item.path.relative_to(root).as_posix()
    return next((tier for pattern, tier in TIER_OF_PATH if fnmatch(path, pattern)), "unit")


def _children() -> set[str]:
    """Process ids of the children of this process, whichever thread started them."""
    while True:
        children: set[str] = set()
        try:
            for path in Path("/proc/self/task").glob("*/children"):
                children.update(path.read_text("ascii").split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # A thread has ended meanwhile, and its children may have passed to one that was read before.
        return children


def install_process_guard() -> ProcessGuard:
    """A guard that is called from now on until the interpreter ends; hooks cannot be removed."""
    guard = ProcessGuard()
    sys.addaudithook(guard)
    return guard
