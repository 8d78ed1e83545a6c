"""A DIDComm v1 wallet at a daemon: it connects, gets its mail live and queued, and exchanges it with a v2 wallet."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet import reactor as _reactor  # noqa: TID251  a daemon is spoken to over real sockets
from twisted.trial.unittest import TestCase

from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.did_document import DIDForm
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt
from mediatord.protocol.didcomm_v1.keys import KeySpelling, SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    DIDCommWallet,
    MediatorProblem,
    discover_mediator,
    open_http,
)
from mediatord.wallet.didcomm_messages import BASIC_MESSAGE, anoncrypt, build_forward, compose_message
from mediatord.wallet.didcomm_socket import connect_didcomm_socket
from mediatord.wallet.didcomm_v1_client import V1Wallet, fetch_v1_invitation
from mediatord.wallet.didcomm_v1_messages import HandshakeProtocol, V1Handshake, V1Mediator, generate_key
from mediatord.wallet.didcomm_v1_socket import V1Socket, connect_v1_socket
from tests.integration.daemon import PLENTY, Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon

reactor: Any = _reactor

# What Credo since 0.6, the older AFJ, ACA-Py and old wallets connect with.
STYLES: tuple[tuple[HandshakeProtocol, DIDForm, str, KeySpelling], ...] = (
    ("didexchange/1.1", "did:peer:4", DIDCOMM_ORG, "did:key"),
    ("didexchange/1.1", "did:peer:2", OLD_PREFIX, "did:key"),
    ("didexchange/1.1", "did:peer:1", OLD_PREFIX, "base58"),
    ("didexchange/1.0", "nym", DIDCOMM_ORG, "did:key"),
    ("connections/1.0", "nym", OLD_PREFIX, "base58"),
)


class V1DaemonTestCase(TestCase):
    """Wallets at a daemon."""

    daemon: ClassVar[Daemon]

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = prepare_daemon(PLENTY)
        cls.daemon.__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)

    def setUp(self) -> None:
        self.http = open_http(reactor)

    def tearDown(self) -> None:
        self.assertNotIn("Traceback", self.daemon.output())

    async def connect(self, **options: Any) -> V1Wallet:
        """A connected wallet."""
        invitation = await fetch_v1_invitation(self.http, self.daemon.url)
        return await V1Wallet.connect(invitation, self.http, reactor, **options)

    async def enrol(self, **options: Any) -> tuple[V1Wallet, SigningKey]:
        """A wallet with an account, and a key that it has registered."""
        wallet = await self.connect(**options)
        await wallet.enrol()
        return wallet, await wallet.add_key()

    async def open_socket(self, wallet: V1Wallet) -> V1Socket:
        """A socket of a wallet."""
        socket = await connect_v1_socket(reactor, wallet)
        self.addCleanup(socket.close)
        return socket

    async def next_push(self, socket: V1Socket) -> DeliveredMessage:
        """The next message that is pushed."""
        return await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)


class V1WalletTests(V1DaemonTestCase):
    """Wallets of every style."""

    async def test_every_style(self) -> None:
        """Each connects, is granted mediation, registers a key, and gets what waits for it."""
        for protocol, form, prefix, spelling in STYLES:
            wallet, key = await self.enrol(protocol=protocol, form=form, prefix=prefix, spelling=spelling)
            assert wallet.granted is not None
            self.assertEqual(wallet.granted.endpoint, wallet.mediator.http_uri)
            self.assertEqual(await wallet.registered(), [wallet.spell(key.did_key)])
            await wallet.ping()
            for text in ("first", "second"):
                await wallet.send(key.did_key, text)
            self.assertEqual((await wallet.status()).message_count, 2)
            delivered = await wallet.fetch(10, key.did_key)
            self.assertEqual([wallet.open(one).text for one in delivered], ["first", "second"])
            self.assertEqual((await wallet.acknowledge(delivered[:1])).message_count, 1)
            self.assertEqual([one.id for one in await wallet.fetch()], [delivered[1].id])
            self.assertEqual((await wallet.acknowledge(delivered)).message_count, 0)
            self.assertEqual(await wallet.fetch(), [])

    async def test_connecting_again(self) -> None:
        """A wallet that connects again gets the same key, and keeps its account; `complete` may be lost."""
        invitation = await fetch_v1_invitation(self.http, self.daemon.url)
        for protocol, form, *_ in STYLES:
            handshake = V1Handshake(invitation, generate_key(), protocol, form)
            unconnected = V1Mediator("", invitation.key, invitation.endpoint, None)
            found = []
            for _ in range(2):
                wallet = V1Wallet(handshake.key, unconnected, self.http, reactor)
                wallet.mediator = handshake.read_response(await wallet.exchange(handshake.make_request()))
                found.append(wallet.mediator)
                await wallet.enrol()
                self.assertEqual(len(await wallet.registered()), len(found) - 1)
                await wallet.add_key()
            self.assertEqual(found[0].key, found[1].key)

    async def test_batch_pickup(self) -> None:
        """Pickup 1.0 removes what it has delivered at the next request."""
        wallet, key = await self.enrol()
        for text in ("first", "second", "third"):
            await wallet.send(key.did_key, text)
        texts = []
        for _ in range(2):
            texts.append([wallet.open(one).text for one in await wallet.fetch_batch(2)])
        self.assertEqual(texts, [["first", "second"], ["third"]])
        self.assertEqual(await wallet.fetch_batch(2), [])
        self.assertEqual((await wallet.status()).message_count, 0)

    async def test_features(self) -> None:
        """Both versions of Discover Features name what Credo looks for."""
        wallet = await self.connect()
        for name in ("messagepickup/2.0", "messagepickup/1.0", "coordinate-mediation/1.0", "routing/1.0"):
            self.assertTrue(await wallet.serves(DIDCOMM_ORG + name), name)
        self.assertIn(f"{DIDCOMM_ORG}messagepickup/2.0", await wallet.disclose(f"{DIDCOMM_ORG}messagepickup/*"))

    async def test_live_delivery(self) -> None:
        """As Credo does it: live mode on the socket, acknowledgements by HTTP; nothing arrives twice."""
        wallet, key = await self.enrol()
        await wallet.send(key.did_key, "while away")
        delivered = await wallet.fetch()
        self.assertEqual((await wallet.acknowledge(delivered)).message_count, 0)
        socket = await self.open_socket(wallet)
        socket.sends_binary = True
        self.assertTrue((await socket.live()).live_delivery)
        for text in ("one", "two", "three"):
            await wallet.send(key.did_key, text)
            pushed = await self.next_push(socket)
            self.assertEqual(wallet.open(pushed).text, text)
            self.assertEqual((await wallet.acknowledge([pushed])).message_count, 0)
        self.assertEqual(socket.unexpected, [])

    async def test_implicit_pickup(self) -> None:
        """A ping on a socket brings what waits and what comes, as bare messages, which pongs remove."""
        wallet, key = await self.enrol(prefix=OLD_PREFIX)
        for text in ("one", "two"):
            await wallet.send(key.did_key, text)
        socket = await self.open_socket(wallet)
        socket.start_implicit_pickup()
        # An unknown wallet is first sent one `delivery`, which this one does not understand.
        probe = await self.next_push(socket)
        self.assertEqual((wallet.open(probe).text, probe.form), ("one", "base64"))
        bare = [await self.next_push(socket) for _ in range(2)]
        await wallet.send(key.did_key, "three")
        bare.append(await self.next_push(socket))
        self.assertEqual([wallet.open(one).text for one in bare], ["one", "two", "three"])
        self.assertEqual({one.form for one in bare}, {"json"})
        await self.until_empty(wallet)
        self.assertEqual(socket.unexpected, [])

    async def test_implicit_pickup_without_pongs(self) -> None:
        """What is not known to have arrived stays queued, and comes again on the next socket."""
        wallet, key = await self.enrol()
        await wallet.send(key.did_key, "one")
        socket = await self.open_socket(wallet)
        socket.start_implicit_pickup()
        self.assertEqual((await self.next_push(socket)).form, "base64")
        bare = await self.next_push(socket)
        socket.answers_pings = False  # this runs before the ping behind the message is read
        self.assertEqual((wallet.open(bare).text, bare.form), ("one", "json"))
        self.assertEqual(await wallet.count(), 1)
        await socket.close()
        socket = await self.open_socket(wallet)
        socket.start_implicit_pickup()
        self.assertEqual(wallet.open(await self.next_push(socket)).text, "one")
        await self.until_empty(wallet)

    async def test_implicit_pickup_with_acknowledgements(self) -> None:
        """A wallet that has used Pickup 2.0 gets deliveries, and acknowledges them."""
        wallet, key = await self.enrol()
        self.assertEqual((await wallet.status()).message_count, 0)
        for text in ("one", "two"):
            await wallet.send(key.did_key, text)
        socket = await self.open_socket(wallet)
        socket.start_implicit_pickup()
        pushed = [await self.next_push(socket) for _ in range(2)]
        self.assertEqual(
            [(wallet.open(one).text, one.form) for one in pushed], [("one", "base64"), ("two", "base64")]
        )
        self.assertEqual((await wallet.acknowledge(pushed)).message_count, 0)
        self.assertEqual(await wallet.count(), 0)

    async def until_empty(self, wallet: V1Wallet) -> None:
        """Wait until nothing is queued, which is recorded after the wallet has got it."""
        deadline = reactor.seconds() + PATIENCE_SECONDS
        while await wallet.count():
            self.assertLess(reactor.seconds(), deadline)

    async def test_restart(self) -> None:
        """Connection, keys and mail outlast a restart; the invitation is the same."""
        wallet, key = await self.enrol()
        invitation = await fetch_v1_invitation(self.http, self.daemon.url)
        await wallet.send(key.did_key, "hello")
        self.daemon.restart()
        self.assertEqual(await fetch_v1_invitation(self.http, self.daemon.url), invitation)
        (delivered,) = await wallet.fetch()
        self.assertEqual(wallet.open(delivered).text, "hello")
        self.assertEqual((await wallet.acknowledge([delivered])).message_count, 0)

    async def test_mail_between_versions(self) -> None:
        """A v2 sender reaches a v1 key by its did:key, a v1 sender reaches a DID, queued and live."""
        v1, key = await self.enrol()
        v2 = DIDCommWallet.generate(await discover_mediator(self.http, self.daemon.url), self.http, reactor)
        await v2.enrol()
        await v2.register()
        sent = await self.exchange_mail(v1, key, v2)
        (for_v1,), (for_v2,) = await v1.fetch(), await v2.fetch()
        self.assertEqual((encoding.loads(for_v1.payload), v2.open(for_v2).text), (encoding.loads(sent), "from v1"))
        self.assertEqual((await v1.acknowledge([for_v1])).message_count, 0)
        self.assertEqual((await v2.acknowledge([for_v2])).message_count, 0)
        v1_socket, v2_socket = await self.open_socket(v1), await connect_didcomm_socket(reactor, v2)
        self.addCleanup(v2_socket.close)
        for socket in (v1_socket, v2_socket):
            self.assertTrue((await socket.live()).live_delivery)
        sent = await self.exchange_mail(v1, key, v2)
        for_v1 = await self.next_push(v1_socket)
        for_v2 = await v2_socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        self.assertEqual((encoding.loads(for_v1.payload), v2.open(for_v2).text), (encoding.loads(sent), "from v1"))
        self.assertEqual((await v1_socket.acknowledge([for_v1])).message_count, 0)
        self.assertEqual((await v2_socket.acknowledge([for_v2])).message_count, 0)

    async def exchange_mail(self, v1: V1Wallet, key: SigningKey, v2: DIDCommWallet) -> bytes:
        """Each sends the other one message by its own kind of forward; what v2 has sent."""
        payload = pack_anoncrypt(b"{}", key.did_key)
        forward = build_forward(key.did_key, [payload], to=[v2.mediator.did])
        self.assertEqual((await v2.post(anoncrypt(forward, v2.mediator.document))).status, 202)
        message = compose_message(BASIC_MESSAGE, {"content": "from v1"}, to=[v2.did])
        response = await v1.post(v1.wrap(v2.did, anoncrypt(message, v2.identity.document)))
        self.assertIn(response.status, (200, 202))
        return payload


class V1RefusalTests(V1DaemonTestCase):
    """What a mediator must refuse."""

    async def refusal(self, work: Any) -> MediatorProblem:
        """The problem that a request ends with."""
        try:
            found = await work
        except MediatorProblem as problem:
            return problem
        raise AssertionError(f"not refused: {found}")

    async def test_without_grant(self) -> None:
        """Account requests before a grant get a report of coordinate mediation."""
        wallet = await self.connect()
        for work in (wallet.registered(), wallet.register(generate_key().did_key)):
            self.assertEqual((await self.refusal(work)).code, "mediation_not_granted")

    async def test_stolen_keys(self) -> None:
        """A key belongs to the first wallet that registers it, in whatever spelling; mail still goes to that one."""
        owner, key = await self.enrol()
        thief, _ = await self.enrol()
        names = [key.did_key, encode_base58_key(key.did_key), f"{key.did_key}#{key.did_key[8:]}"]
        self.assertEqual(await thief.update_keys("add", names), ["client_error"] * 3)
        results = await thief.update_keys("remove", names)
        self.assertNotIn("success", results)
        await thief.send(key.did_key, "still here")
        self.assertEqual([owner.open(one).text for one in await owner.fetch()], ["still here"])
        self.assertEqual(await thief.fetch(), [])

    async def test_unknown_recipient(self) -> None:
        """A forward to a key that nobody has registered is refused."""
        wallet, _ = await self.enrol()
        self.assertEqual((await self.refusal(wallet.send(generate_key().did_key, "hello"))).status, 404)

    async def test_replay(self) -> None:
        """A request that comes again is refused, a key that was removed meanwhile stays removed."""
        wallet, _ = await self.enrol()
        key = generate_key()
        updates = {"updates": [{"recipient_key": key.did_key, "action": "add"}]}
        _, envelope = wallet.pack("coordinate-mediation/1.0/keylist-update", updates)
        self.assertEqual((await wallet.post(envelope)).status, 200)
        self.assertEqual(await wallet.unregister(key.did_key), ["success"])
        replayed = await wallet.post(envelope)
        self.assertNotIn(key.did_key, await wallet.registered())
        if replayed.body:
            self.assertEqual(wallet.open(replayed.body).message.type.name, "problem-report")

    async def test_anonymous_and_foreign_requests(self) -> None:
        """Requests in anoncrypt, of another wallet, and to another key have no effect and no answer."""
        wallet, _ = await self.enrol()
        other, _ = await self.enrol()
        message, _ = wallet.pack("messagepickup/2.0/status-request")
        plaintext = encoding.dumps(message)
        bodies = [pack_anoncrypt(plaintext, wallet.mediator.key)]
        for mediator in (wallet.mediator, V1Mediator("", wallet.granted.routing_keys[0], "", None)):  # type: ignore[union-attr]
            other.mediator = mediator
            bodies.append(other.encrypt(message))
        for body in bodies:
            response = await wallet.post(body)
            self.assertGreaterEqual(response.status, 400)
            self.assertEqual(response.body, b"")
