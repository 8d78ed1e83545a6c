"""A daemon on SQLite that is asked for what it must refuse, while its file is read behind its back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.http.in_memory_site import HTTPResponse
from tests.integration.raw_decentrl_client import JSON, RawDecentrlClient, RawWebSocket
from tests.integration.shared_daemon import DaemonTestCase, SharedDaemonTestCase

# As any HTTP library asks, and with a header that takes a request through twisted.web.
WAYS: tuple[dict[str, str], ...] = ({}, {"X-Odd": "1"})
ELSEWHERE = "did:web:elsewhere.example"
SAVE, RESPOND, REQUEST = (
    "SAVE_COMMUNICATION_CONTRACT",
    "COMMUNICATION_CONTRACT_RESPONSE",
    "REQUEST_COMMUNICATION_CONTRACT",
)
# Members of a request that nobody opens.
SEALED: dict[str, Any] = {"encrypted_contract_request": "AAAA", "requestor_ephemeral_public_key": "AAAA"}


class RefusalTestCase(DaemonTestCase):
    """What refusals are held to."""

    def new_identity(self, alias: str = "somebody", **options: Any) -> RawDecentrlClient:
        """One that is registered."""
        one = RawDecentrlClient(self.daemon_client, alias, **options)
        one.register()
        return one

    def is_error(self, answered: HTTPResponse, status: int, code: str) -> None:
        """It is a refusal as DCTRL-0004 11.1 has it and nothing else, and any page may read it."""
        self.assertEqual((answered.status, answered.body), (status, b'{"type":"ERROR","code":"%b"}' % code.encode()))
        self.assertEqual(answered.headers["content-type"], JSON)
        self.assertEqual(answered.headers["access-control-allow-origin"], "*")
        self.assertEqual("retry-after" in answered.headers, status in (429, 503))
        if "retry-after" in answered.headers:
            self.assertGreater(int(answered.headers["retry-after"]), 0)
            self.assertIn("Retry-After", answered.headers["access-control-expose-headers"])

    def is_told(self, line: RawWebSocket, code: str, close: int) -> None:
        """AUTH_FAILED, then the close frame, and nothing else before, between or after (DCTRL-0004 10.2)."""
        heard, end = line.rest()
        self.assertEqual(heard, [b'{"type":"AUTH_FAILED","code":"%b"}' % code.encode()])
        self.assertEqual((end.code, end.reason), (close, code))

    def is_refused(self, make: Callable[[], bytes], status: int, code: str, *, source: str = "127.0.0.1") -> None:
        """What `make` makes is refused so, and nothing of it is kept."""
        before = self.daemon_client.kept()
        for way in WAYS:
            self.is_error(self.daemon_client.command(make(), source=source, **way), status, code)
        self.assertEqual(self.daemon_client.kept(), before)


class RefusalDaemonTestCase(SharedDaemonTestCase, RefusalTestCase):
    """The tests of one class, and a daemon for them."""
