"""Test case for requests that a daemon on SQLite must refuse without storing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.http.in_memory_site import HTTPResponse
from tests.integration.raw_decentrl_client import JSON, RawDecentrlClient, RawWebSocket
from tests.integration.shared_daemon import DaemonTestCase, SharedDaemonTestCase

# Headers of the fast path, and of the general path through twisted.web.
HTTP_PATH_HEADERS: tuple[dict[str, str], ...] = ({}, {"X-Odd": "1"})
OTHER_MEDIATOR = "did:web:elsewhere.example"
SAVE, RESPOND, REQUEST = (
    "SAVE_COMMUNICATION_CONTRACT",
    "COMMUNICATION_CONTRACT_RESPONSE",
    "REQUEST_COMMUNICATION_CONTRACT",
)
# Members of a contract request that is never decrypted.
SEALED: dict[str, Any] = {"encrypted_contract_request": "AAAA", "requestor_ephemeral_public_key": "AAAA"}


class RefusalTestCase(DaemonTestCase):
    """Assertions about refusals."""

    def register_identity(self, alias: str = "somebody", **options: Any) -> RawDecentrlClient:
        """A registered identity."""
        identity = RawDecentrlClient(self.daemon_client, alias, **options)
        identity.register()
        return identity

    def assert_error(self, response: HTTPResponse, status: int, code: str) -> None:
        """The response is exactly the error of DCTRL-0004 11.1, readable by any web page."""
        self.assertEqual((response.status, response.body), (status, b'{"type":"ERROR","code":"%b"}' % code.encode()))
        self.assertEqual(response.headers["content-type"], JSON)
        self.assertEqual(response.headers["access-control-allow-origin"], "*")
        self.assertEqual("retry-after" in response.headers, status in (429, 503))
        if "retry-after" in response.headers:
            self.assertGreater(int(response.headers["retry-after"]), 0)
            self.assertIn("Retry-After", response.headers["access-control-expose-headers"])

    def assert_authentication_failed(self, socket: RawWebSocket, code: str, close: int) -> None:
        """AUTH_FAILED and the close frame are all that is sent (DCTRL-0004 10.2)."""
        messages, closed = socket.read_until_close()
        self.assertEqual(messages, [b'{"type":"AUTH_FAILED","code":"%b"}' % code.encode()])
        self.assertEqual((closed.code, closed.reason), (close, code))

    def assert_refused(self, make: Callable[[], bytes], status: int, code: str, *, source: str = "127.0.0.1") -> None:
        """Commands from `make` are refused on both HTTP paths, and nothing is stored."""
        before = self.daemon_client.read_rows()
        for headers in HTTP_PATH_HEADERS:
            self.assert_error(self.daemon_client.post_command(make(), source=source, **headers), status, code)
        self.assertEqual(self.daemon_client.read_rows(), before)


class RefusalDaemonTestCase(SharedDaemonTestCase, RefusalTestCase):
    """:class:`RefusalTestCase` with a daemon for each class."""
