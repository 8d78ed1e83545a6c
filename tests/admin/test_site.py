"""The status page: access, content, reports."""

from __future__ import annotations

import contextlib
import json
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.trial.unittest import SynchronousTestCase

from mediatord import __version__
from mediatord.errors import RateLimitExceeded, StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import ClockSkewError
from mediatord.store.interfaces.messages import Payload, QueueBacklog, new_stored_message_id
from tests.admin.in_memory_admin_site import BEARER, TOKEN, InMemoryAdminSite
from tests.http.in_memory_site import encode_request, parse_responses
from tests.in_memory_mediator import NOW

ALICE = "did:example:alice"
# Without the characters that begin the path of a DID URL.
EVIL = "did:key:z<script>alert(1)<script>\"onload='x'&amp\u202e"


def basic(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


def count_open(path: Path) -> int:
    """Count descriptors of this process for a file; other threads open and close others."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}") == str(path.resolve())
    return found


class PageParser(HTMLParser):
    """:ivar tags: elements with their attributes; `text`: all visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


class AdminTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryAdminSite(self, log={"dids": "plain"})
        self.addCleanup(self.flushLoggedErrors)

    def enqueue(self, did: str, *sizes: int, account: str = ALICE) -> None:
        """Queue messages for a DID."""
        store, now = self.in_memory.store, self.in_memory.clock.seconds()
        self.successResultOf(store.grant(account))
        self.successResultOf(store.update_recipients(account, [(did, "add")], max_recipients=99))
        for number, size in enumerate(sizes):
            payload = Payload(f"{new_stored_message_id(now)} {number}", b"x" * size, "json")
            self.successResultOf(store.enqueue(did, [payload], expires_at=now + 1e6))


class AccessTests(AdminTestCase):
    """Access by token only."""

    PATHS = (
        "/",
        "/admin",
        "/admin/",
        "/admin/status.json",
        "/admin/report/2026-01-01/index.html",
        "/x",
        "/favicon.ico",
        "*",
    )

    def test_without_token(self) -> None:
        """Every path gets the same response, whether it exists or not, and browsers ask for the token."""
        self.in_memory.write_report("2026-01-01")
        responses = [
            self.in_memory.request(path, authorization, method)
            for path in self.PATHS
            for authorization, method in ((None, "GET"), (None, "POST"), (None, "OPTIONS"), (None, "PURGE"))
        ]
        self.assertEqual({(response.status, response.body) for response in responses}, {(401, b"unauthorized\n")})
        self.assertEqual(
            {item.headers["www-authenticate"] for item in responses}, {'Basic realm="status", charset="UTF-8"'}
        )
        headers = {name: value for name, value in responses[0].headers.items() if name != "date"}
        self.assertNotIn("access-control-allow-origin", headers)
        self.assertNotIn(__version__, str(headers))

    def test_wrong_token(self) -> None:
        """Other texts, and parts of the token."""
        for number, wrong in enumerate(
            (
                *("", "Bearer", "Bearer ", "Basic", "Basic  ", "Basic !!", "Negotiate abc", TOKEN, "Basic " + TOKEN),
                *(f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0", f"Bearer {TOKEN.upper()}", f"Digest {TOKEN}"),
                *(basic(TOKEN, ""), basic("admin", TOKEN[1:]), basic("", f"{TOKEN}:"), basic("x", f":{TOKEN}")),
                "Basic " + b64encode(TOKEN.encode()).decode(),
                "Basic " + b64encode(b":\xff\xfe").decode(),
            )
        ):
            self.assertEqual(self.in_memory.request("/admin", wrong, peer=f"198.51.100.{number}").status, 401, wrong)

    def test_right_token(self) -> None:
        """As Bearer, or as the password of any user."""
        for right in (
            BEARER,
            f"bearer   {TOKEN} ",
            basic("", TOKEN),
            basic("ops", TOKEN),
            f"BASIC {basic('a', TOKEN)[6:]}",
        ):
            self.assertEqual(self.in_memory.request("/admin", right).status, 200, right)
        for path, place in (("/", "admin"), ("/admin/", "../admin")):
            response = self.in_memory.request(path)
            self.assertEqual((response.status, response.headers["location"]), (302, place))
        for path in ("/x", "/admin/x", "/admin/status.json/", "/admin/report", "//admin", "/admin//status.json"):
            self.assertEqual(self.in_memory.request(path).status, 404, path)

    def test_guessing_is_limited(self) -> None:
        """After ten wrong tokens an address has to wait, also with the right one; others need not."""
        for _ in range(10):
            self.assertEqual(self.in_memory.request("/admin", "Bearer guess").status, 401)
            self.in_memory.clock.advance(1)
        response = self.in_memory.request("/admin")
        self.assertEqual((response.status, response.headers["retry-after"]), (429, "50"))
        self.assertEqual(self.in_memory.request("/admin", peer="198.51.100.1").status, 200)
        self.in_memory.clock.advance(50)
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_missing_token_is_no_guess(self) -> None:
        """A browser first sends none."""
        for _ in range(30):
            self.assertEqual(self.in_memory.request("/admin", None).status, 401)
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_guesses_behind_proxy(self) -> None:
        """A trusted proxy names the client that guesses."""
        in_memory = InMemoryAdminSite(self, trusted_proxies=["127.0.0.1"])
        for _ in range(11):
            in_memory.request("/admin", "Bearer guess", peer="127.0.0.1", **{"X-Forwarded-For": "203.0.113.9"})
        blocked = in_memory.request("/admin", peer="127.0.0.1", **{"X-Forwarded-For": "203.0.113.9"})
        self.assertEqual(blocked.status, 429)
        self.assertEqual(in_memory.request("/admin", peer="127.0.0.1").status, 200)

    def test_other_methods(self) -> None:
        """Other methods are refused."""
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            response = self.in_memory.request("/admin", method=method)
            self.assertEqual((response.status, response.headers["allow"]), (405, "GET, HEAD"))
        head = self.in_memory.request("/admin", method="HEAD")
        self.assertEqual((head.status, head.body), (200, b""))
        self.assertGreater(int(head.headers["content-length"]), 1000)

    def test_not_http(self) -> None:
        """Invalid requests get no details."""
        self.assertTrue(
            self.in_memory.exchange_raw(b"\x16\x03\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400 Bad Request\r\n")
        )

    def test_large_bodies(self) -> None:
        """Large bodies are not buffered."""
        transport = self.in_memory.connect()
        transport.feed(encode_request("POST", "/admin", None, {"Content-Length": "9999999", "Authorization": BEARER}))
        transport.feed(b"x" * 200_000)
        self.in_memory.run_due_calls()
        self.assertTrue(transport.lost)

    def test_connection_limit(self) -> None:
        """Connections are limited, and closed ones make room."""
        transports = [self.in_memory.connect() for _ in range(64)]
        self.assertIsNone(self.in_memory.site.buildProtocol(transports[0].getPeer()))
        transports[0].disconnect()
        self.assertIsNotNone(self.in_memory.site.buildProtocol(transports[0].getPeer()))

    def test_idle_connection(self) -> None:
        """An idle connection is closed."""
        transport = self.in_memory.connect()
        transport.feed(b"GET /admin HTTP/1.1\r\n")
        self.in_memory.clock.pump([30] * 5)
        self.assertTrue(transport.lost)


class PageTests(AdminTestCase):
    """Content of the page."""

    def test_headers(self) -> None:
        """No caching, framing or scripts; only the style with the hash in the policy."""
        response = self.in_memory.request("/admin")
        headers = response.headers
        self.assertEqual(headers["content-type"], "text/html; charset=utf-8")
        self.assertEqual(headers["cache-control"], "no-store")
        self.assertEqual(headers["x-content-type-options"], "nosniff")
        self.assertEqual(headers["referrer-policy"], "no-referrer")
        policy = headers["content-security-policy"]
        self.assertIn("default-src 'none'; style-src 'sha256-", policy)
        self.assertIn("frame-ancestors 'none'", policy)
        self.assertNotIn("script", policy)
        style = response.body.decode().partition("<style>")[2].partition("</style>")[0]
        (digest,) = re.findall(r"'sha256-([^']+)'", policy)
        self.assertEqual(b64decode(digest), sha256(style.encode()).digest())

    def test_no_active_content(self) -> None:
        """No script, no inline style, no other URL."""
        self.enqueue(EVIL, 1)
        document = PageParser(self.in_memory.page())
        names = {tag for tag, _ in document.tags}
        self.assertFalse(names & {"script", "iframe", "img", "object", "form", "embed", "base"})
        for tag, attributes in document.tags:
            self.assertFalse([name for name in attributes if name == "style" or name.startswith("on")], tag)
            address = attributes.get("href") or ""
            self.assertRegex(address, r"^(|data:,|\?refresh=0|admin[a-z0-9/.-]*)$")

    def test_refresh(self) -> None:
        """The page refreshes itself until paused."""
        self.assertIn('<meta http-equiv="refresh" content="10">', self.in_memory.page())
        paused = self.in_memory.request("/admin?refresh=0").body.decode()
        self.assertNotIn("http-equiv", paused)
        self.assertIn('<a href="admin">resume</a>', paused)

    def test_state(self) -> None:
        """Version, node, store and state."""
        text = PageParser(self.in_memory.page()).text
        for words in (__version__, "mediatord at m1", "memory, available", "OK", "serving"):
            self.assertIn(words, text)
        status = self.in_memory.status()
        self.assertEqual((status["ok"], status["state"], status["node"]), (True, "serving", "m1"))
        self.assertEqual(status["uptime_seconds"], 6)

    def test_store_unavailable(self) -> None:
        """The page is served nevertheless."""
        self.in_memory.base.recorder.metrics.set_storage_up(False)
        with self.in_memory.failing("read_backlog", StoreUnavailable()):
            status = self.in_memory.status()
            text = PageParser(self.in_memory.page()).text
        self.assertEqual((status["ok"], status["waiting"], status["store"]["answers"]), (False, None, False))
        self.assertIn("waiting for the store", text)
        self.assertIn("not responding", text)

    def test_store_hangs(self) -> None:
        """The page waits only briefly, and does not ask again before the store has answered."""
        pending_reads: list[Deferred[QueueBacklog]] = []

        def hang(bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
            pending_reads.append(Deferred())
            return pending_reads[-1]

        backlog = self.in_memory.store.read_backlog
        self.patch(self.in_memory.store, "read_backlog", hang)
        transport = self.in_memory.connect()
        transport.feed(encode_request("GET", "/admin/status.json", None, {"Authorization": BEARER}))
        self.in_memory.clock.advance(4.9)
        self.assertEqual(transport.take_output(), b"")
        self.in_memory.clock.advance(0.1)
        (response,) = parse_responses(transport.take_output())
        self.assertEqual(
            (response.status, response.json["store"]["answers"], response.json["ok"]), (200, False, False)
        )
        self.assertIsNone(self.in_memory.status()["waiting"])
        self.assertEqual(len(pending_reads), 1)
        backlog([], 0).chainDeferred(pending_reads[0])
        self.patch(self.in_memory.store, "read_backlog", backlog)
        self.assertIsNotNone(self.in_memory.status()["waiting"])

    def test_stopping(self) -> None:
        """The state is shown."""
        self.in_memory.base.gate.stopService()
        self.assertEqual(self.in_memory.status()["state"], "stopping")

    def test_trouble(self) -> None:
        """The reasons of `/health` are shown."""
        self.in_memory.base.node_health.clock_differs(ClockSkewError(3_600.0))
        status = self.in_memory.status()
        self.assertEqual(
            (status["ok"], status["state"]), (False, "the clock of this host is 1 h ahead of the MongoDB server's")
        )

    def test_internal_error(self) -> None:
        """An internal error is logged without its text, and the response has no details."""
        with self.in_memory.failing("read_backlog", ValueError("secret")):
            response = self.in_memory.request("/admin")
        self.assertEqual((response.status, response.body), (500, b"internal error\n"))
        (logged,) = self.flushLoggedErrors(ValueError)
        self.assertNotIn("secret", str(logged.value))
        self.in_memory.clock.advance(3)
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_page_is_cached(self) -> None:
        """For any number of viewers the store is asked once in two seconds."""
        response: list[int] = []
        backlog = self.in_memory.store.read_backlog

        def counted(bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
            response.append(top)
            return backlog(bounds, top)

        self.patch(self.in_memory.store, "read_backlog", counted)
        for _ in range(3):
            self.in_memory.request("/admin")
            self.in_memory.request("/admin/status.json")
        self.assertEqual(len(response), 1)
        self.in_memory.clock.advance(2)
        self.in_memory.request("/admin")
        self.assertEqual(len(response), 2)

    def test_client_disconnects(self) -> None:
        """No response is written."""
        transport = self.in_memory.connect()
        transport.feed(encode_request("GET", "/admin", None, {"Authorization": BEARER}))
        transport.disconnect()
        self.in_memory.run_due_calls()
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_pipelined_requests(self) -> None:
        """Two pipelined requests are answered in order."""
        one = encode_request("GET", "/admin/status.json", None, {"Authorization": BEARER})
        other = encode_request("GET", "/x", None, {"Authorization": BEARER})
        self.assertEqual(
            [answer.status for answer in parse_responses(self.in_memory.exchange_raw(one + other))], [200, 404]
        )


class QueueTests(AdminTestCase):
    """The backlog."""

    def test_ages(self) -> None:
        """By age, and the largest queues by their pseudonyms."""
        for size, pause in ((1, 90_000), (2, 30_000), (4, 5_000), (8, 1_000), (16, 300), (32, 10)):
            self.enqueue(f"did:key:z{size}", *[10] * size)
            self.in_memory.clock.advance(pause)
        waiting = self.in_memory.status()["waiting"]
        ages = [(item["below_seconds"], item["messages"], item["bytes"], item["exact"]) for item in waiting["by_age"]]
        bounds = (60, 600, 3_600, 21_600, 86_400, None)
        sizes = (32, 16, 8, 4, 2, 1)
        self.assertEqual(ages, [(bound, n, 10 * n, True) for bound, n in zip(bounds, sizes, strict=True)])
        first = waiting["largest"][0]
        self.assertEqual((first["recipient"], first["messages"], first["oldest_seconds"]), ("did:key:z32", 32, 13))
        text = PageParser(self.in_memory.page()).text
        self.assertIn("did:key:z32", text)
        self.assertIn("630 B", text)

    def test_markup_in_did(self) -> None:
        """It is escaped, and does not change the text direction."""
        self.enqueue(EVIL, 1)
        document = PageParser(self.in_memory.page())
        self.assertIn(EVIL.replace("\u202e", "\ufffd"), document.text)
        self.assertEqual([tag for tag, _ in document.tags if tag == "script"], [])
        self.assertEqual(self.in_memory.status()["waiting"]["largest"][0]["recipient"], EVIL)

    def test_pseudonyms(self) -> None:
        """A DID appears as in the log."""
        self.in_memory = InMemoryAdminSite(self, log={"dids": "keyed"})
        self.enqueue("did:key:zSecret", 1)
        self.assertNotIn("zSecret", self.in_memory.page())
        self.assertNotIn("zSecret", json.dumps(self.in_memory.status()))
        tag = self.in_memory.base.recorder.pseudonymize("did:key:zSecret")
        self.assertIn(tag, self.in_memory.page())


class TrafficTests(AdminTestCase):
    """Counters."""

    def flow(self, name: str) -> tuple[int, int, int]:
        flow = self.in_memory.status()["traffic"][name]
        return flow["total"], flow["last_minute"], flow["last_hour"]

    def test_periods(self) -> None:
        """The last minute, the last hour, and since the start."""
        metrics = self.in_memory.base.recorder.metrics
        metrics.forwarded.inc(by=5)
        self.in_memory.clock.pump([10] * 30)
        metrics.forwarded.inc(by=2)
        self.in_memory.clock.advance(10)
        self.assertEqual(self.flow("accepted"), (7, 2, 7))
        self.in_memory.clock.pump([10] * 10)
        self.assertEqual(self.flow("accepted"), (7, 0, 7))
        self.in_memory.clock.pump([10] * 330)
        self.assertEqual(self.flow("accepted"), (7, 0, 2))
        self.in_memory.clock.pump([10] * 30)
        self.assertEqual(self.flow("accepted"), (7, 0, 0))

    def test_by_minute(self) -> None:
        """Sixty minutes, the latest last."""
        self.in_memory.base.recorder.metrics.expired.inc(by=3)
        series = self.in_memory.status()["traffic"]["expired"]["by_minute"]
        self.assertEqual(series, [0] * 59 + [3])

    def test_requests(self) -> None:
        """By outcome."""
        self.in_memory.base.recorder.record_early_rejection("didcomm", "192.0.2.1", 0, RateLimitExceeded())
        self.in_memory.base.recorder.record_early_rejection("didcomm", "192.0.2.1", 0, StoreUnavailable())
        self.assertEqual(self.flow("refused"), (1, 1, 1))
        self.assertEqual(self.flow("failed"), (1, 1, 1))
        self.assertEqual(self.flow("requests"), (2, 2, 2))

    def test_clock_step(self) -> None:
        """After a step back, future slots are dropped; after a step forward, old ones."""
        metrics = self.in_memory.base.recorder.metrics
        metrics.forwarded.inc()
        self.status_at(-7_200)
        self.assertEqual(self.flow("accepted"), (1, 0, 0))
        metrics.forwarded.inc()
        self.assertEqual(self.flow("accepted"), (2, 1, 1))
        self.status_at(7_200)
        self.assertEqual(self.flow("accepted"), (2, 0, 0))

    def status_at(self, seconds: float) -> None:
        """Read the status, and then set the clock of the host."""
        self.in_memory.status()
        self.in_memory.clock.step_wall_clock(seconds)


class ProblemTests(AdminTestCase):
    """Recent problems."""

    def test_refusals(self) -> None:
        """By situation, protocol and code, with count and last time; no addresses and no DIDs."""
        for _ in range(3):
            self.in_memory.base.recorder.record_early_rejection("didcomm", "198.51.100.77", 0, RateLimitExceeded())
            self.in_memory.clock.advance(1)
        self.in_memory.base.recorder.record_early_rejection("decentrl", "198.51.100.77", 0, StoreUnavailable())
        store, limit = self.in_memory.status()["refusals"]
        self.assertEqual((limit["kind"], limit["where"], limit["count"]), ("rate_limited", "didcomm", 3))
        self.assertEqual((limit["first"], limit["last"]), (NOW, NOW + 2))
        self.assertEqual((store["kind"], store["where"]), ("store_unavailable", "decentrl"))
        page = self.in_memory.page()
        self.assertIn("rate limited", page)
        self.assertIn(limit["text"], page)
        self.assertNotIn("198.51.100", page)

    def test_log_lines(self) -> None:
        """Warnings and errors of mediatord; those of others only by number."""
        log, other = Logger("mediatord.store"), Logger("elsewhere")
        log.info("all is well")
        log.warn("a {thing} is wrong", thing="<b>disk</b>")
        log.warn("a {thing} is wrong", thing="net")
        other.error("did:key:zPeer said so")
        try:
            raise KeyError("confidential")
        except KeyError:
            log.failure("it failed")
        self.flushLoggedErrors(KeyError)
        lines = [
            (item["text"], item["kind"], item["where"], item["count"]) for item in self.in_memory.status()["warnings"]
        ]
        self.assertIn(("a net is wrong", "warn", "store", 2), lines)
        self.assertIn(("see the standard output", "error", "elsewhere", 1), lines)
        self.assertIn(("it failed", "critical", "store", 1), lines)
        self.assertEqual(len(lines), 3)
        log.warn("a {thing} is wrong", thing="<b>disk</b>" * 100)
        page = self.in_memory.page()
        self.assertNotIn("<b>", page)
        self.assertNotIn("confidential", page)

    def test_bounds(self) -> None:
        """Fifty problems, the latest."""
        log = Logger("mediatord.x")
        for number in range(60):
            log.warn(f"line {number}")
        warnings = self.in_memory.status()["warnings"]
        self.assertEqual(len(warnings), 50)
        self.assertIn("line 59", {item["text"] for item in warnings})
        self.assertNotIn("line 9", {element["text"] for element in warnings})

    def test_after_stop(self) -> None:
        """The log observer is removed."""
        self.in_memory.watch.stopService()
        Logger("mediatord.x").warn("too late")
        self.assertEqual(self.in_memory.status()["warnings"], [])
        self.in_memory.watch.startService()


class ReportTests(AdminTestCase):
    """Reports of the nightly analysis."""

    def test_list(self) -> None:
        """The last days, latest first, with their summaries and times."""
        for number in range(1, 18):
            self.in_memory.write_report(f"2026-01-{number:02}")
        folder = self.in_memory.write_report(
            "2026-02-01", summary__json='{"state": "warn", "verdict": "Look at <this>."}'
        )
        os.utime(folder / "index.html", (NOW - 3600, NOW - 3600))
        (self.in_memory.reports / "2026-02-02").mkdir()
        for name in ("2026-02-30", "2026-13-01", "latest", ".hidden", "2026-01-01.old", "<b>"):
            (self.in_memory.reports / name).mkdir()
        reports = self.in_memory.status()["reports"]
        self.assertEqual([item["day"] for item in reports[:2]], ["2026-02-01", "2026-01-17"])
        self.assertEqual(len(reports), 14)
        self.assertEqual((reports[0]["state"], reports[0]["verdict"]), ("warn", "Look at <this>."))
        page = self.in_memory.page()
        self.assertIn('href="admin/report/2026-02-01/index.html"', page)
        self.assertIn("Look at &lt;this&gt;.", page)
        self.assertIn("1 h", PageParser(page).text)

    def test_invalid_summaries(self) -> None:
        """They are ignored."""
        for number, text in enumerate(("[]", "{", '{"state": [1], "verdict": {}}', '{"state": "<x>"}', "\xff")):
            self.in_memory.write_report(f"2026-01-0{number + 1}", summary__json=text)
        self.assertEqual(
            {(item["state"], item["verdict"]) for item in self.in_memory.status()["reports"]}, {("", "")}
        )

    def test_files(self) -> None:
        """Pages, tables and summaries, each with its type and the policy in the reports."""
        self.in_memory.write_report("2026-01-01", traffic__csv="a,b\n", summary__json="{}")
        for name, kind in (
            ("index.html", "text/html; charset=utf-8"),
            ("traffic.csv", "text/csv; charset=utf-8"),
            ("summary.json", "application/json"),
        ):
            response = self.in_memory.request(f"/admin/report/2026-01-01/{name}")
            self.assertEqual((response.status, response.headers["content-type"]), (200, kind))
            self.assertEqual(response.body, (self.in_memory.reports / "2026-01-01" / name).read_bytes())
            policy = response.headers["content-security-policy"]
            self.assertIn("default-src 'none'; img-src data:; style-src 'unsafe-inline'", policy)
            self.assertEqual(response.headers["x-content-type-options"], "nosniff")
            self.assertEqual(response.headers["cache-control"], "no-store")
        folder = self.in_memory.request("/admin/report/2026-01-01/")
        self.assertEqual((folder.status, folder.body), (200, b"<h1>2026-01-01</h1>"))
        head = self.in_memory.request("/admin/report/2026-01-01/traffic.csv", method="HEAD")
        self.assertEqual((head.status, head.headers["content-length"]), (200, "4"))

    def test_large_file(self) -> None:
        """It is read as fast as the client reads."""
        self.in_memory.write_report("2026-01-01", big__csv="x" * 3_000_000)
        transport = self.in_memory.connect()
        transport.peer_stalled = True
        transport.feed(encode_request("GET", "/admin/report/2026-01-01/big.csv", None, {"Authorization": BEARER}))
        self.in_memory.run_due_calls()
        self.assertLess(transport.unsent, 500_000)
        output = transport.take_output()
        while transport.unsent:
            transport.peer_stalled = False
            transport.resume_peer()
            self.in_memory.run_due_calls()
            output += transport.take_output()
        (response,) = parse_responses(output)
        self.assertEqual((response.status, len(response.body)), (200, 3_000_000))

    def test_client_disconnects(self) -> None:
        """The file is closed."""
        path = self.in_memory.write_report("2026-01-01", big__csv="x" * 3_000_000) / "big.csv"
        transport = self.in_memory.connect()
        transport.peer_stalled = True
        transport.feed(encode_request("GET", "/admin/report/2026-01-01/big.csv", None, {"Authorization": BEARER}))
        self.assertEqual(count_open(path), 1)
        transport.disconnect(cleanly=False)
        self.assertEqual(count_open(path), 0)

    def test_path_traversal(self) -> None:
        """Only report files are served."""
        folder = self.in_memory.write_report("2026-01-01", notes__txt="no", script__js="no", page__svg="no")
        (self.in_memory.reports / "secret.html").write_text("no")
        (self.in_memory.reports.parent / f"{self.in_memory.reports.name}.html").write_text("no")
        self.addCleanup((self.in_memory.reports.parent / f"{self.in_memory.reports.name}.html").unlink)
        (folder / "link.html").symlink_to(self.in_memory.reports / "secret.html")
        (folder / "inner.html").symlink_to(folder / "index.html")
        (folder / "folder.html").mkdir()
        os.mkfifo(folder / "fifo.html")
        (self.in_memory.reports / "2026-01-02").symlink_to(folder)
        for path in (
            *("2026-01-01/notes.txt", "2026-01-01/script.js", "2026-01-01/page.svg", "2026-01-01/absent.html"),
            *("2026-01-01/link.html", "2026-01-01/inner.html", "2026-01-01/folder.html", "2026-01-01/fifo.html"),
            *("2026-01-02/index.html", "2026-01-01", "", "/", "secret.html", "2026-01-01/index.html/"),
            *("../secret.html", "2026-01-01/../secret.html", "2026-01-01/..%2fsecret.html", "..%2fsecret.html"),
            *("%2e%2e/secret.html", "2026-01-01/%2e%2e/secret.html", "2026-01-01/%252e%252e%252fsecret.html"),
            *(
                "2026-01-01/..\\secret.html",
                "2026-01-01//index.html",
                "2026-01-01/./index.html",
                "./2026-01-01/index.html",
            ),
            *(
                "2026-01-01/index.html%00",
                "2026-01-01/index.html%00.csv",
                "2026-01-01%00/index.html",
                "2026-01-01/.html",
            ),
            *(
                "2026-01-01/index.HTML",
                "2026-01-01/index.html%20",
                "2026-01-01/index.html%0a",
                "2026-01-01%0a/index.html",
            ),
            *(
                quote("２０２６-01-01") + "/index.html",
                "2026-01-01/%ff.html",
                "2026-01-01/index.html~",
            ),
            *(
                "/etc/passwd",
                "2026-01-01//etc/passwd",
                "2026-01-01/%2fetc%2fpasswd",
                "x" * 5000,
                "2026-01-01/" + "x" * 5000,
            ),
        ):
            response = self.in_memory.request(f"/admin/report/{path}")
            self.assertEqual((response.status, response.body), (404, b"not found\n"), path)
        self.assertEqual(self.in_memory.request("/admin/report/2026-01-01/%69ndex.html").status, 200)

    def test_no_reports(self) -> None:
        """No directory, a missing one, or an empty one."""
        self.assertEqual(self.in_memory.status()["reports"], [])
        self.assertIn("No report yet: ", self.in_memory.page())
        self.in_memory.reports.rmdir()
        self.assertEqual(self.in_memory.status()["reports"], [])
        self.in_memory.reports.mkdir()
        in_memory = InMemoryAdminSite(self, admin={"listen": "tcp:0", "token_file": "x"})
        self.assertIsNone(in_memory.status()["reports"])
        self.assertNotIn("Nightly", in_memory.page())
        self.assertEqual(in_memory.request("/admin/report/2026-01-01/index.html").status, 404)
