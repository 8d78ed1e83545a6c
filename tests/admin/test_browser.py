"""
The status page in Chromium, in phone and desktop size, light and dark.

Screenshots are left in `var/screenshots`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from twisted.logger import Logger
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import DecryptionError, RateLimitExceeded, StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.messages import Payload
from tests.admin.in_memory_admin_site import TOKEN, InMemoryAdminSite
from tests.browser import PHONE_LIGHT, VIEW_PARAMETERS, VIEWS, Browser, Viewport, chromium
from tests.http.in_memory_site import encode_request

USER = ("operator", TOKEN)
# Header that makes the test server send pages with a refresh of 99 s instead of 10 s.
SLOW_REFRESH = {"X-Slow-Refresh": "1"}
# Long, and with characters that must be escaped.
DIDS = (
    "did:peer:2.Ez6LSms555YhFthn1WV8ciDBpZm86hK9tp83WojJUmxPGk1hZ.Vz6MkmdBjMyB4TS5UbbQw54szm8yvMMf1ftGV2sQVYAxaeWhE",
    "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK",
    "did:web:wallets.example.com:people:alice",
    'did:key:z<script>alert(1)<script><img src="x" onerror="alert(2)">',
    "did:decentrl:" + "a" * 200,
)


class BusyMediator:
    """A mediator after a busy hour."""

    def __init__(self) -> None:
        self.case = SynchronousTestCase("run")

    def in_memory(self) -> InMemoryAdminSite:
        """Build it; the result is always the same."""
        in_memory = InMemoryAdminSite(self.case, log={"dids": "plain"})
        for day, state, verdict in (
            ("2027-01-13", "good", "The books close and nothing stands out."),
            (
                "2027-01-14",
                "warn",
                "The books close. Worth a look: forecast, latency, anomalies, clients that are gone.",
            ),
        ):
            summary = f'{{"state": "{state}", "verdict": "{verdict}"}}'
            folder = in_memory.write_report(day, summary__json=summary, traffic__csv="hour,messages\n0,12\n")
            os.utime(folder / "index.html", (in_memory.clock.seconds() - 20_000,) * 2)
        self._add_traffic(in_memory)
        self._add_problems(in_memory)
        in_memory.clock.advance(3)
        return in_memory

    def _add_traffic(self, in_memory: InMemoryAdminSite) -> None:
        metrics, store = in_memory.base.recorder.metrics, in_memory.store
        self.case.successResultOf(store.grant("did:example:all"))
        for did in DIDS:
            self.case.successResultOf(store.update_recipients("did:example:all", [(did, "add")], max_recipients=99))
        for iteration in range(400):
            metrics.forwarded.inc(by=iteration * 37 % 101)
            metrics.delivered.inc(by=iteration * 37 % 97)
            metrics.expired.inc(by=iteration % 90 == 0)
            now = in_memory.clock.seconds()
            if iteration % 4 == 0:
                payload = Payload(f"{iteration}", b"x" * (iteration * 991 % 40_000), "json")
                did = DIDS[iteration * 7 % 17 % len(DIDS)]
                self.case.successResultOf(store.enqueue(did, [payload], expires_at=now + 1e6))
            in_memory.clock.advance(2_000 if iteration < 20 else 10)

    def _add_problems(self, in_memory: InMemoryAdminSite) -> None:
        for protocol, fault, times in (
            ("didcomm", DecryptionError(), 3),
            ("didcomm", UnknownRecipient(), 1_204),
            ("decentrl", RateLimitExceeded(), 17),
            ("didcomm", StoreUnavailable(), 2),
        ):
            for _ in range(times):
                in_memory.base.recorder.record_early_rejection(protocol, "192.0.2.1", 0, fault)  # type: ignore[arg-type]  # one of them
            in_memory.clock.advance(30)
        log = Logger("mediatord.store")
        log.warn("MongoDB does not answer: {why}", why="connection refused <b>by</b> 10.0.0.17:27017")
        log.error("cannot open the store: disk I/O error")
        Logger("mediatord.workers.worker_pool").warn("worker m-2 (process 4711) was killed by SIGKILL")


@contextmanager
def serve(in_memory: InMemoryAdminSite) -> Iterator[str]:
    """The URL of the site; responses are passed on, and only :data:`SLOW_REFRESH` changes them."""
    busy = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() == "authorization"}
            with busy:
                answer = in_memory.exchange_raw(encode_request("GET", self.path, None, headers))
            if SLOW_REFRESH.items() <= dict(self.headers).items() and b"<html" in answer:
                soon = b'http-equiv="refresh" content="10"'
                assert b'http-equiv="refresh"' not in answer or soon in answer, "pages refresh at another interval"
                answer = answer.replace(soon, b'http-equiv="refresh" content="99"')
            self.wfile.write(answer)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    # A browser opens connections in advance, which must not block others.
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    hour = BusyMediator()
    try:
        with serve(hour.in_memory()) as url:
            yield url
    finally:
        hour.case.doCleanups()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("view", VIEW_PARAMETERS)
def test_layout(browser: Browser, url: str, view: Viewport) -> None:
    """No scripts, no external resources, everything readable, nothing wider than the page."""
    with browser.visit(f"{url}/admin", view, credentials=USER, headers=SLOW_REFRESH) as visit:
        assert visit.response is not None and visit.response.status == 200
        look = visit.inspect("admin")
        # The first response is a 401, on which the browser sends the password.
        assert [item for item in look.errors if "401" not in item] == []
        assert look.cross_origin == [] and look.requests == []
        assert look.scripts == 0
        assert look.overflowing == [] and look.overflow == 0
        assert look.low_contrast == [] and look.smallest_text >= 11
        assert look.texts > 100
        scrolling = visit.page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        )
        assert scrolling == 0


@pytest.mark.exhaustive
def test_colour_schemes_differ(browser: Browser, url: str) -> None:
    """The dark scheme is dark."""
    backgrounds = set()
    for view in VIEWS:
        with browser.visit(f"{url}/admin?refresh=0", view, credentials=USER) as visit:
            backgrounds.add((view.scheme, visit.page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert len(backgrounds) == 2


def test_without_token(browser: Browser, url: str) -> None:
    """Nothing is shown."""
    with browser.visit(f"{url}/admin", PHONE_LIGHT, credentials=("operator", "wrong")) as visit:
        assert visit.response is not None and visit.response.status == 401
        assert visit.page.inner_text("body").strip() == "unauthorized"


def test_links(browser: Browser, url: str) -> None:
    """The report and the page without refresh are one click away."""
    with browser.visit(f"{url}/", credentials=USER, headers=SLOW_REFRESH) as visit:
        page = visit.page
        assert page.url == f"{url}/admin"
        page.get_by_role("link", name="2027-01-14").click()
        page.wait_for_url(f"{url}/admin/report/2027-01-14/index.html")
        assert page.inner_text("h1") == "2027-01-14"
        page.go_back()
        page.get_by_role("link", name="pause").click()
        page.wait_for_url(f"{url}/admin?refresh=0")
        assert page.locator("meta[http-equiv=refresh]").count() == 0
        page.get_by_role("link", name="resume").click()
        page.wait_for_url(f"{url}/admin")
        assert page.locator("meta[http-equiv=refresh]").count() == 1


@pytest.mark.exhaustive
def test_refresh(browser: Browser, url: str) -> None:
    """Every ten seconds, without a script."""
    with browser.visit(f"{url}/admin", javascript=False, credentials=USER) as visit:
        with visit.page.expect_navigation():
            pass
        assert visit.page.url == f"{url}/admin"
