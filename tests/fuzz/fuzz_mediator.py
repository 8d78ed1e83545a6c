"""In-memory mediator for fuzzing: its invariants, and the cost of an input."""

from __future__ import annotations

import gc
import json
import pickle
import sqlite3
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from twisted.logger import LogLevel, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.error_codes import DECENTRL_ERROR_CODES, DIDCOMM_ERROR_CODES
from mediatord.wallet.didcomm_messages import open_problem_report
from tests.http.in_memory_site import InMemorySite
from tests.integration.daemon import PLENTY

# Inputs per mediator, so that its state stays bounded.
LIFETIME = 400
# The only refusal for a missing resource that is no failure.
UNAVAILABLE = 503

CODES = {wire.code: wire for wire in DIDCOMM_ERROR_CODES.values()}
DECENTRL_CODES = {wire.code for wire in DECENTRL_ERROR_CODES.values()}
STATUSES = {200, 202, *(wire.status for wire in DIDCOMM_ERROR_CODES.values() if wire.status < 500), UNAVAILABLE}
DECENTRL_STATUSES = {200, *(wire.status for wire in DECENTRL_ERROR_CODES.values() if wire.status < 500), UNAVAILABLE}

# What a refusal may store: a replay digest, and the long form of a DID.
_LEFT_ALL_THE_SAME = ("nonce", "did_document", "counter", "lease", "quota", "node", "presence", "pickup")


class StandInTestCase(SynchronousTestCase):
    """Replaces a test case, as inputs are run outside of tests."""

    def stand(self) -> None:
        """Do nothing."""


class FuzzMediator:
    """
    A mediator with its HTTP site, rebuilt after some inputs.

    :param prepare: prepares a new one, such as enrolling wallets.
    :param settings: as for :class:`~tests.in_memory_mediator.InMemoryMediator`.
    """

    def __init__(self, prepare: Callable[[InMemorySite], None], **settings: Any) -> None:
        self._newcomer = prepare
        self._settings = {**PLENTY, **settings}
        self._resident: StandInTestCase | None = None
        self._premises: InMemorySite | None = None
        self._left = 0
        self._faults: list[Any] = []
        self._observer = cast(Any, self._record_log_event)
        # Garbage of other tests may log failures when it is freed.
        gc.collect()
        globalLogPublisher.addObserver(self._observer)

    def _record_log_event(self, event: Any) -> None:
        level = event.get("log_level")
        if "log_failure" in event or (level is not None and level >= LogLevel.error):
            self._faults.append(event)

    def enter(self) -> InMemorySite:
        """Return the mediator for the next input."""
        if self._premises is None or not self._left:
            self.leave()
            self._resident = StandInTestCase("stand")
            self._premises = InMemorySite(self._resident, **self._settings)
            self._newcomer(self._premises)
            self._left = LIFETIME
        self._left -= 1
        return self._premises

    def leave(self) -> None:
        """Stop the mediator, if there is one."""
        if self._resident is not None:
            self._resident.doCleanups()
        self._resident = self._premises = None

    def close(self) -> None:
        """Finish; there are no more inputs."""
        self.leave()
        globalLogPublisher.removeObserver(self._observer)

    def assert_no_failures(self) -> None:
        """:raise AssertionError: a failure was logged."""
        faults, self._faults = self._faults, []
        for event in faults:
            failure = event.get("log_failure")
            if failure is not None:
                failure.raiseException()
            raise AssertionError(event.get("log_format"))

    def store_content(self, *without: str) -> bytes:
        """Everything in the store, as comparable bytes. :param without: further tables."""
        assert self._premises is not None
        store: Any = self._premises.store
        connection: sqlite3.Connection = store._executor._connection
        named = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        tables = sorted(name for (name,) in named if name not in (*_LEFT_ALL_THE_SAME, *without))
        return pickle.dumps({name: _rows(connection, name) for name in tables})


def _rows(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    """The rows of a table, without mere counters."""
    columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "places")
    return connection.execute(f"SELECT {columns} FROM {table}").fetchall()


def problem_code(body: bytes) -> str:
    """
    The code of a refusal in the clear, or signed.

    :raise AssertionError: it is not one error of the table, or contains part of the input.
    """
    report = open_problem_report(body, resolve_local)
    assert set(report) <= {"id", "typ", "type", "body", "pthid", "created_time", "from"}, sorted(report)
    assert ("from" in report) == ("payload" in json.loads(body)), sorted(report)
    code, comment = report["body"]["code"], report["body"]["comment"]
    assert code in CODES, code
    assert comment in {wire.comment for wire in DIDCOMM_ERROR_CODES.values() if wire.code == code}, (
        "a text of its own"
    )
    assert set(report["body"]) == {"code", "comment"}, sorted(report["body"])
    return str(code)


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """
    Cost of an operation, independent of the load of the machine.

    :param calls: calls of Python and C functions, except those of tests.
    :param peak: peak of memory in bytes, above what was allocated before.
    """

    calls: int
    peak: int


def measure_cost(work: Callable[..., object], *arguments: object) -> MeasuredCost:
    """Run and measure, without garbage collection."""
    calls = 0

    def record_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event in ("call", "c_call") and "/tests/" not in frame.f_code.co_filename:
            calls += 1

    gc.freeze()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sys.setprofile(record_call)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        gc.unfreeze()
    return MeasuredCost(calls, peak)
