"""Unexpected exceptions in the daemon, over a real connection (reference 12); they are injected into the store."""

from __future__ import annotations

import http.client
import json
from functools import partial
from typing import Any

from autobahn.twisted.websocket import WebSocketClientFactory
from twisted.internet import reactor as _reactor  # noqa: TID251  a real connection is the subject
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.http.in_memory_site import InMemorySite
from tests.http.test_decentrl_socket import LOCAL, RecordingWebSocketClient
from tests.in_memory_identities import InMemoryIdentity
from tests.integration.message_load import PATIENCE_SECONDS

FAULT = {"type": "ERROR", "code": "INTERNAL_ERROR"}
MARK = "details of the fault"


class FaultTests(TestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self)
        self.alice = InMemoryIdentity(self.site_fixture, "alice")
        self.alice.register()
        reactor: Any = _reactor
        port = reactor.listenTCP(0, self.site_fixture.site, interface=LOCAL)
        self.addCleanup(port.stopListening)
        self.number: int = port.getHost().port

    async def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """JSON and status of a response, which must be readable by any web page."""

        def send() -> tuple[int, Any]:
            connection = http.client.HTTPConnection(LOCAL, self.number, timeout=PATIENCE_SECONDS)
            try:
                connection.request(method, path, body)
                response = connection.getresponse()
                self.assertEqual(response.headers["Access-Control-Allow-Origin"], "*")
                return response.status, json.loads(response.read())
            finally:
                connection.close()

        return await deferToThread(send)

    async def test_http_answers_500_and_stores_nothing(self) -> None:
        """On both HTTP paths; the next command is served."""
        events = [{"sender_did": "a", "recipient_did": "b", "payload": "x", "timestamp": 1, "encrypted_tags": []}]
        save = partial(self.alice.command, {"type": "SAVE_EVENTS", "events": events})
        with self.site_fixture.failing("save_events", RuntimeError(MARK)):
            self.assertEqual(await self.request("POST", "/", save()), (500, FAULT))
            self.assertEqual(await self.request("POST", "/?by=twisted.web", save()), (500, FAULT))
        with self.site_fixture.failing("public_events", RuntimeError(MARK)):
            self.assertEqual(await self.request("GET", f"/public/{self.alice.did}"), (500, FAULT))
        self.assert_logged_without_details(3)
        self.assertEqual(self.alice.query("EVENTS", "events"), [])
        status, body = await self.request("POST", "/", save())
        self.assertEqual((status, body), (200, {"type": "SUCCESS"}))

    async def test_socket_is_closed_with_internal_error(self) -> None:
        """AUTH_FAILED with INTERNAL_ERROR, then the close code of RFC 6455."""
        factory = WebSocketClientFactory(f"ws://{LOCAL}:{self.number}/ws", reactor=_reactor)
        factory.noisy = False
        # The default time-out of one second is too short for a busy machine.
        factory.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)
        client = RecordingWebSocketClient(self.alice.authentication_frame())
        client.factory = factory
        with self.site_fixture.failing("check_guard", RuntimeError(MARK)):
            await connectProtocol(TCP4ClientEndpoint(_reactor, LOCAL, self.number), client)
            (frame, binary), end = await client.over
        self.assertEqual((json.loads(frame), binary), ({"type": "AUTH_FAILED", "code": "INTERNAL_ERROR"}, False))
        self.assertEqual(end, (True, 1011, "INTERNAL_ERROR"))
        self.assert_logged_without_details(1)

    def assert_logged_without_details(self, number: int) -> None:
        """The log has this number of failures, and no input."""
        failures = self.flushLoggedErrors()
        self.assertEqual(len(failures), number)
        self.assertNotIn(MARK, "".join(map(str, failures)))
