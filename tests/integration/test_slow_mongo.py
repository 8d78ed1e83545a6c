"""A daemon whose MongoDB server is slow: each thing asked of it is done in time, and all of a request is not."""

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
from tests.integration.single_mongod import ANSWER_SECONDS, SingleMongodTestCase, send_request

reactor: Any = _reactor


class SlowTests(SingleMongodTestCase):
    """What is held up, and for how long, is such that a request would be answered after more than 3 s."""

    def held(self, milliseconds: int, *commands: str) -> Any:
        """While inside, these commands take so long."""
        return self.servers.failpoint(*commands, blockConnection=True, blockTimeMS=milliseconds)

    async def post(self, body: bytes) -> HTTPResponse:
        """What a message is answered."""
        return await deferToThread(send_request, self.daemon, "POST", "/didcomm", body)

    def assert_unavailable(self, answered: HTTPResponse) -> None:
        """It may be tried again later. Whether that was said in time was seen to when it was asked."""
        self.assertEqual(answered.status, 503, answered.body)
        self.assertGreater(int(answered.headers["retry-after"]), 0)

    async def test_a_forward(self) -> None:
        """Keeping it would take longer than there is time: it is not kept."""
        (letter,) = prepare_forwards(self.bob, "slow", 1)
        with self.held(3_400, "commitTransaction"):
            self.assert_unavailable(await self.post(letter.body))
        self.assertEqual((await self.bob.status()).message_count, 0)
        self.assertEqual((await self.post(letter.body)).status, 202)
        self.assertEqual((await self.bob.status()).message_count, 1)

    async def test_a_question(self) -> None:
        """Remembering it takes 0.8 s, and looking 2.4 s: the very same may be asked again."""
        _, question = self.bob.pack(f"{PICKUP}/status-request", {})
        with self.held(800, "commitTransaction", "aggregate"):
            self.assert_unavailable(await self.post(question))
        self.assertEqual((await self.post(question)).status, 200)

    async def test_a_question_on_a_socket(self) -> None:
        """Each message on it has so much time, and an answer."""
        socket = await connect_didcomm_socket(reactor, self.bob)
        with self.held(800, "commitTransaction", "aggregate"):
            asked: Deferred[Any] = Deferred.fromCoroutine(socket.status())
            asked.addTimeout(ANSWER_SECONDS, reactor)
            problem = await self.assertFailure(asked, MediatorProblem)
        self.assertEqual(problem.code, "e.p.me.res.storage")
        self.assertEqual((await socket.status()).message_count, 0)
        await socket.close()

    async def test_a_command(self) -> None:
        """Claiming its nonce takes 2.4 s, and looking 0.8 s."""
        await deferToThread(self._command)

    def _command(self) -> None:
        resident = RawDecentrlClient(DaemonClient(self.daemon), "alice")
        resident.register()
        with self.held(800, "commitTransaction", "find"):
            answered = send_request(self.daemon, "POST", "/", resident.command({"type": "QUERY_EVENTS"}), JSON)
            self.assert_unavailable(answered)
            self.assertEqual(encoding.loads_object(answered.body)["code"], "UNAVAILABLE")
        self.assertEqual(resident.get("QUERY_EVENTS")["payload"]["events"], [])
