"""
Alice and Bob exchange events through two Decentrl mediators, two processes that never connect to each other (Message
Routing, reference 7.5).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar

from twisted.internet import reactor as _reactor  # noqa: TID251  two daemons are spoken to over real sockets
from twisted.trial.unittest import TestCase

from mediatord.protocol.encoding import dumps
from mediatord.wallet import decentrl_client
from mediatord.wallet.decentrl_client import (
    CommandRefused,
    ConcludedContract,
    DecentrlSocket,
    DecentrlWallet,
    HistoryEntry,
    PendingEvent,
    connect_decentrl_socket,
    discover_decentrl_mediator,
    read_reply,
)
from mediatord.wallet.didcomm_client import open_http
from tests.decentrl_contracts import make_contract
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon

reactor: Any = _reactor


class TwoMediatorsTestCase(TestCase):
    """Alice's mediator and Bob's, and wallets registered at one of them only."""

    first: ClassVar[Daemon]
    second: ClassVar[Daemon]

    @classmethod
    def setUpClass(cls) -> None:
        cls.first, cls.second = prepare_daemon(), prepare_daemon()
        for daemon in (cls.first, cls.second):
            daemon.__enter__()
            cls.addClassCleanup(daemon.__exit__, None, None, None)

    def setUp(self) -> None:
        self.http = open_http(reactor)

    async def register_wallet(self, alias: str, daemon: Daemon) -> DecentrlWallet:
        """A wallet with a new identity, registered at this mediator."""
        wallet = DecentrlWallet.generate(
            alias, await discover_decentrl_mediator(self.http, daemon.url), self.http, reactor
        )
        await wallet.register()
        return wallet

    async def register_alice_and_bob(self) -> tuple[DecentrlWallet, DecentrlWallet]:
        """Alice and Bob at their mediators."""
        return await self.register_wallet("alice", self.first), await self.register_wallet("bob", self.second)

    async def connect_alice_and_bob(self) -> tuple[DecentrlWallet, DecentrlWallet]:
        """Alice and Bob with a contract."""
        alice, bob = await self.register_alice_and_bob()
        await make_contract(alice, bob)
        return alice, bob

    async def open_socket(self, wallet: DecentrlWallet) -> DecentrlSocket:
        """A socket of a wallet at its mediator."""
        socket = await connect_decentrl_socket(reactor, wallet)
        self.addCleanup(socket.close)
        return socket

    async def next_push(self, socket: DecentrlSocket) -> dict[str, Any]:
        """The next pushed frame."""
        frame: dict[str, Any] = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        return frame

    async def send_to_both(
        self, sender: DecentrlWallet, recipient: DecentrlWallet, text: str, agreement: ConcludedContract | None = None
    ) -> None:
        """Deliver twice: to the recipient's mediator for the recipient, and to the sender's for the sender."""
        await sender.send(recipient.did, text, agreement)
        await sender.save_events(HistoryEntry(sender.did, recipient.did, text, ("chat",)))

    async def store_and_acknowledge(self, wallet: DecentrlWallet, *events: PendingEvent) -> list[str]:
        """Decrypt and verify events, store them and acknowledge them; return their texts."""
        decrypted = [wallet.open(event) for event in events]
        entries = [
            HistoryEntry(item.sender_did, wallet.did, item.text, ("chat",), item.timestamp) for item in decrypted
        ]
        await wallet.save_events(*entries)
        await wallet.acknowledge(events)
        return [item.text for item in decrypted]

    async def pending_events(self, wallet: DecentrlWallet) -> tuple[PendingEvent, ...]:
        """Pending events of a wallet."""
        return (await wallet.pending()).items

    async def read_history(self, wallet: DecentrlWallet) -> list[str]:
        """Decrypted events with the tag of the chat."""
        events = await wallet.events(tags=["chat"])
        return [wallet.identity.unseal(event.payload) for event in events.items]

    async def refusal_of(self, work: Any) -> tuple[int, str]:
        """Status and code of a request that must be refused."""
        with self.assertRaises(CommandRefused) as context:
            await work
        problem: CommandRefused = context.exception
        return problem.status, problem.code


class DualDeliveryTests(TwoMediatorsTestCase):
    """Exchanges of the two wallets."""

    async def test_contract_is_stored_at_both_mediators(self) -> None:
        """Both derive the same secret, both mediators store the contract, and sockets are notified."""
        alice, bob = await self.register_alice_and_bob()
        at_alices, at_bobs = await self.open_socket(alice), await self.open_socket(bob)
        concluded, accepted = await make_contract(alice, bob)
        self.assertEqual((concluded.root_secret, concluded.id), (accepted.root_secret, accepted.id))
        for wallet, peer in ((alice, bob), (bob, alice)):
            (kept,) = (await wallet.contracts(did=peer.did)).items
            self.assertEqual(kept.signed_communication_contract, accepted.signed)
        self.assertEqual((await bob.pending_requests()).total, 0)
        # Bob is notified of the request and of the saved contract, Alice of the response.
        for socket in (at_bobs, at_bobs, at_alices):
            self.assertEqual(await self.next_push(socket), {"type": "CONTRACTS_UPDATED"})

    async def test_event_for_offline_recipient_stays_pending(self) -> None:
        """At Bob's mediator; in the end both have it at their own mediators, encrypted for themselves."""
        alice, bob = await self.connect_alice_and_bob()
        await self.send_to_both(alice, bob, "Hello Bob, cross-mediator canary")
        (event,) = await self.pending_events(bob)
        self.assertEqual(event.sender_did, alice.did)
        self.assertEqual(await self.store_and_acknowledge(bob, event), ["Hello Bob, cross-mediator canary"])
        self.assertEqual(await self.pending_events(bob), ())
        self.assertEqual(await self.read_history(alice), ["Hello Bob, cross-mediator canary"])
        self.assertEqual(await self.read_history(bob), ["Hello Bob, cross-mediator canary"])
        for daemon in (self.first, self.second):
            files: dict[Path, bytes] = {}
            for path in daemon.directory.rglob("*"):
                # A segment of the log may be closed or compressed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        files[path] = path.read_bytes()
            self.assertTrue(any(path.suffix == ".sqlite3" for path in files))
            self.assertEqual([path for path, content in files.items() if b"cross-mediator canary" in content], [])

    async def test_both_have_the_conversation_in_order(self) -> None:
        """Replies take the reverse way."""
        alice, bob = await self.connect_alice_and_bob()
        for sender, recipient, text in ((alice, bob, "one"), (bob, alice, "two"), (alice, bob, "three")):
            await self.send_to_both(sender, recipient, text)
            await self.store_and_acknowledge(recipient, *await self.pending_events(recipient))
        self.assertEqual(await self.read_history(alice), ["one", "two", "three"])
        self.assertEqual(await self.read_history(bob), ["one", "two", "three"])

    async def test_both_contracts_are_valid_during_rotation(self) -> None:
        """Each event names its contract (7.7)."""
        alice, bob = await self.register_alice_and_bob()
        old, _ = await make_contract(alice, bob, lifetime=3600)
        await self.send_to_both(alice, bob, "before", old)
        new, _ = await make_contract(alice, bob, lifetime=7200)
        self.assertNotEqual(old.root_secret, new.root_secret)
        await self.send_to_both(alice, bob, "during", old)
        await self.send_to_both(alice, bob, "after")
        events = await self.pending_events(bob)
        self.assertEqual([bob.open(event).contract.id for event in events], [old.id, old.id, new.id])
        self.assertEqual(await self.store_and_acknowledge(bob, *events), ["before", "during", "after"])
        for wallet in (alice, bob):
            self.assertEqual((await wallet.contracts()).total, 2)


