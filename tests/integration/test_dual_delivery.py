"""
Alice and Bob write to each other through two Decentrl mediators, each a process of its own, that never talk to each
other (Message Routing, reference 7.5).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
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
    read_pushed_events,
    read_reply,
)
from mediatord.wallet.didcomm_client import open_http
from tests.decentrl_contracts import make_contract
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon

reactor: Any = _reactor
# A demonstration starts one more mediator.
DEMO_SECONDS = 300.0


class TwoMediatorsTestCase(TestCase):
    """With Alice's mediator and Bob's, and wallets that are registered at one of them only."""

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

    async def registered(self, alias: str, daemon: Daemon) -> DecentrlWallet:
        """A wallet with a new identity that knows no mediator but this one."""
        wallet = DecentrlWallet.generate(
            alias, await discover_decentrl_mediator(self.http, daemon.url), self.http, reactor
        )
        await wallet.register()
        return wallet

    async def two(self) -> tuple[DecentrlWallet, DecentrlWallet]:
        """Alice and Bob."""
        return await self.registered("alice", self.first), await self.registered("bob", self.second)

    async def befriended(self) -> tuple[DecentrlWallet, DecentrlWallet]:
        """Alice and Bob, who have a contract."""
        alice, bob = await self.two()
        await make_contract(alice, bob)
        return alice, bob

    async def online(self, wallet: DecentrlWallet) -> DecentrlSocket:
        """A socket of it at its mediator."""
        socket = await connect_decentrl_socket(reactor, wallet)
        self.addCleanup(socket.close)
        return socket

    async def push(self, socket: DecentrlSocket) -> dict[str, Any]:
        """The next frame that comes unasked."""
        frame: dict[str, Any] = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        return frame

    async def write(
        self, sender: DecentrlWallet, recipient: DecentrlWallet, text: str, agreement: ConcludedContract | None = None
    ) -> None:
        """Deliver twice: to the other's mediator for the other, and to one's own for oneself."""
        await sender.send(recipient.did, text, agreement)
        await sender.save_events(HistoryEntry(sender.did, recipient.did, text, ("chat",)))

    async def keep(self, wallet: DecentrlWallet, *events: PendingEvent) -> list[str]:
        """Decrypt events and check who wrote them, store them and acknowledge them; what they say."""
        opened = [wallet.open(event) for event in events]
        entries = [HistoryEntry(one.sender_did, wallet.did, one.text, ("chat",), one.timestamp) for one in opened]
        await wallet.save_events(*entries)
        await wallet.acknowledge(events)
        return [one.text for one in opened]

    async def waiting(self, wallet: DecentrlWallet) -> tuple[PendingEvent, ...]:
        """The events that wait for it."""
        return (await wallet.pending()).items

    async def history(self, wallet: DecentrlWallet) -> list[str]:
        """All that it finds under the tag of the chat, decrypted."""
        found = await wallet.events(tags=["chat"])
        return [wallet.identity.unseal(one.payload) for one in found.items]

    async def refusal(self, work: Any) -> tuple[int, str]:
        """Status and code of what has to be refused."""
        with self.assertRaises(CommandRefused) as caught:
            await work
        refused: CommandRefused = caught.exception
        return refused.status, refused.code


class DualDeliveryTests(TwoMediatorsTestCase):
    """What the two can do, and the mediators cannot."""

    async def test_contract(self) -> None:
        """Both come to the same secret, their mediators keep the contract for them, and their sockets are told."""
        alice, bob = await self.two()
        at_alices, at_bobs = await self.online(alice), await self.online(bob)
        concluded, accepted = await make_contract(alice, bob)
        self.assertEqual((concluded.root_secret, concluded.id), (accepted.root_secret, accepted.id))
        for wallet, peer in ((alice, bob), (bob, alice)):
            (kept,) = (await wallet.contracts(did=peer.did)).items
            self.assertEqual(kept.signed_communication_contract, accepted.signed)
        self.assertEqual((await bob.pending_requests()).total, 0)
        # To Bob: there is a request, and the contract is saved. To Alice: there is an answer.
        for socket in (at_bobs, at_bobs, at_alices):
            self.assertEqual(await self.push(socket), {"type": "CONTRACTS_UPDATED"})

    async def test_message_to_somebody_offline(self) -> None:
        """It waits at Bob's mediator, and in the end both have it, encrypted for themselves, at their own."""
        alice, bob = await self.befriended()
        await self.write(alice, bob, "Hello Bob, cross-mediator canary")
        (event,) = await self.waiting(bob)
        self.assertEqual(event.sender_did, alice.did)
        self.assertEqual(await self.keep(bob, event), ["Hello Bob, cross-mediator canary"])
        self.assertEqual(await self.waiting(bob), ())
        self.assertEqual(await self.history(alice), ["Hello Bob, cross-mediator canary"])
        self.assertEqual(await self.history(bob), ["Hello Bob, cross-mediator canary"])
        for daemon in (self.first, self.second):
            files: dict[Path, bytes] = {}
            for path in daemon.directory.rglob("*"):
                # A segment of the log may be closed or packed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        files[path] = path.read_bytes()
            self.assertTrue(any(path.suffix == ".sqlite3" for path in files))
            self.assertEqual([path for path, content in files.items() if b"cross-mediator canary" in content], [])

    async def test_message_to_somebody_online(self) -> None:
        """It is pushed to every socket of Bob's, and waits all the same until acknowledged (DCTRL-0004 10.5)."""
        alice, bob = await self.befriended()
        sockets = [await self.online(bob) for _ in range(2)]
        await self.write(alice, bob, "Hello Bob")
        (event,), again = [read_pushed_events(await self.push(socket)) for socket in sockets]
        self.assertEqual(again, (event,))
        self.assertEqual(await self.waiting(bob), (event,))
        self.assertEqual(await self.keep(bob, event), ["Hello Bob"])
        self.assertEqual(await self.waiting(bob), ())

    async def test_conversation(self) -> None:
        """The answer goes the other way round, and both have all of it in the order in which it was said."""
        alice, bob = await self.befriended()
        for sender, recipient, text in ((alice, bob, "one"), (bob, alice, "two"), (alice, bob, "three")):
            await self.write(sender, recipient, text)
            await self.keep(recipient, *await self.waiting(recipient))
        self.assertEqual(await self.history(alice), ["one", "two", "three"])
        self.assertEqual(await self.history(bob), ["one", "two", "three"])

    async def test_sender_needs_no_registration(self) -> None:
        """Alice may send through Bob's mediator, and nothing else there is hers to ask (reference 6.3)."""
        alice, bob = await self.befriended()
        query = {"type": "QUERY_PENDING_EVENTS", "filter": {}}
        asked = alice.ask(query, bob.mediator.did, at=bob.mediator)
        self.assertEqual(await self.refusal(asked), (401, "UNAUTHORIZED_COMMAND"))
        await alice.send(bob.did, "Hello Bob")
        self.assertEqual(len(await self.waiting(bob)), 1)

    async def test_recipient_is_at_its_own_mediator_only(self) -> None:
        """Nothing is forwarded: an event for Bob that comes to Alice's mediator is refused (reference 15.1)."""
        alice, bob = await self.befriended()
        sent = alice.ask("sealed", bob.did, decentrl_client.PRIVATE_CHANNEL)
        self.assertEqual(await self.refusal(sent), (404, "RECIPIENT_NOT_REGISTERED"))

    async def test_contract_of_the_sender_does_not_count(self) -> None:
        """Only what the recipient has saved lets anybody write to it, at one mediator as at two (reference 6.3)."""
        alice, bob = await self.two()
        carol = await self.registered("carol", self.first)
        for peer in (bob, carol):
            await alice.request_contract(peer.did)
            (request,) = (await peer.pending_requests()).items
            accepted = peer.accept(request)
            await peer.respond(accepted)
            self.assertEqual(len(await alice.conclude()), 1)
            self.assertEqual(
                await self.refusal(alice.send(peer.did, "Hello")), (404, "COMMUNICATION_CONTRACT_NOT_FOUND")
            )
            await peer.save_contract(accepted)
            await alice.send(peer.did, "Hello")
            self.assertEqual(await self.keep(peer, *await self.waiting(peer)), ["Hello"])

    async def test_rotation(self) -> None:
        """While a new contract replaces an old one both are good, and each event says which it is under (7.7)."""
        alice, bob = await self.two()
        old, _ = await make_contract(alice, bob, lifetime=3600)
        await self.write(alice, bob, "before", old)
        new, _ = await make_contract(alice, bob, lifetime=7200)
        self.assertNotEqual(old.root_secret, new.root_secret)
        await self.write(alice, bob, "during", old)
        await self.write(alice, bob, "after")
        events = await self.waiting(bob)
        self.assertEqual([bob.open(event).contract.id for event in events], [old.id, old.id, new.id])
        self.assertEqual(await self.keep(bob, *events), ["before", "during", "after"])
        for wallet in (alice, bob):
            self.assertEqual((await wallet.contracts()).total, 2)

    async def test_public_channel(self) -> None:
        """What Bob publishes at his mediator Alice reads there, signed, until he deletes it (DCTRL-0007)."""
        alice, bob = await self.two()
        first, second = await bob.publish('{"n":1}', ["blog", "é"]), await bob.publish('{"n":2}', ["news"], "channel")
        self.assertEqual({one.id for one in (await alice.public(bob.did)).items}, {first, second})
        (tagged,) = (await alice.public(bob.did, tags=["é"])).items
        self.assertEqual((tagged.id, tagged.event, tagged.channel_id), (first, '{"n":1}', None))
        self.assertEqual(await self.refusal(alice.unpublish(first)), (404, "PUBLIC_EVENT_NOT_FOUND"))
        await bob.unpublish(first)
        self.assertEqual([one.id for one in (await alice.public(bob.did)).items], [second])

    def test_demonstration(self) -> None:
        """`mediatord demo` has Bob's mediator started, shows every step, and says that all went well (contract 1)."""
        shown = subprocess.run(
            [sys.executable, "-m", "mediatord", "demo", "--url", self.first.url],
            capture_output=True,
            text=True,
            timeout=DEMO_SECONDS,
            check=False,
        )
        self.assertEqual((shown.returncode, shown.stderr), (0, ""), shown.stdout)
        self.assertTrue(shown.stdout.endswith("\nAll steps succeeded.\n"))


