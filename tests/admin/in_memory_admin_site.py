"""In-memory mediator with its status page."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.admin_and_control import TrafficAndProblemMonitor, build_admin_site
from tests.http.in_memory_site import HTTPResponse, InMemoryTransport, encode_request, parse_responses
from tests.in_memory_mediator import PEER, InMemoryMediator

TOKEN = "0123456789abcdef0123456789abcdef"
BEARER = f"Bearer {TOKEN}"


class InMemoryAdminSite(InMemoryMediator):
    """:ivar reports: the directory of the nightly reports."""

    def __init__(self, test: SynchronousTestCase, **settings: Any) -> None:
        self.reports = Path(tempfile.mkdtemp())
        test.addCleanup(shutil.rmtree, self.reports)
        admin = {"listen": "tcp:0", "token_file": "unused", "reports": str(self.reports)}
        super().__init__(test, **{"admin": admin, "node": "m1", **settings})
        self.base.recorder.metrics.set_storage_up(True)
        self.watch = TrafficAndProblemMonitor(self.base, self.config.node_name)
        self.watch.startService()
        test.addCleanup(self.watch.stopService)
        self.site = build_admin_site(self.base, self.config, TOKEN.encode(), self.watch)

    def connect(self, peer: str = PEER) -> InMemoryTransport:
        """Open a TCP connection."""
        transport = InMemoryTransport(self.clock, peer)
        transport.protocol = self.site.buildProtocol(transport.getPeer())
        transport.protocol.makeConnection(transport)
        return transport

    def run_due_calls(self) -> None:
        """Run all calls that are due now."""
        while any(call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls()):
            self.clock.advance(0)

    def exchange_raw(self, request: bytes, peer: str = PEER) -> bytes:
        """Send a request and return all output."""
        transport = self.connect(peer)
        transport.feed(request)
        self.run_due_calls()
        answer = transport.take_output()
        transport.disconnect()
        return answer

    def request(
        self, path: str, authorization: str | None = BEARER, method: str = "GET", peer: str = PEER, **headers: str
    ) -> HTTPResponse:
        """Send one request on its own connection and return the response."""
        if authorization is not None:
            headers["Authorization"] = authorization
        (response,) = parse_responses(
            self.exchange_raw(encode_request(method, path, None, headers), peer), head=method == "HEAD"
        )
        return response

    def page(self) -> str:
        """The current page."""
        self.clock.advance(3)  # otherwise the cached page could be returned
        return self.request("/admin").body.decode("utf-8")

    def status(self) -> dict[str, Any]:
        """The current status as JSON."""
        self.clock.advance(3)
        status: dict[str, Any] = json.loads(self.request("/admin/status.json").body)
        return status

    def write_report(self, day: str, **files: str) -> Path:
        """Write the report of a day; `index` is its page."""
        folder = self.reports / day
        folder.mkdir()
        for name, content in {"index.html": f"<h1>{day}</h1>", **files}.items():
            (folder / name.replace("__", ".")).write_text(content, "utf-8")
        return folder
