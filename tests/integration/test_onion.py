"""Messages that pass two mediators, each of them a process of its own (reference 4.6 to 4.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  two daemons are spoken to over real sockets
from twisted.trial.unittest import TestCase

from mediatord.protocol.didcomm.did_methods import make_did_peer_2
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    DIDCommMediator,
    DIDCommWallet,
    discover_mediator,
    open_http,
)
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey
from mediatord.wallet.didcomm_messages import BASIC_MESSAGE, authcrypt, compose_message, find_route, wrap_in_forwards
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.in_memory_mediator import from_header
from tests.integration.daemon import Daemon

reactor: Any = _reactor
LOOPBACK = {"outbound": {"allow_private": ["127.0.0.0/8"]}}
TEXT = "for nobody else's eyes"


def reached_by_way_of(first: str, second: str) -> WalletIdentity:
    """An identity whose document says: to the first mediator, for the second one, for me."""
    agreement, signing = PrivateKey.generate("X25519"), PrivateKey.generate("Ed25519")
    endpoint = {"uri": first, "accept": ["didcomm/v2"], "routing_keys": [second], "routingKeys": [second]}
    service = {"type": "DIDCommMessaging", "serviceEndpoint": endpoint}
    did = make_did_peer_2([("E", agreement.public), ("V", signing.public)], [service])
    return WalletIdentity(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))


class OnionTests(TestCase):
    """
    Two mediators: the first delivers to the second by POST, because an account of it has its endpoint there.

    The last one to be wrapped for is Bob, who waits at the second mediator on a live socket.
    """

    async def start(self, endpoints: dict[str, str] | None = None, **didcomm: Any) -> None:
        """
        Start both.

        :param endpoints: of the first mediator; where the value is empty, it is the URL of the second.
        """
        self.http = open_http(reactor)
        self.last = self.daemon(Daemon())
        self.second = await discover_mediator(self.http, self.last.url)
        urls = {did: endpoint or self.second.http_uri for did, endpoint in (endpoints or {}).items()}
        self.entry = self.daemon(Daemon({"didcomm": {"endpoints": urls, **didcomm}, **LOOPBACK}))
        self.first = await discover_mediator(self.http, self.entry.url)

    def daemon(self, daemon: Daemon) -> Daemon:
        """Start a daemon for as long as the test lasts."""
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, None, None, None)
        return daemon

    async def enrolled(self, identity: WalletIdentity, mediator: DIDCommMediator, *dids: str) -> DIDCommWallet:
        """A wallet with an account, and these DIDs or its own registered."""
        wallet = DIDCommWallet(identity, self.http, reactor, mediator)
        await wallet.enrol()
        self.assertEqual(set(await wallet.register(*dids)), {"success"})
        return wallet

    async def live(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """A socket on which messages are pushed."""
        socket = await connect_didcomm_socket(reactor, wallet)
        self.addCleanup(socket.close)
        await socket.live()
        return socket

    async def post(self, to: DIDCommMediator, recipient: WalletIdentity, hops: tuple[str, ...]) -> tuple[str, bytes]:
        """A stranger sends something by way of `hops`: its DID, and the message as the recipient shall get it."""
        sender = DIDCommWallet(WalletIdentity.generate(), self.http, reactor, to)
        sender.documents.add(self.second.document)
        message = compose_message(BASIC_MESSAGE, {"content": TEXT}, to=[recipient.did], **from_header(sender.did))
        inner = authcrypt(message, sender.identity, recipient.document)
        response = await sender.post(wrap_in_forwards(inner, recipient.did, hops, sender.documents.resolve))
        self.assertEqual((response.status, response.body), (202, b""))
        return sender.did, inner

    def assert_intact(self, wallet: DIDCommWallet, delivered: DeliveredMessage, sender: str, inner: bytes) -> None:
        """Exactly what the sender made, byte for byte, and it opens."""
        self.assertEqual(delivered.payload, inner)
        opened = wallet.open(delivered)
        self.assertEqual((opened.text, opened.sender), (TEXT, sender))

    def assert_ignorant(self, daemon: Daemon, *names: str) -> None:
        """Nothing in the files of a mediator, events and database, has one of these names or the text."""
        daemon.stop()
        files = [path for path in daemon.directory.rglob("*") if path.is_file()]
        self.assertTrue(any(path.suffix == ".sqlite3" for path in files))
        for path in files:
            for name in (*names, TEXT):
                self.assertNotIn(name.encode(), path.read_bytes(), path.name)

    def events(self, daemon: Daemon, name: str) -> str:
        """All lines of one event, as text."""
        lines = "".join(path.read_text("utf-8") for path in Path(daemon.log_directory).glob("*.jsonl"))
        return "\n".join(line for line in lines.splitlines() if f'"event":"{name}"' in line)

    async def test_two_hops_of_an_onion(self) -> None:
        """
        The sender wraps for both mediators, as the recipient's document says (reference 4.8). The first one knows
        that something is for the second one, the second that something is for Bob, and neither knows the sender.
        """
        courier = WalletIdentity.generate()
        await self.start({courier.did: ""}, failover="configured")
        await self.enrolled(courier, self.first, self.second.did)
        bob = await self.enrolled(reached_by_way_of(self.first.did, self.second.did), self.second)
        socket = await self.live(bob)
        route = find_route(bob.identity.document, bob.documents.resolve)
        self.assertEqual(route.uri, self.first.http_uri)
        self.assertEqual(route.hops, (self.first.did, self.second.did))
        sender, inner = await self.post(self.first, bob.identity, route.hops)
        self.assert_intact(bob, await socket.pushed.get(), sender, inner)
        await socket.close()
        self.assertNotIn('"sender"', self.events(self.entry, "msg.accept"))
        self.assertNotIn('"sender"', self.events(self.last, "msg.accept"))
        keys = [name_of(did) for did in (sender, bob.did)]
        self.assert_ignorant(self.entry, *keys)
        self.assert_ignorant(self.last, keys[0], name_of(courier.did))

    async def test_an_endpoint_that_is_a_did(self) -> None:
        """
        The sender wraps for the first mediator only, where Bob's account names the second one by its DID: the first
        wraps for that one's keys (reference 4.7).
        """
        await self.start(failover="account-did")
        identity = WalletIdentity.generate(endpoint=self.second.did)
        await self.enrolled(identity, self.first)
        bob = await self.enrolled(identity, self.second)
        socket = await self.live(bob)
        sender, inner = await self.post(self.first, identity, (self.first.did,))
        self.assert_intact(bob, await socket.pushed.get(), sender, inner)
        await socket.close()
        self.assert_ignorant(self.entry, name_of(sender))
        self.assert_ignorant(self.last, name_of(sender))

    async def test_the_second_mediator_is_away(self) -> None:
        """The first one has it until the second one is back, and then delivers it (reference 4.7)."""
        courier = WalletIdentity.generate()
        await self.start({courier.did: ""}, failover="configured")
        account = await self.enrolled(courier, self.first, self.second.did)
        bob = await self.enrolled(WalletIdentity.generate(), self.second)
        self.last.stop()
        sender, inner = await self.post(self.first, bob.identity, (self.first.did, self.second.did))
        self.assertEqual((await account.status()).message_count, 1)
        self.last.start()
        socket = await self.live(bob)
        delivered = await bob.fetch() or [await socket.pushed.get()]
        self.assert_intact(bob, delivered[0], sender, inner)


def name_of(did: str) -> str:
    """The part of a did:peer:2 that is nobody else's: its first key."""
    return did.split(".")[1]
