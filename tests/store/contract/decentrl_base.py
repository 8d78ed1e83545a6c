"""Base of the Decentrl contract."""

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

# Texts that a backend must store unchanged: characters that JSON can escape, and look-alikes.
ODD_TEXTS = ("", "\0", "a\0b", " a ", "é", "e\u0301", "\U0001f680", "%_'\"\\,", "A", "a")

# The first two together have as many bytes as a page may have; all three have fewer characters than that.
LARGE_TEXTS = ("\u20ac" + "x" * (MAX_PAGE_BYTES // 2 - 3), "x" * (MAX_PAGE_BYTES // 2), "x")


def make_contract(
    id: str, owner: str | None = ALICE, peer: str = BOB, *, until: float, digest: bytes | None = None
) -> Contract:
    """A contract that differs from every other one unless `digest` is given."""
    return Contract(id, owner, peer, until, id.encode() if digest is None else digest, b"contract %s" % id.encode())


def make_request(id: str, sender: str = BOB, recipient: str = ALICE) -> ContractRequest:
    return ContractRequest(id, sender, recipient, f"request {id}", f"key {id}")


def make_event(
    id: str,
    *tags: str,
    at: float = 1.0,
    sender: str = BOB,
    recipient: str = ALICE,
    payload: str = "",
    contract_id: str | None = None,
) -> StoredEvent:
    return StoredEvent(id, sender, recipient, payload, tags, at, contract_id)


def make_public_event(
    id: str, *tags: str, at: float = 1.0, event: str = "", channel: str | None = None
) -> PublicEvent:
    return PublicEvent(id, event, tags, at, f"signature of {id}", channel)


class DecentrlContract(StoreContract):
    """An open store in which ALICE and BOB are registered for an hour; nothing else is stored."""

    decentrl: IDecentrlStore

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.decentrl = self.store.decentrl
        verifyObject(IDecentrlStore, self.decentrl)
        self.numbers = count()
        await self.register_dids(ALICE, BOB)

    def make_guard(self, sender: str | None = None, recipient: str | None = None) -> CommandGuard:
        """A guard with an unused nonce."""
        nonce = b"nonce %d" % next(self.numbers)
        return CommandGuard(nonce, self.clock.seconds() + 10 * HOUR, sender, recipient)

    async def register_dids(self, *dids: str, ttl: float = HOUR) -> None:
        """Register DIDs with the mediator."""
        for did in dids:
            registration = make_contract(
                f"registration {next(self.numbers)}", None, did, until=self.clock.seconds() + ttl
            )
            await self.decentrl.save_contract(self.make_guard(), registration)

    async def save_contracts(self, *ids: str, owner: str = ALICE, peer: str = BOB, ttl: float = HOUR) -> None:
        """Save contracts."""
        for id in ids:
            contract = make_contract(id, owner, peer, until=self.clock.seconds() + ttl)
            await self.decentrl.save_contract(self.make_guard(owner), contract)

    async def deliver_events(self, *ids: str, to: str = ALICE, sender: str = BOB, payload: str = "") -> None:
        """Deliver events; the recipient needs a contract with the sender."""
        for id in ids:
            event = PendingEvent(id, to, sender, payload, self.clock.seconds())
            await self.decentrl.enqueue_event(self.make_guard(recipient=to), event)

    async def add_requests(self, *ids: str, sender: str = BOB, to: str = ALICE) -> None:
        for id in ids:
            await self.decentrl.request_contract(self.make_guard(recipient=to), make_request(id, sender, to))

    async def save_events(self, *events: StoredEvent, owner: str = ALICE) -> None:
        await self.decentrl.save_events(self.make_guard(owner), owner, events)

    async def update_tags(self, *tags: tuple[str, tuple[str, ...]], owner: str = ALICE) -> None:
        await self.decentrl.update_tags(self.make_guard(owner), owner, tags)

    async def publish_events(self, *events: PublicEvent, publisher: str = ALICE) -> None:
        for event in events:
            await self.decentrl.publish(self.make_guard(publisher), publisher, event)

    async def list_contracts(self, owner: str = ALICE, **wanted: Any) -> list[str]:
        """Ids of the contracts found, which are as many as the total."""
        found = await self.decentrl.contracts(owner, ContractFilter(**wanted), ALL)
        return self.check_total(found.items, found.total)

    async def list_requests(self, recipient: str = ALICE) -> list[str]:
        found = await self.decentrl.contract_requests(recipient, ALL)
        return self.check_total(found.items, found.total)

    async def list_pending(self, recipient: str = ALICE, sender: str | None = None) -> list[str]:
        found = await self.decentrl.pending_events(recipient, sender, ALL)
        return self.check_total(found.items, found.total)

    async def list_events(self, *tags: str, owner: str = ALICE, **wanted: Any) -> list[str]:
        found = await self.decentrl.events(owner, EventFilter(tags, **wanted), ALL)
        return self.check_total(found.items, found.total)

    async def list_public(self, *tags: str, publisher: str = ALICE, **wanted: Any) -> list[str]:
        found = await self.decentrl.public_events(publisher, PublicEventFilter(tags, **wanted), ALL)
        return self.check_total(found.items, found.total)

    async def assert_page_is_limited(self, operation: Callable[[PageRequest], Deferred[Any]]) -> None:
        """Of three items with :data:`LARGE_TEXTS` a page may have any two, but not all."""
        for part in (PageRequest(0, 2), PageRequest(1, 2), PageRequest(2, 9), PageRequest(9, 9)):
            found = await operation(part)
            self.assertEqual((len(found.items), found.total), (len(range(3)[part.offset :][: part.limit]), 3))
        for part in (ALL, PageRequest(0, 3)):
            with self.assertRaises(PayloadTooLarge):
                await operation(part)

    def check_total(self, items: Iterable[Any], total: int) -> list[str]:
        ids = [item.id for item in items]
        self.assertEqual(len(ids), total)
        return ids

    async def assert_refused(
        self,
        error: type[MediatorError],
        operation: Callable[[CommandGuard], Deferred[Any]],
        guard: CommandGuard | None = None,
    ) -> None:
        """The operation is refused with this error, and its nonce stays claimed."""
        guard = guard or self.make_guard()
        with self.assertRaises(error) as caught:
            await operation(guard)
        self.assertIs(type(caught.exception), error)
        self.assertFalse(await self.store.claim_nonce(guard.nonce, guard.until))

    async def assert_pages(self, operation: Callable[[PageRequest], Deferred[Any]], everything: list[str]) -> None:
        """Every page is a slice of all that matches, and every total is the same."""
        total = len(everything)
        spots = (0, 1, total - 1, total, total + 1, 1 << 62, 1 << 63, 1 << 64, 10**40)
        for offset in spots:
            for limit in (0, 1, 2, total, 1000):
                found = await operation(PageRequest(offset, limit))
                self.assertEqual([item.id for item in found.items], everything[offset : offset + limit])
                self.assertEqual(found.total, total)
                self.assertIsInstance(found.items, tuple)
