"""The status page for operators: who sees it, and what is on it."""

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
# Without what would begin the path of a DID URL.
EVIL = "did:key:z<script>alert(1)<script>\"onload='x'&amp\u202e"


def basic(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


def times_open(path: Path) -> int:
    """How many descriptors of this process lead to a file; others come and go in other threads."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}") == str(path.resolve())
    return found


class Document(HTMLParser):
    """:ivar tags: what elements there are, with their attributes; `text`: all that is to be read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


class AdminCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryAdminSite(self, log={"dids": "plain"})
        self.addCleanup(self.flushLoggedErrors)

    def queue(self, did: str, *sizes: int, account: str = ALICE) -> None:
        """Have messages wait for a DID."""
        store, now = self.in_memory.store, self.in_memory.clock.seconds()
        self.successResultOf(store.grant(account))
        self.successResultOf(store.update_recipients(account, [(did, "add")], max_recipients=99))
        for number, size in enumerate(sizes):
            payload = Payload(f"{new_stored_message_id(now)} {number}", b"x" * size, "json")
            self.successResultOf(store.enqueue(did, [payload], expires_at=now + 1e6))


class AccessTests(AdminCase):
    """The token, and nothing without it."""

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

    def test_without(self) -> None:
        """Every path, whatever is there, is answered the same, and browsers ask their user for the token."""
        self.in_memory.a_report("2026-01-01")
        responses = [
            self.in_memory.request(path, authorization, method)
            for path in self.PATHS
            for authorization, method in ((None, "GET"), (None, "POST"), (None, "OPTIONS"), (None, "PURGE"))
        ]
        self.assertEqual({(one.status, one.body) for one in responses}, {(401, b"unauthorized\n")})
        self.assertEqual(
            {one.headers["www-authenticate"] for one in responses}, {'Basic realm="status", charset="UTF-8"'}
        )
        headers = {name: value for name, value in responses[0].headers.items() if name != "date"}
        self.assertNotIn("access-control-allow-origin", headers)
        self.assertNotIn(__version__, str(headers))

    def test_wrong(self) -> None:
        """What is no token, or not the whole of it."""
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

    def test_right(self) -> None:
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

    def test_guessing(self) -> None:
        """Who has tried ten wrong ones has to wait, also with the right one; others need not."""
        for _ in range(10):
            self.assertEqual(self.in_memory.request("/admin", "Bearer guess").status, 401)
            self.in_memory.clock.advance(1)
        response = self.in_memory.request("/admin")
        self.assertEqual((response.status, response.headers["retry-after"]), (429, "50"))
        self.assertEqual(self.in_memory.request("/admin", peer="198.51.100.1").status, 200)
        self.in_memory.clock.advance(50)
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_no_token_is_no_guess(self) -> None:
        """A browser asks without one first."""
        for _ in range(30):
            self.assertEqual(self.in_memory.request("/admin", None).status, 401)
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_behind_a_proxy(self) -> None:
        """A proxy that is trusted says whose guesses those are."""
        in_memory = InMemoryAdminSite(self, trusted_proxies=["127.0.0.1"])
        for _ in range(11):
            in_memory.request("/admin", "Bearer guess", peer="127.0.0.1", **{"X-Forwarded-For": "203.0.113.9"})
        blocked = in_memory.request("/admin", peer="127.0.0.1", **{"X-Forwarded-For": "203.0.113.9"})
        self.assertEqual(blocked.status, 429)
        self.assertEqual(in_memory.request("/admin", peer="127.0.0.1").status, 200)

    def test_other_methods(self) -> None:
        """There is nothing to be changed."""
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            response = self.in_memory.request("/admin", method=method)
            self.assertEqual((response.status, response.headers["allow"]), (405, "GET, HEAD"))
        head = self.in_memory.request("/admin", method="HEAD")
        self.assertEqual((head.status, head.body), (200, b""))
        self.assertGreater(int(head.headers["content-length"]), 1000)

    def test_what_is_no_http(self) -> None:
        """It is told nothing."""
        self.assertTrue(self.in_memory.raw(b"\x16\x03\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400 Bad Request\r\n"))

    def test_large_bodies(self) -> None:
        """Nobody has them in memory."""
        transport = self.in_memory.connect()
        transport.feed(encode_request("POST", "/admin", None, {"Content-Length": "9999999", "Authorization": BEARER}))
        transport.feed(b"x" * 200_000)
        self.in_memory.run_due_calls()
        self.assertTrue(transport.lost)

    def test_connections(self) -> None:
        """There are only so many, and who hangs up makes room."""
        transports = [self.in_memory.connect() for _ in range(64)]
        self.assertIsNone(self.in_memory.site.buildProtocol(transports[0].getPeer()))
        transports[0].disconnect()
        self.assertIsNotNone(self.in_memory.site.buildProtocol(transports[0].getPeer()))

    def test_silence(self) -> None:
        """A connection on which nothing happens is closed."""
        transport = self.in_memory.connect()
        transport.feed(b"GET /admin HTTP/1.1\r\n")
        self.in_memory.clock.pump([30] * 5)
        self.assertTrue(transport.lost)


class PageTests(AdminCase):
    """What is on the page."""

    def test_headers(self) -> None:
        """Nobody keeps it, frames it, or runs anything in it; its style is the one whose hash is told."""
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

    def test_nothing_active(self) -> None:
        """No script, no style in elements, no address but its own."""
        self.queue(EVIL, 1)
        document = Document(self.in_memory.page())
        names = {tag for tag, _ in document.tags}
        self.assertFalse(names & {"script", "iframe", "img", "object", "form", "embed", "base"})
        for tag, attributes in document.tags:
            self.assertFalse([name for name in attributes if name == "style" or name.startswith("on")], tag)
            address = attributes.get("href") or ""
            self.assertRegex(address, r"^(|data:,|\?refresh=0|admin[a-z0-9/.-]*)$")

    def test_refresh(self) -> None:
        """By itself, until somebody wants it to pause."""
        self.assertIn('<meta http-equiv="refresh" content="10">', self.in_memory.page())
        paused = self.in_memory.request("/admin?refresh=0").body.decode()
        self.assertNotIn("http-equiv", paused)
        self.assertIn('<a href="admin">resume</a>', paused)

    def test_state(self) -> None:
        """Version, node, store and how it is."""
        text = Document(self.in_memory.page()).text
        for words in (__version__, "mediatord at m1", "memory, available", "OK", "serving"):
            self.assertIn(words, text)
        status = self.in_memory.status()
        self.assertEqual((status["ok"], status["state"], status["node"]), (True, "serving", "m1"))
        self.assertEqual(status["uptime_seconds"], 6)

    def test_store_away(self) -> None:
        """The page is there all the same."""
        self.in_memory.base.recorder.metrics.set_storage_up(False)
        with self.in_memory.failing("read_backlog", StoreUnavailable()):
            status = self.in_memory.status()
            text = Document(self.in_memory.page()).text
        self.assertEqual((status["ok"], status["waiting"], status["store"]["answers"]), (False, None, False))
        self.assertIn("waiting for the store", text)
        self.assertIn("not responding", text)

    def test_store_hangs(self) -> None:
        """Nobody waits for it for long, and it is not asked again before it has answered."""
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
        """It is said, too."""
        self.in_memory.base.gate.stopService()
        self.assertEqual(self.in_memory.status()["state"], "stopping")

    def test_trouble(self) -> None:
        """What `/health` says is said here."""
        self.in_memory.base.node_health.clock_differs(ClockSkewError(3_600.0))
        status = self.in_memory.status()
        self.assertEqual(
            (status["ok"], status["state"]), (False, "the clock of this host is 1 h ahead of the MongoDB server's")
        )

    def test_fault(self) -> None:
        """What should not happen is logged without its text, and told as nothing."""
        with self.in_memory.failing("read_backlog", ValueError("secret")):
            response = self.in_memory.request("/admin")
        self.assertEqual((response.status, response.body), (500, b"internal error\n"))
        (logged,) = self.flushLoggedErrors(ValueError)
        self.assertNotIn("secret", str(logged.value))
        self.in_memory.clock.advance(3)
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_fresh(self) -> None:
        """However many look, the store is asked once in two seconds."""
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

    def test_client_gone(self) -> None:
        """Who does not wait for the answer gets none."""
        transport = self.in_memory.connect()
        transport.feed(encode_request("GET", "/admin", None, {"Authorization": BEARER}))
        transport.disconnect()
        self.in_memory.run_due_calls()
        self.assertEqual(self.in_memory.request("/admin").status, 200)

    def test_pipelined(self) -> None:
        """Two requests at once are answered in their order."""
        one = encode_request("GET", "/admin/status.json", None, {"Authorization": BEARER})
        other = encode_request("GET", "/x", None, {"Authorization": BEARER})
        self.assertEqual([answer.status for answer in parse_responses(self.in_memory.raw(one + other))], [200, 404])


class QueueTests(AdminCase):
    """What waits."""

    def test_ages(self) -> None:
        """By when it came, and the largest queues by their tags."""
        for size, pause in ((1, 90_000), (2, 30_000), (4, 5_000), (8, 1_000), (16, 300), (32, 10)):
            self.queue(f"did:key:z{size}", *[10] * size)
            self.in_memory.clock.advance(pause)
        waiting = self.in_memory.status()["waiting"]
        ages = [(one["below_seconds"], one["messages"], one["bytes"], one["exact"]) for one in waiting["by_age"]]
        bounds = (60, 600, 3_600, 21_600, 86_400, None)
        sizes = (32, 16, 8, 4, 2, 1)
        self.assertEqual(ages, [(bound, n, 10 * n, True) for bound, n in zip(bounds, sizes, strict=True)])
        first = waiting["largest"][0]
        self.assertEqual((first["recipient"], first["messages"], first["oldest_seconds"]), ("did:key:z32", 32, 13))
        text = Document(self.in_memory.page()).text
        self.assertIn("did:key:z32", text)
        self.assertIn("630 B", text)

    def test_markup_in_a_did(self) -> None:
        """It is text, and does not turn the direction of writing."""
        self.queue(EVIL, 1)
        document = Document(self.in_memory.page())
        self.assertIn(EVIL.replace("\u202e", "\ufffd"), document.text)
        self.assertEqual([tag for tag, _ in document.tags if tag == "script"], [])
        self.assertEqual(self.in_memory.status()["waiting"]["largest"][0]["recipient"], EVIL)

    def test_pseudonyms(self) -> None:
        """A DID stands there as it does in the log."""
        self.in_memory = InMemoryAdminSite(self, log={"dids": "keyed"})
        self.queue("did:key:zSecret", 1)
        self.assertNotIn("zSecret", self.in_memory.page())
        self.assertNotIn("zSecret", json.dumps(self.in_memory.status()))
        tag = self.in_memory.base.recorder.pseudonymize("did:key:zSecret")
        self.assertIn(tag, self.in_memory.page())


class TrafficTests(AdminCase):
    """What was counted."""

    def flow(self, name: str) -> tuple[int, int, int]:
        flow = self.in_memory.status()["traffic"][name]
        return flow["total"], flow["last_minute"], flow["last_hour"]

    def test_spans(self) -> None:
        """The last minute, the last hour and since the start."""
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
        """By what became of them."""
        self.in_memory.base.recorder.record_early_rejection("didcomm", "192.0.2.1", 0, RateLimitExceeded())
        self.in_memory.base.recorder.record_early_rejection("didcomm", "192.0.2.1", 0, StoreUnavailable())
        self.assertEqual(self.flow("refused"), (1, 1, 1))
        self.assertEqual(self.flow("failed"), (1, 1, 1))
        self.assertEqual(self.flow("requests"), (2, 2, 2))

    def test_clock_set(self) -> None:
        """Set back, what seems to come later is forgotten; set forward, what is old."""
        metrics = self.in_memory.base.recorder.metrics
        metrics.forwarded.inc()
        self.status_at(-7_200)
        self.assertEqual(self.flow("accepted"), (1, 0, 0))
        metrics.forwarded.inc()
        self.assertEqual(self.flow("accepted"), (2, 1, 1))
        self.status_at(7_200)
        self.assertEqual(self.flow("accepted"), (2, 0, 0))

    def status_at(self, seconds: float) -> None:
        """Look, and then have the clock of the host set."""
        self.in_memory.status()
        self.in_memory.clock.set_by(seconds)


class FailureTests(AdminCase):
    """What went wrong."""

    def test_refusals(self) -> None:
        """By situation, protocol and code, with how often and when last; no address and no DID."""
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

    def test_lines(self) -> None:
        """Warnings and worse that we wrote; of what others write that there is something."""
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
            (one["text"], one["kind"], one["where"], one["count"]) for one in self.in_memory.status()["warnings"]
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
        """Fifty kinds, those that occurred last."""
        log = Logger("mediatord.x")
        for number in range(60):
            log.warn(f"line {number}")
        warnings = self.in_memory.status()["warnings"]
        self.assertEqual(len(warnings), 50)
        self.assertIn("line 59", {one["text"] for one in warnings})
        self.assertNotIn("line 9", {one["text"] for one in warnings})

    def test_after_the_end(self) -> None:
        """Nobody listens any more."""
        self.in_memory.watch.stopService()
        Logger("mediatord.x").warn("too late")
        self.assertEqual(self.in_memory.status()["warnings"], [])
        self.in_memory.watch.startService()


class ReportTests(AdminCase):
    """The reports of the nightly analysis."""

    def test_listed(self) -> None:
        """The last days, latest first, with what they say of themselves and when they were written."""
        for number in range(1, 18):
            self.in_memory.a_report(f"2026-01-{number:02}")
        folder = self.in_memory.a_report(
            "2026-02-01", summary__json='{"state": "warn", "verdict": "Look at <this>."}'
        )
        os.utime(folder / "index.html", (NOW - 3600, NOW - 3600))
        (self.in_memory.reports / "2026-02-02").mkdir()
        for name in ("2026-02-30", "2026-13-01", "latest", ".hidden", "2026-01-01.old", "<b>"):
            (self.in_memory.reports / name).mkdir()
        reports = self.in_memory.status()["reports"]
        self.assertEqual([one["day"] for one in reports[:2]], ["2026-02-01", "2026-01-17"])
        self.assertEqual(len(reports), 14)
        self.assertEqual((reports[0]["state"], reports[0]["verdict"]), ("warn", "Look at <this>."))
        page = self.in_memory.page()
        self.assertIn('href="admin/report/2026-02-01/index.html"', page)
        self.assertIn("Look at &lt;this&gt;.", page)
        self.assertIn("1 h", Document(page).text)

    def test_summaries_that_are_none(self) -> None:
        """They say nothing."""
        for number, text in enumerate(("[]", "{", '{"state": [1], "verdict": {}}', '{"state": "<x>"}', "\xff")):
            self.in_memory.a_report(f"2026-01-0{number + 1}", summary__json=text)
        self.assertEqual({(one["state"], one["verdict"]) for one in self.in_memory.status()["reports"]}, {("", "")})

    def test_files(self) -> None:
        """Pages, tables and summaries, each with its type and the policy that the reports have in themselves."""
        self.in_memory.a_report("2026-01-01", traffic__csv="a,b\n", summary__json="{}")
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
        """It is read as fast as its client reads."""
        self.in_memory.a_report("2026-01-01", big__csv="x" * 3_000_000)
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

    def test_client_gone(self) -> None:
        """The file is closed."""
        path = self.in_memory.a_report("2026-01-01", big__csv="x" * 3_000_000) / "big.csv"
        transport = self.in_memory.connect()
        transport.peer_stalled = True
        transport.feed(encode_request("GET", "/admin/report/2026-01-01/big.csv", None, {"Authorization": BEARER}))
        self.assertEqual(times_open(path), 1)
        transport.disconnect(cleanly=False)
        self.assertEqual(times_open(path), 0)

    def test_traversal(self) -> None:
        """Nothing is served but what is meant to be."""
        folder = self.in_memory.a_report("2026-01-01", notes__txt="no", script__js="no", page__svg="no")
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

    def test_none(self) -> None:
        """No directory, one that is not there, or an empty one."""
        self.assertEqual(self.in_memory.status()["reports"], [])
        self.assertIn("No report yet.", self.in_memory.page())
        self.in_memory.reports.rmdir()
        self.assertEqual(self.in_memory.status()["reports"], [])
        self.in_memory.reports.mkdir()
        in_memory = InMemoryAdminSite(self, admin={"listen": "tcp:0", "token_file": "x"})
        self.assertIsNone(in_memory.status()["reports"])
        self.assertNotIn("Nightly", in_memory.page())
        self.assertEqual(in_memory.request("/admin/report/2026-01-01/index.html").status, 404)
