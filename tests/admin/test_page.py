"""Parts of the status page, and their aggregation over processes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import formatEvent
from twisted.logger._capture import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from mediatord.admin.page import (
    Markup,
    build_element,
    draw_sparkline,
    escape_text,
    format_byte_count,
    format_count,
    format_duration,
    format_rate,
    format_utc_time,
    join_markup,
    render_status_page,
)
from mediatord.admin.site import AdminAuthenticator, read_admin_token
from mediatord.admin.status import DaemonStatus, StatusCollector, render_status_json
from mediatord.admin.status_sources import TRAFFIC_KINDS, count_by_minute, measure_traffic_spans, merge_problems
from mediatord.config.file import ConfigError, load_config
from mediatord.config.settings import Config
from mediatord.errors import StartupError, StoreUnavailable
from mediatord.identity.key_file import create_keys
from mediatord.observability.metrics import Metrics
from mediatord.observability.push_statistics import PushStatistics
from mediatord.runtime.secret_files import SecretFileError
from mediatord.service import makeService
from mediatord.store.interfaces.messages import AgeBucket, LargeQueue, MessageLedger, QueueBacklog, StoreLedger
from tests.admin.in_memory_admin_site import BEARER, TOKEN
from tests.http.in_memory_site import InMemoryTransport, encode_request, parse_responses
from tests.in_memory_mediator import NOW, PEER, InMemoryReactor


class TokenTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        self.path = directory / "token"

    def write(self, content: bytes, mode: int = 0o600) -> Path:
        self.path.touch(mode)
        self.path.chmod(mode)
        self.path.write_bytes(content)
        return self.path

    def test_valid_token(self) -> None:
        """Surrounding white space is ignored."""
        self.assertEqual(read_admin_token(self.write(f" {TOKEN}\n".encode())), TOKEN.encode())

    def test_refused_token(self) -> None:
        """The error is one line without the token."""
        for content, mode, why in (
            (TOKEN.encode(), 0o640, "is accessible to other users (mode 0640); run: chmod 600"),
            (TOKEN[:-1].encode(), 0o600, "is shorter than 32 characters; run: openssl rand -hex 32 >"),
            (b"", 0o600, "is shorter than 32 characters"),
            (f"{TOKEN}\n{TOKEN}".encode(), 0o600, "expected one line of printable ASCII without spaces"),
            (f"{TOKEN} {TOKEN}".encode(), 0o600, "expected one line of printable ASCII without spaces"),
            ("ü".encode() * 32, 0o600, "expected one line of printable ASCII without spaces"),
            (b"\0" * 32, 0o600, "expected one line of printable ASCII without spaces"),
        ):
            with self.assertRaises(SecretFileError) as caught:
                read_admin_token(self.write(content, mode))
            self.assertIn(why, str(caught.exception))
            self.assertNotIn(TOKEN[:8], str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))
        self.path.unlink()
        with self.assertRaises(SecretFileError):
            read_admin_token(self.path)

    def test_only_digest_is_kept(self) -> None:
        """Only a digest of the token is kept."""
        clock: Any = MemoryReactorClock()
        self.assertNotIn(TOKEN, repr(vars(AdminAuthenticator(clock, TOKEN.encode()))))


def test_page_needs_token(tmp_path: Path) -> None:
    """The error has file, line and key; either setting without the page is no error."""
    path = tmp_path / "m.yaml"
    path.write_text("node: m1\nadmin:\n  listen: tcp:8081\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert caught.value.problems == [f"{path}:2: admin: expected token_file, because listen is set"]
    for alone in ("token_file: t", "reports: r", "listen: null"):
        path.write_text(f"admin: {{{alone}}}")
        assert load_config(path, {}).admin.listen is None
    path.write_text("admin: {listen: tcp:8081, token_file: t, reports: /var/r}")
    admin = load_config(path, {}).admin
    assert (admin.token_file, admin.reports) == (tmp_path / "t", Path("/var/r"))


class DaemonPageTests(SynchronousTestCase):
    """The page in a daemon built by `build`, on an in-memory reactor."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        self.token = self.directory / "token"
        self.token.touch(0o600)
        self.token.write_text(TOKEN)
        self.reactor: Any = InMemoryReactor()
        self.reactor.advance(NOW)

    def config(self, **admin: Any) -> Config:
        plain = {"storage": {"backend": "memory"}, "log": {"rotate": {"compress": False}}, "admin": admin}
        return Config.model_validate(plain).resolved(self.directory)

    def start(self, config: Config) -> Any:
        service = makeService(config, self.reactor)
        service.privilegedStartService()
        service.startService()
        self.addCleanup(service.stopService)
        return service

    def request_status(self, place: int, authorization: str = BEARER) -> int:
        """The status of the page on one of the listeners."""
        transport = InMemoryTransport(self.reactor, PEER)
        transport.protocol = self.reactor.tcpServers[place][1].buildProtocol(transport.getPeer())
        transport.protocol.makeConnection(transport)
        transport.feed(encode_request("GET", "/admin", None, {"Authorization": authorization}))
        self.reactor.advance(0)
        (response,) = parse_responses(transport.take_output())
        transport.disconnect()
        return response.status

    def test_disabled_by_default(self) -> None:
        """Nothing listens and nothing is read unless the page is enabled."""
        self.start(self.config(token_file="absent"))
        self.assertEqual(len(self.reactor.tcpServers), 1)
        self.assertEqual(self.request_status(0), 404)

    def test_enabled(self) -> None:
        """The page has its own listener, and is on no other; it is open as long as the daemon runs."""
        service = self.start(self.config(listen="tcp:8081:interface=127.0.0.1", token_file="token"))
        self.assertEqual([item[0] for item in self.reactor.tcpServers], [8080, 8081])
        self.assertEqual((self.request_status(0), self.request_status(1)), (404, 200))
        self.successResultOf(service.stopService())
        self.reactor.advance(0)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_unusable_token(self) -> None:
        """The daemon does not start, and says why in one line."""
        self.token.chmod(0o644)
        with self.assertRaises(StartupError) as caught:
            self.start(self.config(listen="tcp:8081", token_file="token"))
        self.assertTrue(
            str(caught.exception).startswith(f"admin.token_file: {self.token} is accessible to other users")
        )
        plain = {"workers": 2, "admin": {"listen": "tcp:8081", "token_file": "absent"}}
        with self.assertRaises(StartupError):
            makeService(Config.model_validate(plain).resolved(self.directory), self.reactor)

    def test_reload_changes_token(self) -> None:
        """Another token counts after a reload; an unusable one is ignored."""
        config = self.config(listen="tcp:8081", token_file="token")
        service = self.start(config)
        self.token.write_text("y" * 40)
        self.assertEqual((self.request_status(1), self.request_status(1, "Bearer " + "y" * 40)), (200, 401))
        service.reload(lambda: config)
        self.assertEqual((self.request_status(1), self.request_status(1, "Bearer " + "y" * 40)), (401, 200))
        self.token.write_text("short")
        with capturedLogs() as log_events:
            service.reload(lambda: config)
        self.assertEqual(self.request_status(1, "Bearer " + "y" * 40), 200)
        self.assertIn("keeping the current token of the status page", formatEvent(log_events[-1]))

    def test_refused_reload(self) -> None:
        """A refused reload changes nothing, the token included."""
        config = self.config(listen="tcp:8081", token_file="token")
        service = self.start(config)
        self.token.write_text("y" * 40)

        def invalid() -> Config:
            raise ConfigError(["m.yaml:1: nonsense"])

        service.reload(invalid)
        self.assertEqual((self.request_status(1), self.request_status(1, "Bearer " + "y" * 40)), (200, 401))


