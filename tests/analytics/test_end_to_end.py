"""Real traffic through a daemon, then the night over its own logs: each number is what the clients know."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from analytics import nightly
from analytics.errors import FINE
from analytics.files import Files
from analytics.job import Span
from analytics.jobs.reconciliation import COUNTERS
from analytics.settings import Settings
from analytics.warehouse import Warehouse
from mediatord.wallet.client import Wallet
from mediatord.wallet.mediation import Problem
from mediatord.wallet.mediator import open_http
from mediatord.wallet.packing import BASIC_MESSAGE, anoncrypt, compose, forward
from mediatord.wallet.socket import WalletSocket, connect
from tests.integration.daemon import Daemon
from tests.integration.test_event_log import figures
from tests.integration.traffic import Letter, Senders, enrolled, letters, prepared
from tests.tally import read_segments

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

reactor: Any = _reactor

# Letters that are pushed and acknowledged, pushed only, fetched and acknowledged, fetched only, just kept.
LIVE, UNHEARD, FETCHED, SEEN, LEFT = 8, 3, 6, 2, 2
# What a queue holds, by how much one overflows, and letters that nobody fetches in time.
ROOM, EVICTED, EXPIRED = 10, 4, 3
# Seconds that those may wait.
PATIENCE_SECONDS = 4
LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Books:
    """
    What the clients know.

    :ivar events: lines that the log must have, by event.
    :ivar refusals: requests that were refused, by code.
    """

    events: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    sockets: int = 0

    def posted(self, count: int) -> None:
        """So many letters were answered 202."""
        self.events.update({"req.done": count, "msg.accept": count})

    async def asked[T](self, answer: Awaitable[T]) -> T:
        """Enter one request that is answered."""
        self.events["req.done"] += 1
        return await answer

    async def refused(self, answer: Awaitable[Any]) -> None:
        """Enter one request that the mediator says no to."""
        self.events["req.done"] += 1
        with pytest.raises(Problem) as problem:
            await answer
        self.refusals[problem.value.code] += 1

    async def post(self, wallet: Wallet, body: bytes) -> bool:
        """Post a letter or something else; whether it was accepted."""
        response = await wallet.post(body)
        if response.status == 202:
            self.posted(1)
            return True
        self.events["req.done"] += 1
        self.refusals[json.loads(response.body)["body"]["code"]] += 1
        return False
