"""What the parts of the contract of Decentrl have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface.verify import verifyObject

from mediatord.errors import MediatorError, PayloadTooLarge
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    EventFilter,
    IDecentrlStore,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)
from tests.store.builders import ALICE, BOB, HOUR
from tests.store.contract.base import StoreContract

CAROL = "did:example:carol"
ALL = PageRequest(0, 1000)

# Texts that a backend may not touch: what JSON can escape, and what only looks alike.
ODD_TEXTS = ("", "\0", "a\0b", " a ", "é", "e\u0301", "\U0001f680", "%_'\"\\,", "A", "a")

# The first two have as many bytes together as a slice may have; all three have not as many characters.
LARGE_TEXTS = ("\u20ac" + "x" * (MAX_PAGE_BYTES // 2 - 3), "x" * (MAX_PAGE_BYTES // 2), "x")


def a_contract(
    id: str, owner: str | None = ALICE, peer: str = BOB, *, until: float, digest: bytes | None = None
) -> Contract:
    """A contract that differs from every other one unless `digest` is given."""
    return Contract(id, owner, peer, until, id.encode() if digest is None else digest, b"contract %s" % id.encode())


def a_request(id: str, sender: str = BOB, recipient: str = ALICE) -> ContractRequest:
    return ContractRequest(id, sender, recipient, f"request {id}", f"key {id}")


def an_event(
    id: str,
    *tags: str,
    at: float = 1.0,
    sender: str = BOB,
    recipient: str = ALICE,
    payload: str = "",
    contract_id: str | None = None,
) -> StoredEvent:
    return StoredEvent(id, sender, recipient, payload, tags, at, contract_id)


def a_public_event(id: str, *tags: str, at: float = 1.0, event: str = "", channel: str | None = None) -> PublicEvent:
    return PublicEvent(id, event, tags, at, f"signature of {id}", channel)


class DecentrlContract(StoreContract):
    """An open store in which ALICE and BOB are registered for an hour, and nothing else is kept."""

    decentrl: IDecentrlStore

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.decentrl = self.store.decentrl
        verifyObject(IDecentrlStore, self.decentrl)
        self.numbers = count()
        await self.enlist(ALICE, BOB)

    def guard(self, sender: str | None = None, recipient: str | None = None) -> CommandGuard:
        """A guard with a nonce that was not there before."""
        nonce = b"nonce %d" % next(self.numbers)
        return CommandGuard(nonce, self.clock.seconds() + 10 * HOUR, sender, recipient)

    async def enlist(self, *dids: str, ttl: float = HOUR) -> None:
        """Register DIDs."""
        for did in dids:
            registration = a_contract(
                f"registration {next(self.numbers)}", None, did, until=self.clock.seconds() + ttl
            )
            await self.decentrl.save_contract(self.guard(), registration)

    async def agree(self, *ids: str, owner: str = ALICE, peer: str = BOB, ttl: float = HOUR) -> None:
        """Keep contracts."""
        for id in ids:
            contract = a_contract(id, owner, peer, until=self.clock.seconds() + ttl)
            await self.decentrl.save_contract(self.guard(owner), contract)

    async def send(self, *ids: str, to: str = ALICE, sender: str = BOB, payload: str = "") -> None:
        """Deliver events, for which there has to be a contract."""
        for id in ids:
            event = PendingEvent(id, to, sender, payload, self.clock.seconds())
            await self.decentrl.enqueue_event(self.guard(recipient=to), event)

    async def request(self, *ids: str, sender: str = BOB, to: str = ALICE) -> None:
        for id in ids:
            await self.decentrl.request_contract(self.guard(recipient=to), a_request(id, sender, to))

    async def save(self, *events: StoredEvent, owner: str = ALICE) -> None:
        await self.decentrl.save_events(self.guard(owner), owner, events)

    async def tag(self, *tags: tuple[str, tuple[str, ...]], owner: str = ALICE) -> None:
        await self.decentrl.update_tags(self.guard(owner), owner, tags)

    async def publish(self, *events: PublicEvent, publisher: str = ALICE) -> None:
        for event in events:
            await self.decentrl.publish(self.guard(publisher), publisher, event)

    async def contracts(self, owner: str = ALICE, **wanted: Any) -> list[str]:
        """Ids of the contracts found, the total being as many."""
        found = await self.decentrl.contracts(owner, ContractFilter(**wanted), ALL)
        return self.ids(found.items, found.total)

    async def requests(self, recipient: str = ALICE) -> list[str]:
        found = await self.decentrl.contract_requests(recipient, ALL)
        return self.ids(found.items, found.total)

    async def pending(self, recipient: str = ALICE, sender: str | None = None) -> list[str]:
        found = await self.decentrl.pending_events(recipient, sender, ALL)
        return self.ids(found.items, found.total)

    async def events(self, *tags: str, owner: str = ALICE, **wanted: Any) -> list[str]:
        found = await self.decentrl.events(owner, EventFilter(tags, **wanted), ALL)
        return self.ids(found.items, found.total)

    async def public(self, *tags: str, publisher: str = ALICE, **wanted: Any) -> list[str]:
        found = await self.decentrl.public_events(publisher, PublicEventFilter(tags, **wanted), ALL)
        return self.ids(found.items, found.total)

    async def too_large(self, ask: Callable[[PageRequest], Deferred[Any]]) -> None:
        """Of three items with :data:`LARGE_TEXTS` a slice may have any two, but not all."""
        for part in (PageRequest(0, 2), PageRequest(1, 2), PageRequest(2, 9), PageRequest(9, 9)):
            found = await ask(part)
            self.assertEqual((len(found.items), found.total), (len(range(3)[part.offset :][: part.limit]), 3))
        for part in (ALL, PageRequest(0, 3)):
            with self.assertRaises(PayloadTooLarge):
                await ask(part)

    def ids(self, items: Iterable[Any], total: int) -> list[str]:
        ids = [item.id for item in items]
        self.assertEqual(len(ids), total)
        return ids

    async def refused(
        self,
        error: type[MediatorError],
        ask: Callable[[CommandGuard], Deferred[Any]],
        guard: CommandGuard | None = None,
    ) -> None:
        """What is asked for is refused like this, and its nonce stays claimed."""
        guard = guard or self.guard()
        with self.assertRaises(error) as caught:
            await ask(guard)
        self.assertIs(type(caught.exception), error)
        self.assertFalse(await self.store.claim_nonce(guard.nonce, guard.until))

    async def slices(self, ask: Callable[[PageRequest], Deferred[Any]], everything: list[str]) -> None:
        """Every slice is that of all that matches, and every total the same."""
        total = len(everything)
        spots = (0, 1, total - 1, total, total + 1, 1 << 62, 1 << 63, 1 << 64, 10**40)
        for offset in spots:
            for limit in (0, 1, 2, total, 1000):
                found = await ask(PageRequest(offset, limit))
                self.assertEqual([item.id for item in found.items], everything[offset : offset + limit])
                self.assertEqual(found.total, total)
                self.assertIsInstance(found.items, tuple)
