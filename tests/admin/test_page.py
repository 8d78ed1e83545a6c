"""The parts of the status page for operators, and how it is put together."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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

    def test_good(self) -> None:
        """White space around it does not count."""
        self.assertEqual(read_admin_token(self.write(f" {TOKEN}\n".encode())), TOKEN.encode())

    def test_refused(self) -> None:
        """In one line, without a word of it."""
        for content, mode, why in (
            (TOKEN.encode(), 0o640, "is open to others (mode 0640); type: chmod 600"),
            (TOKEN[:-1].encode(), 0o600, "holds less than 32 characters; type: openssl rand -hex 32 >"),
            (b"", 0o600, "holds less than 32 characters"),
            (f"{TOKEN}\n{TOKEN}".encode(), 0o600, "has to hold one line of ASCII without spaces"),
            (f"{TOKEN} {TOKEN}".encode(), 0o600, "has to hold one line of ASCII without spaces"),
            ("ü".encode() * 32, 0o600, "has to hold one line of ASCII without spaces"),
            (b"\0" * 32, 0o600, "has to hold one line of ASCII without spaces"),
        ):
            with self.assertRaises(SecretFileError) as caught:
                read_admin_token(self.write(content, mode))
            self.assertIn(why, str(caught.exception))
            self.assertNotIn(TOKEN[:8], str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))
        self.path.unlink()
        with self.assertRaises(SecretFileError):
            read_admin_token(self.path)

    def test_not_kept(self) -> None:
        """Only a digest of it is."""
        clock: Any = MemoryReactorClock()
        self.assertNotIn(TOKEN, repr(vars(AdminAuthenticator(clock, TOKEN.encode()))))


def test_a_page_needs_a_token(tmp_path: Path) -> None:
    """With file, line and key; alone, neither of the two is a mistake."""
    path = tmp_path / "m.yaml"
    path.write_text("node: m1\nadmin:\n  listen: tcp:8081\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert caught.value.problems == [f"{path}:2: admin: expected a token_file beside listen"]
    for alone in ("token_file: t", "reports: r", "listen: null"):
        path.write_text(f"admin: {{{alone}}}")
        assert load_config(path, {}).admin.listen is None
    path.write_text("admin: {listen: tcp:8081, token_file: t, reports: /var/r}")
    admin = load_config(path, {}).admin
    assert (admin.token_file, admin.reports) == (tmp_path / "t", Path("/var/r"))


class DaemonPageTests(SynchronousTestCase):
    """The page in the daemon as `build` makes it, on a reactor of memory."""

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

    def ask(self, place: int, authorization: str = BEARER) -> int:
        """The status of the page on one of the listeners."""
        transport = InMemoryTransport(self.reactor, PEER)
        transport.protocol = self.reactor.tcpServers[place][1].buildProtocol(transport.getPeer())
        transport.protocol.makeConnection(transport)
        transport.feed(encode_request("GET", "/admin", None, {"Authorization": authorization}))
        self.reactor.advance(0)
        (response,) = parse_responses(transport.take_output())
        transport.disconnect()
        return response.status

    def test_off(self) -> None:
        """Nobody listens, and nothing is read, unless it is asked for."""
        self.start(self.config(token_file="absent"))
        self.assertEqual(len(self.reactor.tcpServers), 1)
        self.assertEqual(self.ask(0), 404)

    def test_on(self) -> None:
        """On a listener of its own, and on no other; the page listens as long as the daemon."""
        service = self.start(self.config(listen="tcp:8081:interface=127.0.0.1", token_file="token"))
        self.assertEqual([one[0] for one in self.reactor.tcpServers], [8080, 8081])
        self.assertEqual((self.ask(0), self.ask(1)), (404, 200))
        self.successResultOf(service.stopService())
        self.reactor.advance(0)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_unusable(self) -> None:
        """The daemon does not start, and says why in a line."""
        self.token.chmod(0o644)
        with self.assertRaises(StartupError) as caught:
            self.start(self.config(listen="tcp:8081", token_file="token"))
        self.assertTrue(str(caught.exception).startswith(f"admin.token_file: {self.token} is open to others"))
        plain = {"workers": 2, "admin": {"listen": "tcp:8081", "token_file": "absent"}}
        with self.assertRaises(StartupError):
            makeService(Config.model_validate(plain).resolved(self.directory), self.reactor)

    def test_another_token(self) -> None:
        """It counts once the configuration was read again; one that cannot be used does not."""
        config = self.config(listen="tcp:8081", token_file="token")
        service = self.start(config)
        self.token.write_text("y" * 40)
        self.assertEqual((self.ask(1), self.ask(1, "Bearer " + "y" * 40)), (200, 401))
        service.reload(lambda: config)
        self.assertEqual((self.ask(1), self.ask(1, "Bearer " + "y" * 40)), (401, 200))
        self.token.write_text("short")
        with capturedLogs() as said:
            service.reload(lambda: config)
        self.assertEqual(self.ask(1, "Bearer " + "y" * 40), 200)
        self.assertIn("the token of the status page stays as it was", formatEvent(said[-1]))

    def test_a_refused_reload(self) -> None:
        """Nothing has changed then, and the token has not either."""
        config = self.config(listen="tcp:8081", token_file="token")
        service = self.start(config)
        self.token.write_text("y" * 40)

        def wrong() -> Config:
            raise ConfigError(["m.yaml:1: nonsense"])

        service.reload(wrong)
        self.assertEqual((self.ask(1), self.ask(1, "Bearer " + "y" * 40)), (200, 401))


def of_worker(pid: int, **more: Any) -> dict[str, Any]:
    """What a worker tells."""
    process = {"node": f"m-{pid}", "pid": pid, "state": "serving", "well": True, "uptime": 100.0, "sockets": 2}
    return {**process, "slots": [], "problems": [], **more}


class SeveralTests(SynchronousTestCase):
    """What several processes say, as one."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.reactor.advance(NOW)
        self.told: Any = (2, [of_worker(1), of_worker(2)])
        self.backlog: Any = QueueBacklog(0, 0, (AgeBucket(0, 0),) * 6, ())
        self.figures: Any = b"mediator_messages_forwarded_total 7.0\nmediator_active_connections 4.0\n"

    def overview(self) -> DaemonStatus:
        async def processes() -> Any:
            if isinstance(self.told, Exception):
                raise self.told
            return self.told

        async def figures() -> bytes:
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
            query_processes=processes,
            report_process=lambda: of_worker(9),
            render_metrics=figures,
            read_backlog=backlog,
            pseudonymize=lambda did: did,
            is_own=lambda did: did == "did:own",
            reports=None,
        )
        return self.successResultOf(collector.latest())

    def test_sums(self) -> None:
        """Traffic is added up slot by slot, and refusals for the same reason are one."""
        slot = int(NOW) // 10
        trouble = {"source": "request", "kind": "too_large", "where": "didcomm", "text": "e.p.x"}
        one = {**trouble, "count": 2, "first": NOW - 9, "last": NOW - 5}
        other = {**trouble, "count": 3, "first": NOW - 7, "last": NOW - 1}
        zeros = [0] * (len(TRAFFIC_KINDS) - 1)
        self.told = (
            2,
            [
                of_worker(1, slots=[[slot, 5, *zeros], [slot - 30, 1, *zeros]], problems=[one]),
                of_worker(2, slots=[[slot, 6, *zeros]], problems=[other]),
                {"node": "m", "problems": []},
            ],
        )
        overview = self.overview()
        self.assertEqual((overview.node, overview.processes.asked, len(overview.processes.answered)), ("m", 2, 2))
        accepted = overview.traffic["accepted"]
        self.assertEqual((accepted.last_minute, accepted.last_hour), (11, 12))
        (refusal,) = overview.refusals
        self.assertEqual((refusal.count, refusal.first, refusal.last), (5, NOW - 9, NOW - 1))
        self.assertEqual(accepted.total, 7)
        self.assertTrue(overview.well)
        self.assertIn("2 of 2", render_status_page(overview, NOW, refreshing=True).decode())

    def test_one_is_silent(self) -> None:
        """It is said that it is missing."""
        self.told = (2, [of_worker(1)])
        overview = self.overview()
        self.assertEqual((overview.well, overview.state), (False, "some workers do not respond"))
        self.assertIn("1 of 2", render_status_page(overview, NOW, refreshing=True).decode())
        self.assertIn("did not respond in time", render_status_page(overview, NOW, refreshing=True).decode())

    def test_one_is_not_well(self) -> None:
        """Then the daemon is not."""
        self.told = (2, [of_worker(1), of_worker(2, state="waiting for the store", well=False)])
        overview = self.overview()
        self.assertEqual((overview.well, overview.state), (False, "waiting for the store"))

    def test_messages_do_not_get_through(self) -> None:
        """That is said once somebody asks `/ready`."""
        for ready, state in ((b"1.0", "serving"), (b"0.0", "end-to-end probe fails")):
            self.figures = b"mediator_ready " + ready + b"\n"
            self.assertEqual(self.overview().state, state)

    def test_books(self) -> None:
        """They stand there by protocol; with a difference in either the daemon is not well, whatever the sum is."""
        for differences, well in (((0, 0), True), ((-1, 1), False)):
            didcomm, decentrl = [
                MessageLedger(accepted=1234, waiting=1234 - difference) for difference in differences
            ]
            self.backlog = replace(self.backlog, ledger=StoreLedger(didcomm, decentrl))
            overview = self.overview()
            self.assertEqual(overview.well, well)
            self.assertEqual(overview.state, "serving" if well else "message ledger does not balance")
            shown = render_status_page(overview, NOW, refreshing=True).decode()
            self.assertIn("1,234", shown)
            self.assertEqual("\N{MINUS SIGN}1" in shown, not well)
            books = json.loads(render_status_json(overview, NOW))["ledger"]
            self.assertEqual(
                [books[protocol]["difference"] for protocol in ("didcomm", "decentrl")], list(differences)
            )
            self.assertEqual(books["didcomm"]["accepted"], 1234)

    def test_waiting_that_is_not_counted(self) -> None:
        """Of very many messages the books do not say how many wait, and nothing is wrong."""
        self.backlog = replace(
            self.backlog, ledger=StoreLedger(MessageLedger(accepted=5, waiting=None), MessageLedger())
        )
        overview = self.overview()
        books = json.loads(render_status_json(overview, NOW))["ledger"]
        self.assertEqual((books["didcomm"]["waiting"], books["didcomm"]["difference"]), (None, None))
        self.assertTrue(overview.well)

    def test_ages(self) -> None:
        """Page and document say of which time their figures are, and how long ago that is."""
        overview = self.overview()
        time_of_day = format_utc_time(NOW)
        for later, age in ((0, "0 s"), (2, "2 s"), (75, "1 min 15 s")):
            shown = render_status_page(overview, NOW + later, refreshing=True).decode()
            self.assertIn(f"As of {time_of_day} UTC, {age} ago; ", shown)
            # The books, what waits by age, and the largest queues.
            self.assertEqual(shown.count(f"As of {time_of_day} UTC, {age} ago."), 3)
            told = json.loads(render_status_json(overview, NOW + later))
            self.assertEqual((told["at"], told["age_seconds"]), (NOW, later))
            self.assertEqual((told["store"]["at"], told["store"]["age_seconds"]), (NOW, later))

    def test_ages_of_nothing(self) -> None:
        """What the store has not said is of no time."""
        self.backlog = StoreUnavailable()
        overview = self.overview()
        told = json.loads(render_status_json(overview, NOW))["store"]
        self.assertEqual((told["at"], told["age_seconds"], told["answers"]), (None, None, False))
        shown = render_status_page(overview, NOW, refreshing=True).decode()
        self.assertEqual(shown.count("Not available: the store did not respond."), 3)
        self.assertNotIn("No messages are queued.", shown)

    def test_totals_of_the_same_moment(self) -> None:
        """Of a daemon that is one process the totals are those of its slots, though the metrics have gone on."""
        zeros = [0] * (len(TRAFFIC_KINDS) - 1)
        totals = dict.fromkeys(TRAFFIC_KINDS, 0) | {"accepted": 5}
        self.told = (1, [of_worker(1, slots=[[int(NOW) // 10, 5, *zeros]], totals=totals)])
        overview = self.overview()
        accepted = overview.traffic["accepted"]
        self.assertEqual((accepted.total, accepted.last_hour), (5, 5))

    def test_own_queue(self) -> None:
        """What waits for the self-test is shown as that: it is in the sums as well."""
        largest = (LargeQueue("did:own", 2, 20, NOW), LargeQueue("did:bob", 1, 10, NOW))
        self.backlog = replace(self.backlog, messages=3, bytes=30, largest=largest)
        overview = self.overview()
        told = json.loads(render_status_json(overview, NOW))["waiting"]
        self.assertEqual([(one["messages"], one["self_test"]) for one in told["largest"]], [(2, True), (1, False)])
        shown = render_status_page(overview, NOW, refreshing=True).decode()
        self.assertIn("(self-test)", shown)
        self.assertNotIn("did:own", shown)

    def test_no_books(self) -> None:
        """While the store does not answer they are unknown."""
        self.backlog = StoreUnavailable()
        overview = self.overview()
        self.assertIsNone(json.loads(render_status_json(overview, NOW))["ledger"])

    def test_no_supervisor(self) -> None:
        """A worker tells at least what it knows itself."""
        self.told = self.figures = TimeoutError()
        overview = self.overview()
        self.assertEqual([one.pid for one in overview.processes.answered], [9])
        self.assertEqual((overview.well, overview.gauges), (False, {}))
        self.assertEqual({counts.total for counts in overview.traffic.values()}, {None})
        self.assertIn("unknown", render_status_page(overview, NOW, refreshing=True).decode())

    def test_two_at_once(self) -> None:
        """They share what is being made, and a fault is told to both."""
        response: list[Deferred[Any]] = []

        def processes() -> Deferred[Any]:
            response.append(Deferred())
            return response[-1]

        unused: Any = None
        overviews = StatusCollector(
            clock=self.reactor,
            version="1",
            node="m",
            backend="sqlite",
            clustered=False,
            query_processes=processes,
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


def test_rates_of_a_young_daemon() -> None:
    """They are those of the time that it has been there."""
    slot = [int(NOW) // 10, 30, *[0] * (len(TRAFFIC_KINDS) - 1)]
    assert sum(count_by_minute([[slot]], NOW + 5)["accepted"]) == 30
    assert measure_traffic_spans(NOW + 5, 10.0) == (10.0, 10.0)
    assert measure_traffic_spans(NOW + 5, 99_999.0) == (55, 3_595)


def test_only_so_many_problems() -> None:
    """However many processes tell of some."""
    told = [
        {"source": "output", "kind": "warn", "where": "x", "text": f"{n}", "count": 1, "first": n, "last": n}
        for n in range(70)
    ]
    found = merge_problems([told[:50], told[50:]], "output")
    assert [one.text for one in found] == [f"{n}" for n in range(69, 19, -1)]
    assert merge_problems([told], "request") == []


def test_markup() -> None:
    """What is not marked as HTML is escaped, in elements and in attributes."""
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
def test_numbers(shown: str, expected: str) -> None:
    """As people read them."""
    assert shown == expected
