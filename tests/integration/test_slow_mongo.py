"""A daemon with a slow MongoDB server: each store operation is in time, but all of a request are not."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import PICKUP, MediatorProblem
from mediatord.wallet.didcomm_socket import connect_didcomm_socket
from tests.http.in_memory_site import HTTPResponse
from tests.integration.message_load import prepare_forwards
from tests.integration.raw_decentrl_client import JSON, DaemonClient, RawDecentrlClient
from tests.integration.single_mongod import RESPONSE_SECONDS, SingleMongodTestCase, send_request

reactor: Any = _reactor


class SlowTests(SingleMongodTestCase):
    """Operations are delayed so that a response would take more than 3 s."""

    def delay_commands(self, milliseconds: int, *commands: str) -> Any:
        """Delay these commands within this context."""
        return self.servers.failpoint(*commands, blockConnection=True, blockTimeMS=milliseconds)

    async def post(self, body: bytes) -> HTTPResponse:
        """POST a message."""
        return await deferToThread(send_request, self.daemon, "POST", "/didcomm", body)

    def assert_unavailable(self, response: HTTPResponse) -> None:
        """The request may be retried. Its response time was checked by the request."""
        self.assertEqual(response.status, 503, response.body)
        self.assertGreater(int(response.headers["retry-after"]), 0)

    async def test_late_forward_is_not_stored(self) -> None:
        """The commit exceeds the deadline."""
        (forward,) = prepare_forwards(self.bob, "slow", 1)
        with self.delay_commands(3_400, "commitTransaction"):
            self.assert_unavailable(await self.post(forward.body))
        self.assertEqual((await self.bob.status()).message_count, 0)
        self.assertEqual((await self.post(forward.body)).status, 202)
        self.assertEqual((await self.bob.status()).message_count, 1)

    async def test_late_request_may_be_repeated(self) -> None:
        """Reading takes 3 s: the same message is accepted again."""
        _, request = self.bob.pack(f"{PICKUP}/status-request", {})
        with self.delay_commands(1000, "commitTransaction", "aggregate"):
            self.assert_unavailable(await self.post(request))
        self.assertEqual((await self.post(request)).status, 200)

    async def test_deadline_applies_to_each_socket_message(self) -> None:
        """Each is answered."""
        socket = await connect_didcomm_socket(reactor, self.bob)
        with self.delay_commands(800, "commitTransaction", "aggregate"):
            request: Deferred[Any] = Deferred.fromCoroutine(socket.status())
            request.addTimeout(RESPONSE_SECONDS, reactor)
            problem = await self.assertFailure(request, MediatorProblem)
        self.assertEqual(problem.code, "e.p.me.res.storage")
        self.assertEqual((await socket.status()).message_count, 0)
        await socket.close()

    async def test_late_command_is_refused(self) -> None:
        """Claiming its nonce takes 2.4 s, reading 0.8 s."""
        await deferToThread(self._command)

    def _command(self) -> None:
        identity = RawDecentrlClient(DaemonClient(self.daemon), "alice")
        identity.register()
        with self.delay_commands(800, "commitTransaction", "find"):
            response = send_request(self.daemon, "POST", "/", identity.command({"type": "QUERY_EVENTS"}), JSON)
            self.assert_unavailable(response)
            self.assertEqual(encoding.loads_object(response.body)["code"], "UNAVAILABLE")
        self.assertEqual(identity.execute("QUERY_EVENTS")["payload"]["events"], [])