class RestartTests(TwoMediatorsTestCase):
    """What persists over restarts."""

    async def test_contracts_events_and_nonces_persist(self) -> None:
        """
        After an orderly stop of one mediator and SIGKILL of the other, contracts, pending events, history and public
        events persist, and repeated commands are refused (DCTRL-0004 12.2).
        """
        alice, bob = await self.connect_alice_and_bob()
        both = (alice, bob), (bob, alice)
        await self.send_to_both(alice, bob, "before")
        await bob.publish("public")
        sealed = [
            (
                peer,
                dumps(one.command("sealed", peer.did, decentrl_client.PRIVATE_CHANNEL)),
            )
            for one, peer in both
        ]
        for recipient, command in sealed:
            await self.post_command(recipient, command)
        socket = await self.open_socket(alice)
        self.first.stop()
        self.assertEqual(await socket.closed().addTimeout(PATIENCE_SECONDS, reactor), 1001)
        self.second.kill()
        for daemon in (self.first, self.second):
            daemon.start()
        for recipient, command in sealed:
            self.assertEqual(await self.refusal_of(self.post_command(recipient, command)), (401, "DUPLICATE_NONCE"))
        await self.send_to_both(alice, bob, "after")
        texts = [bob.open(event).text for event in await self.pending_events(bob) if event.payload != "sealed"]
        self.assertEqual(texts, ["before", "after"])
        self.assertEqual(await self.read_history(alice), ["before", "after"])
        self.assertEqual([one.event for one in (await alice.public(bob.did)).items], ["public"])
        self.assertEqual((await alice.contracts(did=bob.did)).total, 1)
        await self.open_socket(bob)

    async def post_command(self, recipient: DecentrlWallet, command: bytes) -> dict[str, Any]:
        """POST a command to the recipient's mediator."""
        return read_reply(await recipient.post(command))
