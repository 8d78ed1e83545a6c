"""Messages that pass two mediators, each a process of its own (reference 4.6 to 4.8)."""

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


def identity_behind(first: str, second: str) -> WalletIdentity:
    """An identity whose document routes through the first mediator, then the second one."""
    agreement, signing = PrivateKey.generate("X25519"), PrivateKey.generate("Ed25519")
    endpoint = {"uri": first, "accept": ["didcomm/v2"], "routing_keys": [second], "routingKeys": [second]}
    service = {"type": "DIDCommMessaging", "serviceEndpoint": endpoint}
    did = make_did_peer_2([("E", agreement.public), ("V", signing.public)], [service])
    return WalletIdentity(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))


class OnionTests(TestCase):
    """
    Two mediators: the first delivers to the second by POST, because an account of it has its endpoint there.

    The final recipient is Bob, with a live socket at the second mediator.
    """

    async def start_mediators(self, endpoints: dict[str, str] | None = None, **didcomm: Any) -> None:
        """
        Start both mediators.

        :param endpoints: endpoints of the first mediator; an empty value stands for the URL of the second.
        """
        self.http = open_http(reactor)
        self.second_daemon = self.start_daemon(Daemon())
        self.second = await discover_mediator(self.http, self.second_daemon.url)
        urls = {did: endpoint or self.second.http_uri for did, endpoint in (endpoints or {}).items()}
        self.first_daemon = self.start_daemon(Daemon({"didcomm": {"endpoints": urls, **didcomm}, **LOOPBACK}))
        self.first = await discover_mediator(self.http, self.first_daemon.url)

    def start_daemon(self, daemon: Daemon) -> Daemon:
        """Start a daemon for the duration of the test."""
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, None, None, None)
        return daemon

    async def enrol_wallet(self, identity: WalletIdentity, mediator: DIDCommMediator, *dids: str) -> DIDCommWallet:
        """A wallet with an account, and these DIDs or its own registered."""
        wallet = DIDCommWallet(identity, self.http, reactor, mediator)
        await wallet.enrol()
        self.assertEqual(set(await wallet.register(*dids)), {"success"})
        return wallet

    async def open_live_socket(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """A socket with live delivery."""
        socket = await connect_didcomm_socket(reactor, wallet)
        self.addCleanup(socket.close)
        await socket.live()
        return socket

    async def post_by_hops(
        self, to: DIDCommMediator, recipient: WalletIdentity, hops: tuple[str, ...]
    ) -> tuple[str, bytes]:
        """
        An unregistered sender posts a message through `hops`: its DID, and the envelope that the recipient should
        get.
        """
        sender = DIDCommWallet(WalletIdentity.generate(), self.http, reactor, to)
        sender.documents.add(self.second.document)
        message = compose_message(BASIC_MESSAGE, {"content": TEXT}, to=[recipient.did], **from_header(sender.did))
        inner = authcrypt(message, sender.identity, recipient.document)
        response = await sender.post(wrap_in_forwards(inner, recipient.did, hops, sender.documents.resolve))
        self.assertEqual((response.status, response.body), (202, b""))
        return sender.did, inner

    def assert_delivered_unchanged(
        self, wallet: DIDCommWallet, delivered: DeliveredMessage, sender: str, inner: bytes
    ) -> None:
        """The delivered envelope is unchanged and opens."""
        self.assertEqual(delivered.payload, inner)
        opened = wallet.open(delivered)
        self.assertEqual((opened.text, opened.sender), (TEXT, sender))

    def assert_files_lack(self, daemon: Daemon, *names: str) -> None:
        """No file of the mediator contains one of these names or the text."""
        daemon.stop()
        files = [path for path in daemon.directory.rglob("*") if path.is_file()]
        self.assertTrue(any(path.suffix == ".sqlite3" for path in files))
        for path in files:
            for name in (*names, TEXT):
                self.assertNotIn(name.encode(), path.read_bytes(), path.name)

    def events(self, daemon: Daemon, name: str) -> str:
        """All lines of one event."""
        lines = "".join(path.read_text("utf-8") for path in Path(daemon.log_directory).glob("*.jsonl"))
        return "\n".join(line for line in lines.splitlines() if f'"event":"{name}"' in line)

    async def test_sender_wraps_for_both_mediators(self) -> None:
        """
        As the recipient's document says (reference 4.8). The first one learns the second, the second one learns Bob,
        and neither learns the sender.
        """
        relay = WalletIdentity.generate()
        await self.start_mediators({relay.did: ""}, failover="configured")
        await self.enrol_wallet(relay, self.first, self.second.did)
        bob = await self.enrol_wallet(identity_behind(self.first.did, self.second.did), self.second)
        socket = await self.open_live_socket(bob)
        route = find_route(bob.identity.document, bob.documents.resolve)
        self.assertEqual(route.uri, self.first.http_uri)
        self.assertEqual(route.hops, (self.first.did, self.second.did))
        sender, inner = await self.post_by_hops(self.first, bob.identity, route.hops)
        self.assert_delivered_unchanged(bob, await socket.pushed.get(), sender, inner)
        await socket.close()
        self.assertNotIn('"sender"', self.events(self.first_daemon, "msg.accept"))
        self.assertNotIn('"sender"', self.events(self.second_daemon, "msg.accept"))
        keys = [distinctive_part(did) for did in (sender, bob.did)]
        self.assert_files_lack(self.first_daemon, *keys)
        self.assert_files_lack(self.second_daemon, keys[0], distinctive_part(relay.did))

    async def test_mediator_wraps_for_endpoint_did(self) -> None:
        """
        The sender wraps for the first mediator only, where Bob's account has the second one's DID as endpoint: the
        first one wraps for it (reference 4.7).
        """
        await self.start_mediators(failover="account-did")
        identity = WalletIdentity.generate(endpoint=self.second.did)
        await self.enrol_wallet(identity, self.first)
        bob = await self.enrol_wallet(identity, self.second)
        socket = await self.open_live_socket(bob)
        sender, inner = await self.post_by_hops(self.first, identity, (self.first.did,))
        self.assert_delivered_unchanged(bob, await socket.pushed.get(), sender, inner)
        await socket.close()
        self.assert_files_lack(self.first_daemon, distinctive_part(sender))
        self.assert_files_lack(self.second_daemon, distinctive_part(sender))

    async def test_delivers_when_second_mediator_returns(self) -> None:
        """The first one queues the message until then (reference 4.7)."""
        relay = WalletIdentity.generate()
        await self.start_mediators({relay.did: ""}, failover="configured")
        account = await self.enrol_wallet(relay, self.first, self.second.did)
        bob = await self.enrol_wallet(WalletIdentity.generate(), self.second)
        self.second_daemon.stop()
        sender, inner = await self.post_by_hops(self.first, bob.identity, (self.first.did, self.second.did))
        self.assertEqual((await account.status()).message_count, 1)
        self.second_daemon.start()
        socket = await self.open_live_socket(bob)
        delivered = await bob.fetch() or [await socket.pushed.get()]
        self.assert_delivered_unchanged(bob, delivered[0], sender, inner)


def distinctive_part(did: str) -> str:
    """The first key of a did:peer:2, which occurs in no other DID."""
    return did.split(".")[1]
