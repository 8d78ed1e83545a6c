"""Real traffic through a daemon, then the night over its own logs: each number is what the clients know."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from analytics.errors import EXIT_OK
from analytics.job import Span
from analytics.jobs.reconciliation import COUNTER_METRICS, ENTRY_EVENTS
from analytics.nightly import NightlyRequest, run_nightly
from analytics.reading.files import FileSystem
from analytics.settings import Settings
from analytics.writing.warehouse import Warehouse
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.didcomm_client import DIDCommWallet, MediatorProblem, open_http
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    anoncrypt,
    build_forward,
    compose_message,
    open_problem_report,
)
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.integration.message_load import (
    LoadSenders,
    enrol_wallet,
    prepare_daemon,
    prepare_forward,
    prepare_forwards,
)
from tests.integration.test_event_log import read_counters
from tests.observability.counter_oracle import read_segments

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

reactor: Any = _reactor

T = TypeVar("T")

# Letters that are pushed and acknowledged, pushed only, fetched and acknowledged, fetched only, just kept.
LIVE, UNHEARD, FETCHED, SEEN, LEFT = 8, 3, 6, 2, 2
# Of the last two kinds, how many the operator removes.
PURGED = 3
# What a queue holds, by how much one overflows, and letters that nobody fetches in time.
ROOM, EVICTED, EXPIRED = 10, 4, 3
# Seconds that those may wait.
PATIENCE_SECONDS = 4
LOOK_SECONDS = 0.1


@dataclass(slots=True)
class ClientLedger:
    """
    What the clients know.

    :ivar events: lines that the log must have, by event.
    :ivar refusals: requests that were refused, by code.
    :ivar sockets: opened, and closed again.
    """

    events: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    sockets: int = 0

    def posted(self, count: int) -> None:
        """So many letters were answered 202."""
        self.events.update({"req.done": count, "msg.accept": count})

    async def asked(self, answer: Awaitable[T]) -> T:
        """Enter one request that is answered."""
        self.events["req.done"] += 1
        return await answer

    async def refused(self, answer: Awaitable[Any]) -> None:
        """Enter one request that the mediator says no to."""
        self.events["req.done"] += 1
        with pytest.raises(MediatorProblem) as problem:
            await answer
        self.refusals[problem.value.code] += 1

    async def post(self, wallet: DIDCommWallet, body: bytes) -> bool:
        """Post a letter or something else; whether it was accepted."""
        response = await wallet.post(body)
        if response.status == 202:
            self.posted(1)
            return True
        self.events["req.done"] += 1
        self.refusals[open_problem_report(response.body, resolve_local)["body"]["code"]] += 1
        return False


def short_lived(recipient: DIDCommWallet, marker: str, expires: float) -> bytes:
    """A letter that waits until then, in seconds since the epoch, and no longer."""
    message = compose_message(BASIC_MESSAGE, {"content": marker}, to=[recipient.did])
    envelope = anoncrypt(message, recipient.identity.document)
    mediator = recipient.mediator
    return anoncrypt(
        build_forward(recipient.did, [envelope], to=[mediator.did], expires_time=int(expires)), mediator.document
    )


class EndToEndTests(TestCase):
    @pytest.fixture(autouse=True)
    def given(self, spark: SparkSession, tmp_path: Path) -> None:
        """What a TestCase cannot take as arguments."""
        self.spark, self.directory = spark, tmp_path

    async def test_every_number(self) -> None:
        """From the wallets' first request to the report of the night, nothing is lost and nothing is made up."""
        self.books = books = ClientLedger()
        first = datetime.now(UTC).date()
        self.daemon = daemon = prepare_daemon({"queue": {"max_messages": ROOM}})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        await self.traffic()
        said = await self.settled()
        await deferToThread(self.purge)
        await deferToThread(daemon.stop)
        self.span = Span(first, datetime.now(UTC).date())
        # All others were pushed at once; of the pushes that nobody acknowledged in time there is one more line.
        fell_back = said["stored"] - (books.events["msg.accept"] - LIVE - UNHEARD)
        self.assertGreaterEqual(fell_back, UNHEARD)
        books.events["msg.push"] += fell_back
        progress: list[str] = []
        files, out = FileSystem(self.spark), str(self.directory / "out")
        request = NightlyRequest(
            logs=[str(daemon.log_directory)],
            out=out,
            span=self.span,
            settings=Settings(),
            scratch=str(self.directory),
            keys=str(self.directory / "pseudonyms.keys"),
        )
        outcome = run_nightly(self.spark, files, request, progress.append)
        self.assertEqual(
            (outcome.exit_status, outcome.integrity_errors, outcome.warnings), (EXIT_OK, [], []), progress
        )
        self.warehouse = Warehouse(self.spark, files, out)
        self.check_messages(Path(outcome.report_path))
        self.check_counters(said)
        self.check_stores()
        self.check_requests_and_sockets()
        self.check_quality()

    async def traffic(self) -> None:
        """Letters that are pushed, fetched, left, refused, crowded out and forgotten; a new segment in between."""
        books = self.books
        bob, carol, dave, erin, frank = [await enrol_wallet(self.daemon, reactor) for _ in range(5)]
        self.purged = carol.did
        books.events["req.done"] += 2 * 5
        hears, ignores = await self.live(bob), await self.live(frank)
        stock = prepare_forwards(bob, "live", LIVE) + prepare_forwards(carol, "kept", FETCHED + SEEN + LEFT)
        stock += prepare_forwards(frank, "unheard", UNHEARD) + prepare_forwards(dave, "many", ROOM + EVICTED)
        senders = LoadSenders(self.daemon.port, stock)
        senders.start()
        await deferToThread(senders.wait_for_answers, len(stock) // 2)
        os.kill(self.daemon.pid, signal.SIGUSR1)
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), len(stock))
        books.posted(len(stock))
        books.events["msg.evict"] += EVICTED
        for _ in range(UNHEARD):
            await ignores.pushed.get()
        await books.asked(hears.acknowledge([await hears.pushed.get() for _ in range(LIVE)]))
        await books.asked(carol.acknowledge(await books.asked(carol.fetch(FETCHED))))
        self.assertEqual(len(await books.asked(carol.fetch(SEEN))), SEEN)
        books.events.update({"msg.push": LIVE + UNHEARD + FETCHED + SEEN, "msg.ack": LIVE + FETCHED})
        while books.events["msg.expire"] < EXPIRED:
            letter = short_lived(erin, "forgotten", reactor.seconds() + PATIENCE_SECONDS)
            books.events["msg.expire"] += await books.post(bob, letter)
        await self.refusals(bob, hears)
        for socket in (hears, ignores):
            await socket.close()

    def purge(self) -> None:
        """The operator removes some of what waits."""
        command = [sys.executable, "-m", "mediatord", "queue"]
        options = ["--config", str(self.daemon.config), "--json"]
        shown = subprocess.run([*command, "show", self.purged, *options], stdout=subprocess.PIPE, check=True)
        chosen = [word for one in json.loads(shown.stdout)["shown"][:PURGED] for word in ("--id", one["id"])]
        subprocess.run([*command, "purge", self.purged, *options, *chosen, "--yes"], check=True)
        self.books.events["msg.remove"] += PURGED

    async def live(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """A socket that messages are pushed on."""
        socket = await connect_didcomm_socket(reactor, wallet)
        self.books.sockets += 1
        await self.books.asked(socket.live())
        return socket

    async def refusals(self, wallet: DIDCommWallet, socket: DIDCommSocket) -> None:
        """Five, each with a code of its own."""
        books, stranger = self.books, DIDCommWallet.generate(wallet.mediator, open_http(reactor), reactor)
        await books.refused(stranger.fetch())
        await books.refused(socket.request("https://example.org/unheard-of/1.0/ask"))
        for body in (prepare_forward(stranger, "lost").body, short_lived(wallet, "late", 1), b"no envelope"):
            self.assertFalse(await books.post(wallet, body))
        self.assertEqual(len(books.refusals), 5)

    async def settled(self) -> dict[str, int]:
        """What `/metrics` says once all sockets are closed and all that is to expire has."""
        while True:
            said = await deferToThread(read_counters, self.daemon)
            if not said["connections"] and said["expired"] == EXPIRED:
                return said
            await deferLater(reactor, LOOK_SECONDS, lambda: None)

    def rows(self, table: str) -> list[Row]:
        return self.warehouse.read(table, self.span).orderBy("dt").collect()

    def check_messages(self, report: Path) -> None:
        """Ledger, traffic and report."""
        days, events = self.rows("ledger_daily"), self.books.events
        ended = {"acked": events["msg.ack"], "expired": EXPIRED, "evicted": EVICTED, "removed": PURGED}
        none = ("difference", "orphans", "overdue", "again", "before_books", "across_epochs")
        expected = {"accepted": events["msg.accept"], **ended, **dict.fromkeys(none, 0)}
        self.assertEqual({name: sum(day[name] for day in days) for name in expected}, expected)
        self.assertEqual(days[-1].open, UNHEARD + SEEN + LEFT + ROOM - PURGED)
        self.assertEqual({row.reason for row in self.rows("lost_daily")}, {"ttl", "fifo_count", "purged"})
        # An operator is no node to be compared with others.
        self.assertEqual(len({row.node for row in self.rows("node_compare")}), 1)
        found: Counter[str] = Counter()
        for row in self.rows("traffic_daily"):
            self.assertEqual(row.proto, "didcomm")
            found[row.event] += row.n
        self.assertEqual(found, events)
        shown = f'<dt>Messages accepted</dt>\n<dd class="value">{days[-1].accepted}</dd>'
        self.assertIn(shown, report.read_text("utf-8"))

    def check_counters(self, said: dict[str, int]) -> None:
        """The daemon's own counters, its log and `/metrics` agree."""
        counted: Counter[str] = Counter()
        for row in self.rows("reconciliation_daily"):
            self.assertEqual((row.difference, row.logged), (0, row.counted), row.counter)
            counted[row.counter] += row.counted
        self.assertEqual(dict(counted), {COUNTER_METRICS[name]: value for name, value in said.items()})

    def check_stores(self) -> None:
        """The store's own books have no difference, and every line, with none missing and none too many."""
        rows = self.rows("stores_daily")
        self.assertEqual({row.total for row in rows if row.entry == "difference"}, {0})
        self.assertEqual({row.gap for row in rows if row.entry in ENTRY_EVENTS}, {0})
        self.assertEqual(len({row.store for row in rows}), 1)
        last = {row.entry: row.total for row in rows if row.proto == "didcomm" and row.dt == rows[-1].dt}
        for entry, event in ENTRY_EVENTS.items():
            logged = sum(row.logged for row in rows if row.entry == entry)
            self.assertEqual((logged, last[entry]), (self.books.events[event],) * 2, entry)
        self.assertEqual(last["waiting"], UNHEARD + SEEN + LEFT + ROOM - PURGED)

    def check_requests_and_sockets(self) -> None:
        """Refusals by code; every socket was opened and closed."""
        refusals: Counter[str] = Counter()
        for row in self.rows("errors_daily"):
            refusals[row.code] += row.n
        self.assertEqual(refusals, self.books.refusals)
        sockets = self.rows("sockets_daily")
        for name in ("opened", "authenticated", "closed"):
            self.assertEqual(sum(row[name] for row in sockets), self.books.sockets, name)
        self.assertEqual(sum(row.unclosed for row in sockets), 0)
        ended = {(row.ws_code, row.reason) for row in self.rows("sessions_daily")}
        self.assertEqual(ended, {(1000, "peer")})

    def check_quality(self) -> None:
        """Every line of every segment was read, each number once."""
        segments = read_segments(self.daemon.log_directory)
        lines = sum(map(len, segments.values()))
        self.assertGreaterEqual(len(segments), 2)
        inputs = self.rows("inputs")
        self.assertEqual((len(inputs), {row.state for row in inputs}), (len(segments), {"closed"}))
        quality: Counter[str] = Counter()
        for row in self.rows("quality_daily"):
            quality[row.kind] += row.n
        # Anything else is something that was found wrong.
        self.assertEqual(quality, {"lines": lines, "events": lines})
        boots = self.rows("boots_daily")
        self.assertEqual((sum(row.n for row in boots), sum(row.missing for row in boots)), (lines, 0))
