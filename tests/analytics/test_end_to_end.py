"""A nightly run over the logs of real traffic: each number equals what the clients know."""

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
from typing import Any, TypeVar

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from analytics.database import Row
from analytics.engine import AnalysisSession
from analytics.errors import EXIT_OK
from analytics.job import Span
from analytics.jobs.reconciliation import COUNTER_METRICS, ENTRY_EVENTS
from analytics.nightly import NightlyRequest, run_nightly
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

reactor: Any = _reactor

T = TypeVar("T")

# Messages that are pushed and acknowledged, pushed only, fetched and acknowledged, fetched only, only queued.
LIVE_COUNT, UNACKNOWLEDGED_COUNT, FETCHED_COUNT, FETCHED_ONLY_COUNT, QUEUED_COUNT = 8, 3, 6, 2, 2
# Messages of the last two kinds that the operator purges.
PURGED_COUNT = 3
# The capacity of a queue, the messages evicted from one, and messages that expire.
QUEUE_CAPACITY, EVICTED_COUNT, EXPIRED_COUNT = 10, 4, 3
# Time to live of messages that expire.
TTL_SECONDS = 4
POLL_SECONDS = 0.1


@dataclass(slots=True)
class ClientLedger:
    """
    What the clients know.

    :ivar events: expected number of log lines by event.
    :ivar refusals: refused requests by code.
    :ivar sockets: sockets opened and closed.
    """

    events: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    sockets: int = 0

    def count_accepted(self, count: int) -> None:
        """Count messages that were answered with 202."""
        self.events.update({"req.done": count, "msg.accept": count})

    async def await_success(self, response: Awaitable[T]) -> T:
        """Count and await a request that succeeds."""
        self.events["req.done"] += 1
        return await response

    async def await_refusal(self, response: Awaitable[Any]) -> None:
        """Count and await a request that the mediator refuses."""
        self.events["req.done"] += 1
        with pytest.raises(MediatorProblem) as problem:
            await response
        self.refusals[problem.value.code] += 1

    async def post(self, wallet: DIDCommWallet, body: bytes) -> bool:
        """Post a body, and count its result. :return: whether it was accepted."""
        response = await wallet.post(body)
        if response.status == 202:
            self.count_accepted(1)
            return True
        self.events["req.done"] += 1
        self.refusals[open_problem_report(response.body, resolve_local)["body"]["code"]] += 1
        return False


def make_expiring_forward(recipient: DIDCommWallet, marker: str, expires: float) -> bytes:
    """A forward that expires at a time in seconds since the epoch."""
    message = compose_message(BASIC_MESSAGE, {"content": marker}, to=[recipient.did])
    envelope = anoncrypt(message, recipient.identity.document)
    mediator = recipient.mediator
    return anoncrypt(
        build_forward(recipient.did, [envelope], to=[mediator.did], expires_time=int(expires)), mediator.document
    )