class RestartTests(TwoMediatorsTestCase):
    """What outlives the mediators' processes."""

    async def test_nothing_is_lost(self) -> None:
        """
        After an orderly stop of one and the death of the other, contracts, what waits, history and public events are
        there, and a command that was carried out before is not carried out again (DCTRL-0004 12.2).
        """
        alice, bob = await self.befriended()
        both = (alice, bob), (bob, alice)
        await self.write(alice, bob, "before")
        await bob.publish("public")
        sealed = [
            (
                peer,
                dumps(one.command("sealed", peer.did, decentrl_client.PRIVATE_CHANNEL)),
            )
            for one, peer in both
        ]
        for recipient, command in sealed:
            await self.carry(recipient, command)
        socket = await self.online(alice)
        self.first.stop()
        self.assertEqual(await socket.closed().addTimeout(PATIENCE_SECONDS, reactor), 1001)
        self.second.kill()
        for daemon in (self.first, self.second):
            daemon.start()
        for recipient, command in sealed:
            self.assertEqual(await self.refusal(self.carry(recipient, command)), (401, "DUPLICATE_NONCE"))
        await self.write(alice, bob, "after")
        texts = [bob.open(event).text for event in await self.waiting(bob) if event.payload != "sealed"]
        self.assertEqual(texts, ["before", "after"])
        self.assertEqual(await self.history(alice), ["before", "after"])
        self.assertEqual([one.event for one in (await alice.public(bob.did)).items], ["public"])
        self.assertEqual((await alice.contracts(did=bob.did)).total, 1)
        await self.online(bob)

    async def carry(self, recipient: DecentrlWallet, command: bytes) -> dict[str, Any]:
        """Bring a command to somebody's mediator, as often as one likes."""
        return read_reply(await recipient.post(command))
