"""Requests between nodes over real connections, and what strangers can do at the listener."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  real sockets
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.endpoints import clientFromString, connectProtocol, serverFromString
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from mediatord.cluster import peer_client, peer_server
from mediatord.cluster.peer_client import PeerCallFailed, PeerCallRejected, PeerClient, PeerReplaced, PeerUnreachable
from mediatord.cluster.peer_protocol import (
    MAC_HEADER,
    MAX_BODY_BYTES,
    NOTIFICATIONS_PATH,
    PROBE_PATH,
    SENDER_HEADER,
    MessageAuthenticator,
    derive_cluster_keys,
)
from mediatord.cluster.peer_server import (
    MAX_CONCURRENT_REQUESTS,
    MAX_HEADER_BYTES,
    RECEIVE_TIMEOUT,
    PeerResponse,
    PeerServer,
    PeerSite,
)
from mediatord.cluster.remote_delivery import answer_probe
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster import ClusterNode

reactor: Any = _reactor
KEYS, OTHER_KEYS = derive_cluster_keys(b"s" * 32), derive_cluster_keys(b"t" * 32)


class RawPeer(Protocol):
    """A connection of somebody who knows nothing."""

    def __init__(self) -> None:
        self.got = b""
        self.gone: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        """Keep it."""
        self.got += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """They have hung up."""
        self.gone.callback(None)

    def say(self, data: bytes) -> None:
        """Send something."""
        self.transport.write(data)  # type: ignore[union-attr]  # it is connected


class WireTestCase(TestCase):
    """A node that answers, on TCP and on a UNIX socket."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.refusals: list[str] = []
        self.bodies: list[bytes] = []
        self.use: Callable[[bytes], Coroutine[Any, Any, bytes]] = self.echo
        operations = {NOTIFICATIONS_PATH: lambda body: self.use(body), PROBE_PATH: answer_probe}
        serving = PeerServer(reactor, "bbbb", MessageAuthenticator(reactor, KEYS), operations, self.refusals.append)
        self.clock = Clock()
        self.site = PeerSite(self.clock, serving.serve)
        port = await self.listen("tcp:0:interface=127.0.0.1")
        self.port = port.getHost().port
        self.bea = ClusterNode("bea", "bbbb", f"tcp:host=127.0.0.1:port={self.port}", KEYS.seal)
        self.calling = self.caller(KEYS)

    async def listen(self, endpoint: str) -> Any:
        """Serve there as well."""
        port = await serverFromString(reactor, endpoint).listen(self.site)
        self.addCleanup(port.stopListening)
        return port

    def caller(self, keys: Any, **options: Any) -> PeerClient:
        """Another node, which is in no hurry unless it is told to be."""
        calling = PeerClient(reactor, "aaaa", MessageAuthenticator(reactor, keys), **{"timeout": 60.0, **options})
        self.addCleanup(calling.close)
        return calling

    async def echo(self, body: bytes) -> bytes:
        """The body, noted."""
        self.bodies.append(body)
        return body

    async def stranger(self, options: str = "") -> RawPeer:
        """Somebody connects. :param options: of the endpoint."""
        endpoint = clientFromString(reactor, self.bea.address + options)
        found = RawPeer()
        connected: Any = await connectProtocol(endpoint, found)
        self.addCleanup(connected.transport.abortConnection)
        return found

    async def turn(self) -> None:
        """Let the reactor look at its sockets."""
        turned: Deferred[None] = Deferred()
        reactor.callLater(0.005, turned.callback, None)
        await turned

    async def failure(
        self, kind: type[Exception], calling: PeerClient, node: ClusterNode, path: str = NOTIFICATIONS_PATH
    ) -> None:
        """A request has to fail in exactly this way."""
        with self.assertRaises(PeerCallFailed) as caught:
            await calling.call(node, path, b"{}")
        self.assertIs(type(caught.exception), kind)