class EndToEndTests(TestCase):
    @pytest.fixture(autouse=True)
    def set_fixtures(self, session: AnalysisSession, tmp_path: Path) -> None:
        """Take pytest fixtures, which test methods of a TestCase cannot have as arguments."""
        self.session, self.directory = session, tmp_path

    async def test_every_figure_equals_client_ledger(self) -> None:
        """From the first request of the wallets to the report: nothing is lost or invented."""
        self.ledger = ledger = ClientLedger()
        first = datetime.now(UTC).date()
        self.daemon = daemon = prepare_daemon({"queue": {"max_messages": QUEUE_CAPACITY}})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        await self.send_traffic()
        counters = await self.wait_for_counters()
        await deferToThread(self.purge)
        await deferToThread(daemon.stop)
        self.span = Span(first, datetime.now(UTC).date())
        # All others were pushed at once; a push without a timely acknowledgement has one more line.
        fallback_count = counters["stored"] - (ledger.events["msg.accept"] - LIVE_COUNT - UNACKNOWLEDGED_COUNT)
        self.assertGreaterEqual(fallback_count, UNACKNOWLEDGED_COUNT)
        ledger.events["msg.push"] += fallback_count
        progress: list[str] = []
        out = str(self.directory / "out")
        request = NightlyRequest(
            logs=[str(daemon.log_directory)],
            out=out,
            span=self.span,
            settings=Settings(),
            keys=str(self.directory / "pseudonyms.keys"),
        )
        outcome = run_nightly(self.session, request, progress.append)
        self.assertEqual(
            (outcome.exit_status, outcome.integrity_errors, outcome.warnings), (EXIT_OK, [], []), progress
        )
        self.warehouse = Warehouse(self.session.database, self.session.files, out)
        self.check_messages(Path(outcome.report_path))
        self.check_counters(counters)
        self.check_stores()
        self.check_requests_and_sockets()
        self.check_quality()

    async def send_traffic(self) -> None:
        """Messages that are pushed, fetched, left, refused, evicted and expired; a new segment begins meanwhile."""
        ledger = self.ledger
        bob, carol, dave, erin, frank = [await enrol_wallet(self.daemon, reactor) for _ in range(5)]
        self.purged = carol.did
        ledger.events["req.done"] += 2 * 5
        acknowledging, ignoring = await self.open_live_socket(bob), await self.open_live_socket(frank)
        forwards = prepare_forwards(bob, "live", LIVE_COUNT) + prepare_forwards(
            carol, "kept", FETCHED_COUNT + FETCHED_ONLY_COUNT + QUEUED_COUNT
        )
        forwards += prepare_forwards(frank, "unheard", UNACKNOWLEDGED_COUNT) + prepare_forwards(
            dave, "many", QUEUE_CAPACITY + EVICTED_COUNT
        )
        senders = LoadSenders(self.daemon.port, forwards)
        senders.start()
        await deferToThread(senders.wait_for_answers, len(forwards) // 2)
        os.kill(self.daemon.pid, signal.SIGUSR1)
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), len(forwards))
        ledger.count_accepted(len(forwards))
        ledger.events["msg.evict"] += EVICTED_COUNT
        for _ in range(UNACKNOWLEDGED_COUNT):
            await ignoring.pushed.get()
        await ledger.await_success(
            acknowledging.acknowledge([await acknowledging.pushed.get() for _ in range(LIVE_COUNT)])
        )
        await ledger.await_success(carol.acknowledge(await ledger.await_success(carol.fetch(FETCHED_COUNT))))
        self.assertEqual(len(await ledger.await_success(carol.fetch(FETCHED_ONLY_COUNT))), FETCHED_ONLY_COUNT)
        ledger.events.update(
            {
                "msg.push": LIVE_COUNT + UNACKNOWLEDGED_COUNT + FETCHED_COUNT + FETCHED_ONLY_COUNT,
                "msg.ack": LIVE_COUNT + FETCHED_COUNT,
            }
        )
        while ledger.events["msg.expire"] < EXPIRED_COUNT:
            forward = make_expiring_forward(erin, "forgotten", reactor.seconds() + TTL_SECONDS)
            ledger.events["msg.expire"] += await ledger.post(bob, forward)
        await self.cause_refusals(bob, acknowledging)
        for socket in (acknowledging, ignoring):
            await socket.close()

    def purge(self) -> None:
        """Purge some of the queued messages with the command line."""
        command = [sys.executable, "-m", "mediatord", "queue"]
        options = ["--config", str(self.daemon.config), "--json"]
        listing = subprocess.run([*command, "show", self.purged, *options], stdout=subprocess.PIPE, check=True)
        id_options = [
            word for message in json.loads(listing.stdout)["shown"][:PURGED_COUNT] for word in ("--id", message["id"])
        ]
        subprocess.run([*command, "purge", self.purged, *options, *id_options, "--yes"], check=True)
        self.ledger.events["msg.remove"] += PURGED_COUNT

    async def open_live_socket(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """Open a socket in live mode."""
        socket = await connect_didcomm_socket(reactor, wallet)
        self.ledger.sockets += 1
        await self.ledger.await_success(socket.live())
        return socket

    async def cause_refusals(self, wallet: DIDCommWallet, socket: DIDCommSocket) -> None:
        """Five, each with a different code."""
        ledger, anonymous = self.ledger, DIDCommWallet.generate(wallet.mediator, open_http(reactor), reactor)
        await ledger.await_refusal(anonymous.fetch())
        await ledger.await_refusal(socket.request("https://example.org/unheard-of/1.0/ask"))
        for body in (
            prepare_forward(anonymous, "lost").body,
            make_expiring_forward(wallet, "late", 1),
            b"no envelope",
        ):
            self.assertFalse(await ledger.post(wallet, body))
        self.assertEqual(len(ledger.refusals), 5)

    async def wait_for_counters(self) -> dict[str, int]:
        """The counters of `/metrics` once all sockets are closed and all messages due have expired."""
        while True:
            counters = await deferToThread(read_counters, self.daemon)
            if not counters["connections"] and counters["expired"] == EXPIRED_COUNT:
                return counters
            await deferLater(reactor, POLL_SECONDS, lambda: None)

    def rows(self, table: str) -> list[Row]:
        return self.warehouse.rows(table, self.span)

    def check_messages(self, report: Path) -> None:
        """Check ledger, traffic and report."""
        days, events = self.rows("ledger_daily"), self.ledger.events
        ended = {
            "acked": events["msg.ack"],
            "expired": EXPIRED_COUNT,
            "evicted": EVICTED_COUNT,
            "removed": PURGED_COUNT,
        }
        zero_columns = ("difference", "orphans", "overdue", "again", "before_books", "across_epochs")
        expected = {"accepted": events["msg.accept"], **ended, **dict.fromkeys(zero_columns, 0)}
        self.assertEqual({name: sum(day[name] for day in days) for name in expected}, expected)
        self.assertEqual(
            days[-1]["open"], UNACKNOWLEDGED_COUNT + FETCHED_ONLY_COUNT + QUEUED_COUNT + QUEUE_CAPACITY - PURGED_COUNT
        )
        self.assertEqual({row["reason"] for row in self.rows("lost_daily")}, {"ttl", "fifo_count", "purged"})
        # Operator commands are not a node.
        self.assertEqual(len({row["node"] for row in self.rows("node_compare")}), 1)
        found: Counter[str] = Counter()
        for row in self.rows("traffic_daily"):
            self.assertEqual(row["proto"], "didcomm")
            found[row["event"]] += row["n"]
        self.assertEqual(found, events)
        listing = f'<dt>Messages accepted</dt>\n<dd class="value">{days[-1]["accepted"]}</dd>'
        self.assertIn(listing, report.read_text("utf-8"))

    def check_counters(self, counters: dict[str, int]) -> None:
        """The daemon's counters, its log and `/metrics` agree."""
        counted: Counter[str] = Counter()
        for row in self.rows("reconciliation_daily"):
            self.assertEqual((row["difference"], row["logged"]), (0, row["counted"]), row["counter"])
            counted[row["counter"]] += row["counted"]
        self.assertEqual(dict(counted), {COUNTER_METRICS[name]: value for name, value in counters.items()})

    def check_stores(self) -> None:
        """The store's ledger has no difference, and agrees with the log lines."""
        rows = self.rows("stores_daily")
        self.assertEqual({row["total"] for row in rows if row["entry"] == "difference"}, {0})
        self.assertEqual({row["gap"] for row in rows if row["entry"] in ENTRY_EVENTS}, {0})
        self.assertEqual(len({row["store"] for row in rows}), 1)
        last = {
            row["entry"]: row["total"] for row in rows if row["proto"] == "didcomm" and row["dt"] == rows[-1]["dt"]
        }
        for entry, event in ENTRY_EVENTS.items():
            logged = sum(row["logged"] for row in rows if row["entry"] == entry)
            self.assertEqual((logged, last[entry]), (self.ledger.events[event],) * 2, entry)
        self.assertEqual(
            last["waiting"], UNACKNOWLEDGED_COUNT + FETCHED_ONLY_COUNT + QUEUED_COUNT + QUEUE_CAPACITY - PURGED_COUNT
        )

    def check_requests_and_sockets(self) -> None:
        """Check refusals by code, and sockets."""
        refusals: Counter[str] = Counter()
        for row in self.rows("errors_daily"):
            refusals[row["code"]] += row["n"]
        self.assertEqual(refusals, self.ledger.refusals)
        sockets = self.rows("sockets_daily")
        for name in ("opened", "authenticated", "closed"):
            self.assertEqual(sum(row[name] for row in sockets), self.ledger.sockets, name)
        self.assertEqual(sum(row["unclosed"] for row in sockets), 0)
        ended = {(row["ws_code"], row["reason"]) for row in self.rows("sessions_daily")}
        self.assertEqual(ended, {(1000, "peer")})

    def check_quality(self) -> None:
        """Every line of every segment was read, each sequence number once."""
        segments = read_segments(self.daemon.log_directory)
        lines = sum(map(len, segments.values()))
        self.assertGreaterEqual(len(segments), 2)
        inputs = self.rows("inputs")
        self.assertEqual((len(inputs), {row["state"] for row in inputs}), (len(segments), {"closed"}))
        quality: Counter[str] = Counter()
        for row in self.rows("quality_daily"):
            quality[row["kind"]] += row["n"]
        # Any other kind is a defect.
        self.assertEqual(quality, {"lines": lines, "events": lines})
        boots = self.rows("boots_daily")
        self.assertEqual((sum(row["n"] for row in boots), sum(row["missing"] for row in boots)), (lines, 0))
