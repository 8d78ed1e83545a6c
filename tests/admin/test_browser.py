"""
The status page in a real Chromium: on a phone and on a desktop, in light and in dark.

Screenshots are left in `var/screenshots` to be looked at.
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
# Rather long, and with what has no business on a page.
DIDS = (
    "did:peer:2.Ez6LSms555YhFthn1WV8ciDBpZm86hK9tp83WojJUmxPGk1hZ.Vz6MkmdBjMyB4TS5UbbQw54szm8yvMMf1ftGV2sQVYAxaeWhE",
    "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK",
    "did:web:wallets.example.com:people:alice",
    'did:key:z<script>alert(1)<script><img src="x" onerror="alert(2)">',
    "did:decentrl:" + "a" * 200,
)


class BusyMediator:
    """What a mediator has to show after a busy hour."""

    def __init__(self) -> None:
        self.case = SynchronousTestCase("run")

    def in_memory(self) -> InMemoryAdminSite:
        """It is the same each time that it is made."""
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
            folder = in_memory.a_report(day, summary__json=summary, traffic__csv="hour,messages\n0,12\n")
            os.utime(folder / "index.html", (in_memory.clock.seconds() - 20_000,) * 2)
        self._fill(in_memory)
        self._go_wrong(in_memory)
        in_memory.clock.advance(3)
        return in_memory

    def _fill(self, in_memory: InMemoryAdminSite) -> None:
        metrics, store = in_memory.base.recorder.metrics, in_memory.store
        self.case.successResultOf(store.grant("did:example:all"))
        for did in DIDS:
            self.case.successResultOf(store.update_recipients("did:example:all", [(did, "add")], max_recipients=99))
        for turn in range(400):
            metrics.forwarded.inc(by=turn * 37 % 101)
            metrics.delivered.inc(by=turn * 37 % 97)
            metrics.expired.inc(by=turn % 90 == 0)
            now = in_memory.clock.seconds()
            if turn % 4 == 0:
                payload = Payload(f"{turn}", b"x" * (turn * 991 % 40_000), "json")
                did = DIDS[turn * 7 % 17 % len(DIDS)]
                self.case.successResultOf(store.enqueue(did, [payload], expires_at=now + 1e6))
            in_memory.clock.advance(2_000 if turn < 20 else 10)

    def _go_wrong(self, in_memory: InMemoryAdminSite) -> None:
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
def served(in_memory: InMemoryAdminSite) -> Iterator[str]:
    """The URL under which a browser sees the site. Answers are passed on; only :data:`SLOW_REFRESH` changes them."""
    busy = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() == "authorization"}
            with busy:
                answer = in_memory.raw(encode_request("GET", self.path, None, headers))
            if SLOW_REFRESH.items() <= dict(self.headers).items() and b"<html" in answer:
                soon = b'http-equiv="refresh" content="10"'
                assert b'http-equiv="refresh"' not in answer or soon in answer, "pages refresh at another interval"
                answer = answer.replace(soon, b'http-equiv="refresh" content="99"')
            self.wfile.write(answer)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    # A browser opens connections before it needs them, which must not hold up the others.
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
        with served(hour.in_memory()) as url:
            yield url
    finally:
        hour.case.doCleanups()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("view", VIEW_PARAMETERS)
def test_it_looks_right(browser: Browser, url: str, view: Viewport) -> None:
    """No script runs, nothing comes from elsewhere, all is there to be read, and nothing is wider than the page."""
    with browser.visit(f"{url}/admin", view, credentials=USER, headers=SLOW_REFRESH) as visit:
        assert visit.response is not None and visit.response.status == 200
        look = visit.look("admin")
        # The first answer is a 401, which makes the browser ask for the password.
        assert [one for one in look.complaints if "401" not in one] == []
        assert look.elsewhere == [] and look.requests == []
        assert look.scripts == 0
        assert look.wide == [] and look.overflow == 0
        assert look.faint == [] and look.smallest_text >= 11
        assert look.texts > 100
        scrolling = visit.page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        )
        assert scrolling == 0


@pytest.mark.exhaustive
def test_the_schemes_differ(browser: Browser, url: str) -> None:
    """Whoever likes it dark has it dark."""
    fuzz_mediator = set()
    for view in VIEWS:
        with browser.visit(f"{url}/admin?refresh=0", view, credentials=USER) as visit:
            fuzz_mediator.add((view.scheme, visit.page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert len(fuzz_mediator) == 2


def test_without_the_token(browser: Browser, url: str) -> None:
    """There is nothing to be seen."""
    with browser.visit(f"{url}/admin", PHONE_LIGHT, credentials=("operator", "wrong")) as visit:
        assert visit.response is not None and visit.response.status == 401
        assert visit.page.inner_text("body").strip() == "unauthorized"


def test_links(browser: Browser, url: str) -> None:
    """The report is a click away, and so is a page that stands still."""
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
def test_it_comes_again(browser: Browser, url: str) -> None:
    """Every ten seconds, without a script."""
    with browser.visit(f"{url}/admin", javascript=False, credentials=USER) as visit:
        with visit.page.expect_navigation():
            pass
        assert visit.page.url == f"{url}/admin"