class PeerClientTests(WireTestCase):
    async def test_ask(self) -> None:
        """A body there and one back; the connection is kept for the next one."""
        for number in range(3):
            body = b'{"n":%d}' % number
            self.assertEqual(await self.calling.call(self.bea, NOTIFICATIONS_PATH, body), body)
        self.assertEqual(len(self.site.slots), 1)
        self.assertEqual(self.refusals, [])

    async def test_unix(self) -> None:
        """Processes of one host need no TCP."""
        path = self.directory / "node.sock"
        await self.listen(f"unix:{path}")
        bea = ClusterNode("bea", "bbbb", f"unix:{path}", KEYS.seal)
        self.assertEqual(await self.calling.call(bea, NOTIFICATIONS_PATH, b"{}"), b"{}")
        self.assertTrue(await self.calling.probe(bea))

    async def test_largest(self) -> None:
        """As long as may be, both ways; what is longer is cut off."""
        body = b"x" * MAX_BODY_BYTES
        self.assertEqual(await self.calling.call(self.bea, NOTIFICATIONS_PATH, body), body)
        with self.assertRaises(PeerCallFailed):
            await self.calling.call(self.bea, NOTIFICATIONS_PATH, body + b"x")

    async def test_probe(self) -> None:
        """Which node is where one said it is: that one, another one, or none that we know for one."""
        self.assertEqual(await self.calling.probe(self.bea), "bbbb")
        other = ClusterNode("bea", "dead", self.bea.address, KEYS.seal)
        self.assertEqual(await self.calling.probe(other), "bbbb")
        self.assertIsNone(await self.caller(OTHER_KEYS).probe(self.bea))
        for number, address in enumerate(
            ("tcp:host=127.0.0.1:port=1", f"unix:{self.directory}/none.sock", "nonsense", "tcp:host=127.0.0.1")
        ):
            self.assertIsNone(await self.calling.probe(ClusterNode("bea", f"b{number}", address, KEYS.seal)))

    async def test_nobody_listens(self) -> None:
        """That is known at once."""
        for number, address in enumerate(("tcp:host=127.0.0.1:port=1", f"unix:{self.directory}/none.sock")):
            await self.failure(PeerUnreachable, self.calling, ClusterNode("bea", f"b{number}", address, KEYS.seal))

    async def test_another_boot(self) -> None:
        """A request for a node that was there before: its address may be forgotten. The answer is sealed."""
        await self.failure(PeerReplaced, self.calling, ClusterNode("bea", "dead", self.bea.address, KEYS.seal))
        self.assertEqual(self.bodies, [])

    async def test_another_secret(self) -> None:
        """Refused with 401, and nothing was done."""
        await self.failure(PeerCallRejected, self.caller(OTHER_KEYS), self.bea)
        self.assertEqual((self.bodies, self.refusals), ([], ["seal"]))

    async def test_answers_of_somebody_else(self) -> None:
        """Whatever they say, without the secret it is no answer, a 410 neither."""
        for status in (200, 410, 503):
            boot = f"b{status}"
            await self.failure(PeerCallFailed, self.calling, await self.impostor(boot, status, boot, keys=OTHER_KEYS))

    async def test_answers_of_another_node(self) -> None:
        """What is done is done by the boot that was asked; that it is gone is for another one to say."""
        for status, boot, kind in (
            (200, "cccc", PeerCallFailed),
            (410, "b410", PeerCallFailed),
            (410, "cccc", PeerReplaced),
        ):
            node = await self.impostor(f"b{status}", status, boot)
            await self.failure(kind, self.caller(KEYS), node)
        asked = await self.impostor("bbbb", 200, "bbbb")
        self.assertEqual(await self.calling.call(asked, NOTIFICATIONS_PATH, b"{}"), b"{}")

    async def test_answer_without_a_proper_seal(self) -> None:
        """Whatever bytes there are instead."""
        for headers in ({}, {SENDER_HEADER: "bbbb"}, {SENDER_HEADER: "\udcff", MAC_HEADER: "\udcff"}):
            node = await self.impostor("bbbb", 200, "bbbb", headers=headers)
            await self.failure(PeerCallFailed, self.caller(KEYS), node)

    async def impostor(
        self, asked: str, status: int, boot: str, *, keys: Any = KEYS, headers: Any = None
    ) -> ClusterNode:
        """Somebody at the address of `asked` who answers as `boot`."""
        authenticator = MessageAuthenticator(reactor, keys)

        async def serve(
            method: str, path: str, given: dict[str, str], body: bytes, authenticated: Callable[[], None]
        ) -> PeerResponse:
            request_id = MessageAuthenticator(reactor, KEYS).verify_request(given, method, path, body)
            sealed = authenticator.authenticate_response(request_id, boot, status, b"{}")
            if headers is not None:
                sealed = {name: value.encode("utf-8", "surrogateescape") for name, value in headers.items()}
            return PeerResponse(status, b"{}", sealed)

        port = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(PeerSite(self.clock, serve))
        self.addCleanup(port.stopListening)
        return ClusterNode("bea", asked, f"tcp:host=127.0.0.1:port={port.getHost().port}", KEYS.seal)

    async def test_closed(self) -> None:
        """What is under way is given up, its connection too, and nothing begins any more."""
        arrived: Deferred[None] = Deferred()

        async def silent(body: bytes) -> bytes:
            arrived.callback(None)
            return await Deferred()

        self.use = silent
        under_way = Deferred.fromCoroutine(self.calling.call(self.bea, NOTIFICATIONS_PATH, b"{}"))
        await arrived
        await self.calling.close()
        failed = await under_way.addErrback(lambda failure: failure.type)
        self.assertIs(failed, PeerCallFailed)
        while len(self.site.slots):
            await self.turn()
        await self.failure(PeerCallFailed, self.calling, self.bea)
        self.assertIsNone(await self.calling.probe(self.bea))
        self.assertEqual(len(self.site.slots), 0)

    async def test_no_answer(self) -> None:
        """After the timeout it has failed, and the connection is not used again."""
        never: Deferred[bytes] = Deferred()

        async def silent(body: bytes) -> bytes:
            return await never

        self.use = silent
        await self.failure(PeerCallFailed, self.caller(KEYS, timeout=0.1), self.bea)
        self.use = self.echo
        self.assertEqual(await self.calling.call(self.bea, NOTIFICATIONS_PATH, b"{}"), b"{}")

    async def test_what_the_other_side_says_no_to(self) -> None:
        """Unknown paths, bodies that are none, a store that is away: it failed, and may be tried again."""

        async def not_understood(body: bytes) -> bytes:
            raise ValueError("none")

        async def away(body: bytes) -> bytes:
            raise StoreUnavailable

        await self.failure(PeerCallFailed, self.calling, self.bea, "/cluster/unheard-of")
        for self.use in (not_understood, away):
            await self.failure(PeerCallFailed, self.calling, self.bea)
        self.assertEqual(self.refusals, [])

    async def test_too_much_at_once(self) -> None:
        """What is more than can be served now is refused for now."""
        held: list[Deferred[bytes]] = []

        async def slow(body: bytes) -> bytes:
            held.append(Deferred())
            return await held[-1]

        self.use = slow
        work = [
            Deferred.fromCoroutine(self.calling.call(self.bea, NOTIFICATIONS_PATH, b"{}"))
            for _ in range(MAX_CONCURRENT_REQUESTS + 1)
        ]
        refused, _ = await DeferredList([one.addErrback(lambda failure: failure.type) for one in work], True)
        self.assertIs(refused, PeerCallFailed)
        self.assertEqual(len(held), MAX_CONCURRENT_REQUESTS)
        for one in held:
            one.callback(b"{}")
        self.assertEqual(sum(answer == b"{}" for _, answer in await DeferredList(work)), MAX_CONCURRENT_REQUESTS)

    async def test_fault(self) -> None:
        """A mistake of ours is logged there, and a failure here."""

        async def broken(body: bytes) -> bytes:
            raise RuntimeError("boom")

        self.use = broken
        await self.failure(PeerCallFailed, self.calling, self.bea)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class UnauthenticatedPeerTests(WireTestCase):
    async def test_no_seal(self) -> None:
        """401 without a word, whatever is asked for, and the connection is closed."""
        for request in (b"GET / HTTP/1.1", b"POST /cluster/hints HTTP/1.1", b"PUT /cluster/probe HTTP/1.0"):
            stranger = await self.stranger()
            stranger.say(request + b"\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            await stranger.gone
            self.assertRegex(stranger.got, rb"^HTTP/1\.[01] 401 Unauthorized\r\n")
            self.assertNotRegex(stranger.got, b"(?i)seal|server")
            self.assertTrue(stranger.got.endswith(b"\r\n\r\n{}"))
        self.assertEqual(self.refusals, ["malformed"] * 3)
        self.assertEqual(self.bodies, [])

    async def test_bytes_that_are_no_text(self) -> None:
        """Are refused like anything else, counted, and the connection is closed."""
        for header in (b"Mediatord-Sender: \xff", b"Mediatord-Seal: \xc3\x28", b"Mediatord-Nonce: \xed\xa0\x80"):
            stranger = await self.stranger()
            stranger.say(
                b"POST " + NOTIFICATIONS_PATH.encode() + b" HTTP/1.1\r\nContent-Length: 0\r\n" + header + b"\r\n\r\n"
            )
            await stranger.gone
            self.assertRegex(stranger.got, rb"^HTTP/1\.1 401 Unauthorized\r\n")
        self.assertEqual(self.refusals, ["malformed"] * 3)

    async def test_fault_before_the_seal(self) -> None:
        """A mistake of ours is no way in: it ends as a refusal."""
        self.patch(MessageAuthenticator, "verify_request", lambda *args: 1 // 0)
        stranger = await self.stranger()
        stranger.say(b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        await stranger.gone
        self.assertRegex(stranger.got, rb"^HTTP/1\.1 401 ")
        self.assertEqual((self.refusals, len(self.flushLoggedErrors(ZeroDivisionError))), (["malformed"], 1))

    async def test_one_answer(self) -> None:
        """Of requests that were sent in a row only the first is looked at."""
        stranger = await self.stranger()
        stranger.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" * 50)
        await stranger.gone
        self.assertEqual(self.refusals, ["malformed"])

    async def test_not_http(self) -> None:
        """Hung up on."""
        stranger = await self.stranger()
        stranger.say(b"\x16\x03\x01\r\n\r\n")
        await stranger.gone
        self.assertEqual(self.refusals, [])

    async def test_large_head(self) -> None:
        """Headers are short, and few; a line without an end is not waited for."""
        for head in (
            b"X: " + b"x" * MAX_HEADER_BYTES + b"\r\n",
            b"".join(b"X-%d: x\r\n" % number for number in range(100)),
            b"x" * (2 * MAX_HEADER_BYTES),
            b"Content-Length: " + b"9" * 3000 + b"\r\n\r\n",
        ):
            stranger = await self.stranger()
            stranger.say(b"POST / HTTP/1.1\r\n" + head + b"\r\n")
            await stranger.gone
        self.assertEqual(self.refusals, [])

    async def test_large_body(self) -> None:
        """Cut off as soon as it is known, by its length or by what came; forms are not read."""
        for head, body in (
            (b"Content-Length: %d\r\n" % (MAX_BODY_BYTES + 1), b""),
            (b"Transfer-Encoding: chunked\r\n", b"%x\r\n" % (MAX_BODY_BYTES + 1) + b"x" * (MAX_BODY_BYTES + 1)),
        ):
            stranger = await self.stranger()
            stranger.say(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n" + body)
            await stranger.gone
            self.assertEqual(stranger.got, b"")
        form = b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 3\r\n\r\n--x"
        stranger = await self.stranger()
        stranger.say(b"POST / HTTP/1.1\r\nHost: x\r\n" + form)
        await stranger.gone
        self.assertTrue(stranger.got.startswith(b"HTTP/1.1 401 "))

    async def test_patience(self) -> None:
        """Who says nothing, or says it slowly, is cut off after a while, however steadily it drips."""
        silent, slow = await self.stranger(), await self.stranger()
        slow.say(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n")
        while len(self.site.slots) < 2:
            await self.turn()
        for _ in range(int(RECEIVE_TIMEOUT)):
            slow.say(b"x")
            await self.turn()
            self.clock.advance(1)
        await DeferredList([silent.gone, slow.gone])
        self.assertEqual(self.refusals, [])

    async def test_patience_with_nodes(self) -> None:
        """Who has shown to be a node may be idle for long, but its next request has to arrive in time as well."""
        authenticator = MessageAuthenticator(reactor, KEYS)
        node = await self.stranger()
        headers = authenticator.authenticate_request(
            authenticator.new_request_id("aaaa", "bbbb"), "POST", NOTIFICATIONS_PATH, b"{}"
        )
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": "2"}.items())
        node.say(f"POST {NOTIFICATIONS_PATH} HTTP/1.1\r\n{lines}\r\n{{}}".encode())
        while not node.got.endswith(b"\r\n\r\n{}"):
            await self.turn()
        self.clock.advance(2 * RECEIVE_TIMEOUT)
        self.assertEqual(len(self.site.slots), 1)
        node.say(b"POST ")
        await self.turn()
        self.clock.pump([1] * int(RECEIVE_TIMEOUT))
        await node.gone

    async def test_idle(self) -> None:
        """A connection that is not used is closed, later than nodes close it themselves."""
        self.assertLess(peer_client.IDLE_TIMEOUT, peer_server.IDLE_TIMEOUT)
        await self.calling.call(self.bea, NOTIFICATIONS_PATH, b"{}")
        self.clock.pump([1] * (int(peer_server.IDLE_TIMEOUT) - 1))
        await self.turn()
        self.assertEqual(len(self.site.slots), 1)
        self.clock.advance(1)
        while self.site.slots:
            await self.turn()

    async def test_strangers_keep_no_node_out(self) -> None:
        """However many hold connections open, from however many addresses: a node that comes is served, and stays."""
        await self.calling.call(self.bea, NOTIFICATIONS_PATH, b"{}")
        self.patch(peer_server, "MAX_UNAUTHENTICATED", 4)
        self.patch(peer_server, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
        strangers = [await self.stranger() for _ in range(3)]
        await strangers[0].gone
        strangers += [await self.stranger(f":bindAddress=127.0.0.{number}") for number in (2, 2, 3, 3)]
        await strangers[1].gone
        await strangers[2].gone
        self.assertEqual(await self.caller(KEYS).call(self.bea, NOTIFICATIONS_PATH, b"{}"), b"{}")
        await strangers[3].gone
        for _ in range(8):
            await self.stranger()
        self.assertEqual(await self.calling.call(self.bea, NOTIFICATIONS_PATH, b"{}"), b"{}")
        self.assertEqual([len(self.site.slots), len(self.bodies)], [2 + 2 + 2, 3])

    async def test_stops(self) -> None:
        """When nobody listens any more, open connections end as well."""
        stranger = await self.stranger()
        while not self.site.slots:
            await self.turn()
        self.site.doStop()
        await stranger.gone
        self.site.doStart()