def status_of_worker(pid: int, **more: Any) -> dict[str, Any]:
    """The status of a worker."""
    process = {"node": f"m-{pid}", "pid": pid, "state": "serving", "well": True, "uptime": 100.0, "sockets": 2}
    return {**process, "slots": [], "problems": [], **more}


class AggregationTests(SynchronousTestCase):
    """The statuses of several processes as one."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.reactor.advance(NOW)
        self.worker_statuses: Any = (2, [status_of_worker(1), status_of_worker(2)])
        self.backlog: Any = QueueBacklog(0, 0, (AgeBucket(0, 0),) * 6, ())
        self.figures: Any = b"mediator_messages_forwarded_total 7.0\nmediator_active_connections 4.0\n"

    def status(self) -> DaemonStatus:
        async def read_processes() -> Any:
            if isinstance(self.worker_statuses, Exception):
                raise self.worker_statuses
            return self.worker_statuses

        async def read_queues() -> bytes:
            if isinstance(self.figures, Exception):
                raise self.figures
            text: bytes = self.figures
            return text

        async def backlog(bounds: object, top: int) -> QueueBacklog:
            if isinstance(self.backlog, Exception):
                raise self.backlog
            found: QueueBacklog = self.backlog
            return found

        collector = StatusCollector(
            clock=self.reactor,
            version="1",
            node="m-9",
            backend="sqlite",
            clustered=False,
            query_processes=read_processes,
            report_process=lambda: status_of_worker(9),
            render_metrics=read_queues,
            read_backlog=backlog,
            pseudonymize=lambda did: did,
            is_own=lambda did: did == "did:own",
            reports=None,
        )
        return self.successResultOf(collector.latest())

    def test_sums(self) -> None:
        """Traffic is summed slot by slot, and equal refusals are one row."""
        slot = int(NOW) // 10
        trouble = {"source": "request", "kind": "too_large", "where": "didcomm", "text": "e.p.x"}
        one = {**trouble, "count": 2, "first": NOW - 9, "last": NOW - 5}
        other = {**trouble, "count": 3, "first": NOW - 7, "last": NOW - 1}
        zeros = [0] * (len(TRAFFIC_KINDS) - 1)
        self.worker_statuses = (
            2,
            [
                status_of_worker(1, slots=[[slot, 5, *zeros], [slot - 30, 1, *zeros]], problems=[one]),
                status_of_worker(2, slots=[[slot, 6, *zeros]], problems=[other]),
                {"node": "m", "problems": []},
            ],
        )
        overview = self.status()
        self.assertEqual((overview.node, overview.processes.asked, len(overview.processes.answered)), ("m", 2, 2))
        accepted = overview.traffic["accepted"]
        self.assertEqual((accepted.last_minute, accepted.last_hour), (11, 12))
        (refusal,) = overview.refusals
        self.assertEqual((refusal.count, refusal.first, refusal.last), (5, NOW - 9, NOW - 1))
        self.assertEqual(accepted.total, 7)
        self.assertTrue(overview.well)
        self.assertIn("2 of 2", render_status_page(overview, NOW, refreshing=True).decode())

    def test_unresponsive_worker(self) -> None:
        """The page says that a worker is missing."""
        self.worker_statuses = (2, [status_of_worker(1)])
        overview = self.status()
        self.assertEqual((overview.well, overview.state), (False, "some workers do not respond"))
        self.assertIn("1 of 2", render_status_page(overview, NOW, refreshing=True).decode())
        self.assertIn("did not respond in time", render_status_page(overview, NOW, refreshing=True).decode())

    def test_unhealthy_worker(self) -> None:
        """One unhealthy worker makes the daemon unhealthy."""
        self.worker_statuses = (
            2,
            [status_of_worker(1), status_of_worker(2, state="waiting for the store", well=False)],
        )
        overview = self.status()
        self.assertEqual((overview.well, overview.state), (False, "waiting for the store"))

    def test_failed_probe(self) -> None:
        """A failed probe is shown once `/ready` is requested."""
        for ready, state in ((b"1.0", "serving"), (b"0.0", "end-to-end probe fails")):
            self.figures = b"mediator_ready " + ready + b"\n"
            self.assertEqual(self.status().state, state)

    def test_ledger(self) -> None:
        """The ledger is shown by protocol; a difference in either makes the daemon unhealthy, whatever the sum."""
        for differences, well in (((0, 0), True), ((-1, 1), False)):
            didcomm, decentrl = [
                MessageLedger(accepted=1234, waiting=1234 - difference) for difference in differences
            ]
            self.backlog = replace(self.backlog, ledger=StoreLedger(didcomm, decentrl))
            overview = self.status()
            self.assertEqual(overview.well, well)
            self.assertEqual(overview.state, "serving" if well else "message ledger does not balance")
            shown = render_status_page(overview, NOW, refreshing=True).decode()
            self.assertIn("1,234", shown)
            self.assertEqual("\N{MINUS SIGN}1" in shown, not well)
            ledger = json.loads(render_status_json(overview, NOW))["ledger"]
            self.assertEqual(
                [ledger[protocol]["difference"] for protocol in ("didcomm", "decentrl")], list(differences)
            )
            self.assertEqual(ledger["didcomm"]["accepted"], 1234)

    def test_uncounted_backlog(self) -> None:
        """With very many messages the ledger has no backlog, which is no problem."""
        self.backlog = replace(
            self.backlog, ledger=StoreLedger(MessageLedger(accepted=5, waiting=None), MessageLedger())
        )
        overview = self.status()
        ledger = json.loads(render_status_json(overview, NOW))["ledger"]
        self.assertEqual((ledger["didcomm"]["waiting"], ledger["didcomm"]["difference"]), (None, None))
        self.assertTrue(overview.well)

    def test_ages(self) -> None:
        """Page and document have the time of their figures, and their age."""
        overview = self.status()
        time_of_day = format_utc_time(NOW)
        for later, age in ((0, "0 s"), (2, "2 s"), (75, "1 min 15 s")):
            shown = render_status_page(overview, NOW + later, refreshing=True).decode()
            self.assertIn(f"As of {time_of_day} UTC, {age} ago, refreshed every 10 s (", shown)
            # The ledger, the backlog by age, and the largest queues.
            self.assertEqual(shown.count(f"As of {time_of_day} UTC, {age} ago."), 3)
            status = json.loads(render_status_json(overview, NOW + later))
            self.assertEqual((status["at"], status["age_seconds"]), (NOW, later))
            self.assertEqual((status["store"]["at"], status["store"]["age_seconds"]), (NOW, later))

    def test_ages_of_missing_figures(self) -> None:
        """Figures that the store has not reported have no time."""
        self.backlog = StoreUnavailable()
        overview = self.status()
        status = json.loads(render_status_json(overview, NOW))["store"]
        self.assertEqual((status["at"], status["age_seconds"], status["answers"]), (None, None, False))
        shown = render_status_page(overview, NOW, refreshing=True).decode()
        self.assertEqual(shown.count("Unavailable: the store did not respond."), 3)
        self.assertNotIn("No messages are queued.", shown)

    def test_totals_match_slots(self) -> None:
        """In a single-process daemon the totals are those of the slots, although the metrics have advanced."""
        zeros = [0] * (len(TRAFFIC_KINDS) - 1)
        totals = dict.fromkeys(TRAFFIC_KINDS, 0) | {"accepted": 5}
        self.worker_statuses = (1, [status_of_worker(1, slots=[[int(NOW) // 10, 5, *zeros]], totals=totals)])
        overview = self.status()
        accepted = overview.traffic["accepted"]
        self.assertEqual((accepted.total, accepted.last_hour), (5, 5))

    def test_a_lone_worker_is_not_the_daemon(self) -> None:
        """While another worker is being replaced, the totals include what it has counted."""
        totals = dict.fromkeys(TRAFFIC_KINDS, 0) | {"accepted": 5}
        self.worker_statuses = (1, [status_of_worker(1, totals=totals), {"node": "m", "problems": []}])
        overview = self.status()
        self.assertEqual((overview.processes.asked, overview.traffic["accepted"].total), (1, 7))

    def test_probe_queue(self) -> None:
        """Queued probe messages are shown separately, and are in the sums as well."""
        largest = (LargeQueue("did:own", 2, 20, NOW), LargeQueue("did:bob", 1, 10, NOW))
        self.backlog = replace(self.backlog, messages=3, bytes=30, largest=largest)
        overview = self.status()
        status = json.loads(render_status_json(overview, NOW))["waiting"]
        self.assertEqual(
            [(item["messages"], item["self_test"]) for item in status["largest"]], [(2, True), (1, False)]
        )
        shown = render_status_page(overview, NOW, refreshing=True).decode()
        self.assertIn("(self-test)", shown)
        self.assertNotIn("did:own", shown)

    def test_no_ledger(self) -> None:
        """The ledger is unknown while the store does not answer."""
        self.backlog = StoreUnavailable()
        overview = self.status()
        self.assertIsNone(json.loads(render_status_json(overview, NOW))["ledger"])

    def test_no_supervisor(self) -> None:
        """A worker shows at least its own status."""
        self.worker_statuses = self.figures = TimeoutError()
        overview = self.status()
        self.assertEqual([process.pid for process in overview.processes.answered], [9])
        self.assertEqual((overview.well, overview.gauges), (False, {}))
        self.assertEqual({counts.total for counts in overview.traffic.values()}, {None})
        self.assertIn("unknown", render_status_page(overview, NOW, refreshing=True).decode())

    def test_push_services(self) -> None:
        """One row for each configured service, summed over processes; no section without any."""
        self.assertNotIn("Push notifications", render_status_page(self.status(), NOW, refreshing=True).decode())
        metrics = Metrics(CollectorRegistry(), version="1")
        for service, outcome, count in (("fcm", "sent", 5), ("fcm", "retry", 2), ("webhook", "rejected", 1)):
            metrics.push_requests.inc(service, outcome, by=count)
        metrics.push_devices_forgotten.inc("fcm", by=4)
        # Of a service that is no longer configured.
        metrics.push_devices = {"fcm": 7, "apns": 3}
        metrics.count_push_hosts_backing_off = lambda: {"fcm": 1, "webhook": 1}
        self.figures = metrics.render()
        overview = self.status()
        fcm = PushStatistics("fcm", 7, sent=5, retry=2, rejected=0, forgotten=4, hosts_backing_off=1)
        webhook = PushStatistics("webhook", None, sent=0, retry=0, rejected=1, forgotten=0, hosts_backing_off=1)
        self.assertEqual(overview.push, (fcm, webhook))
        shown = render_status_page(overview, NOW, refreshing=True).decode()
        rows = re.findall(r'<tr><th class="name" scope="row">(fcm|webhook)</th>(.*?)</tr>', shown)
        cells = {service: re.findall(r"<td[^>]*>(.*?)</td>", row) for service, row in rows}
        self.assertEqual(cells, {"fcm": ["7", "5", "2", "0", "4", "1"], "webhook": ["", "0", "0", "1", "0", "1"]})
        status = json.loads(render_status_json(overview, NOW))["push"]
        self.assertEqual([one["service"] for one in status], ["fcm", "webhook"])
        self.figures = TimeoutError()
        self.assertIsNone(self.status().push)

    def test_concurrent_requests(self) -> None:
        """They share one computation; an error goes to both."""
        response: list[Deferred[Any]] = []

        def read_processes() -> Deferred[Any]:
            response.append(Deferred())
            return response[-1]

        unused: Any = None
        overviews = StatusCollector(
            clock=self.reactor,
            version="1",
            node="m",
            backend="sqlite",
            clustered=False,
            query_processes=read_processes,
            report_process=dict,
            render_metrics=unused,
            read_backlog=unused,
            pseudonymize=str,
            is_own=unused,
            reports=None,
        )
        responses = [overviews.latest(), overviews.latest()]
        self.assertEqual(len(response), 1)
        response[0].errback(RuntimeError("boom"))
        for answer in responses:
            self.failureResultOf(answer, RuntimeError)
        overviews.latest()
        self.assertEqual(len(response), 2)


def test_rates_of_new_daemon() -> None:
    """Rates are for the time since the start."""
    slot = [int(NOW) // 10, 30, *[0] * (len(TRAFFIC_KINDS) - 1)]
    assert sum(count_by_minute([[slot]], NOW + 5)["accepted"]) == 30
    assert measure_traffic_spans(NOW + 5, 10.0) == (10.0, 10.0)
    assert measure_traffic_spans(NOW + 5, 99_999.0) == (55, 3_595)


def test_number_of_problems_is_bounded() -> None:
    """However many processes report some."""
    status = [
        {"source": "output", "kind": "warn", "where": "x", "text": f"{n}", "count": 1, "first": n, "last": n}
        for n in range(70)
    ]
    found = merge_problems([status[:50], status[50:]], "output")
    assert [item.text for item in found] == [f"{n}" for n in range(69, 19, -1)]
    assert merge_problems([status], "request") == []


def test_escapes_markup() -> None:
    """Text that is not marked as HTML is escaped, in elements and attributes."""
    assert escape_text("<&\"'>") == "&lt;&amp;&quot;&#x27;&gt;"
    assert escape_text("a\u202eb\x00\n") == "a\ufffdb\ufffd\ufffd"
    assert build_element("p", "<", Markup("<b>"), class_='"x"') == '<p class="&quot;x&quot;">&lt;<b></p>'
    assert join_markup("a", Markup("<i>"), by=", ") == "a, <i>"
    assert draw_sparkline([0, 0], "<none>").count("&lt;none&gt;") == 1


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        *(
            (format_duration(0), "0 s"),
            (format_duration(59.9), "59 s"),
            (format_duration(3_600), "1 h"),
            (format_duration(90_061), "1 d 1 h"),
            (format_duration(-1), "0 s"),
        ),
        *(
            (format_byte_count(0), "0 B"),
            (format_byte_count(1_023), "1023 B"),
            (format_byte_count(1_536), "1.5 KiB"),
            (format_byte_count(2**50), "1024 TiB"),
        ),
        *(
            (format_count(9_999_999), "9,999,999"),
            (format_count(1_234_567_890), "1,234.6 M"),
            (format_rate(1_234.0), "1,234/s"),
        ),
        *(
            (format_byte_count(None), "unknown"),
            (format_rate(2.0), "2.0/s"),
            (format_rate(0.1), "6.0/min"),
            (format_rate(1 / 1800), "2/h"),
        ),
    ],
)
def test_number_format(shown: str, expected: str) -> None:
    """Numbers are written for people."""
    assert shown == expected
