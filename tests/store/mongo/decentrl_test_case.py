"""Base of tests of Decentrl on a real MongoDB server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from pymongo.database import Database

from mediatord.store.interfaces.decentrl import CommandGuard, Contract, DecentrlQuotas, PendingEvent, StoredEvent
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.nonces import NonceCapacity
from mediatord.store.mongo.store import MongoStore
from tests.store.builders import ALICE, BOB, HOUR, NOON, ImmediateClock
from tests.store.mongo.mongo_test_case import MongoTestCase


class MongoDecentrlTestCase(MongoTestCase):
    """
    A node or several of them on one database.

    :ivar decentrl: that of the first node, and its server the first of `links`.
    """

    caps = DecentrlQuotas()
    most_nonces = 100_000
    nodes = 1
    step = 8192

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        super().setUp()
        self.clock = ImmediateClock()
        self.numbers = count()
        self.links: list[ReplicaSetClient] = []
        self.everywhere = [await self.a_node() for _ in range(self.nodes)]
        self.decentrl = self.everywhere[0]

    async def a_node(self) -> MongoDecentrlStore:
        """Open a store of another process on the same database."""
        server = self.a_server()
        store = MongoStore(server, self.clock, QueueLimits(), caps=self.caps)
        await store.open()
        self.addCleanup(store.close)
        self.links.append(server)
        return MongoDecentrlStore(
            server, self.clock, self.caps, NonceCapacity(server, self.most_nonces), step=self.step
        )

    def guard(self, sender: str | None = None, recipient: str | None = None) -> CommandGuard:
        """Make a guard with a new nonce."""
        return CommandGuard(b"nonce %d" % next(self.numbers), NOON + HOUR, sender, recipient)

    async def enlist(self, *dids: str) -> None:
        for did in dids:
            await self.decentrl.save_contract(self.guard(), self.a_contract(None, did))

    async def agree(self, owner: str = ALICE, peer: str = BOB) -> None:
        await self.decentrl.save_contract(self.guard(), self.a_contract(owner, peer))

    def a_contract(self, owner: str | None, peer: str, until: float = NOON + HOUR) -> Contract:
        """Make a contract that differs from all others."""
        id = f"contract {next(self.numbers)}"
        return Contract(id, owner, peer, until, id.encode(), b"{}")

    def an_event(self, to: str = ALICE, sender: str = BOB, payload: str = "") -> PendingEvent:
        return PendingEvent(f"pending {next(self.numbers)}", to, sender, payload, self.clock.seconds())

    def kept_event(self, *tags: str, at: float = 1.0, sender: str = BOB, payload: str = "x") -> StoredEvent:
        return StoredEvent(f"event {next(self.numbers)}", sender, ALICE, payload, tags, at)

    def miscounted(self) -> list[str]:
        """Parties with wrong counters, and payloads without events."""
        wrong = []
        for party in self.documents.parties.find():
            counted = _counted(self.documents, party["_id"])
            said = {name: party.get(name, False) for name in counted}
            if said != counted:
                wrong.append(f"{party['did']}: {said} but {counted}")
        for events, payloads in (("stored_events", "stored_payloads"), ("public_events", "public_payloads")):
            ids = [sorted(self.documents[name].distinct("_id")) for name in (events, payloads)]
            if ids[0] != ids[1]:
                wrong.append(f"{events} and {payloads} differ")
        return wrong


def _counted(documents: Database[dict[str, Any]], key: bytes) -> dict[str, int]:
    """The counters that a party should have."""
    mine = {"party": key}
    pending = list(documents.pending_events.find(mine))
    stored = list(documents.stored_events.find(mine))
    public = list(documents.public_events.find(mine))
    contracts = documents.contracts.count_documents(mine)
    requests = documents.contract_requests.count_documents(mine)
    return {
        "contracts": contracts,
        "requests": requests,
        "pending": len(pending),
        "pending_bytes": _sizes(pending),
        "stored": len(stored),
        "published": len(public),
        "archive_bytes": _sizes([*stored, *public]),
        "waited_for": bool(pending),
        "unused": not (contracts or requests or pending or stored or public),
    }


def _sizes(found: Sequence[dict[str, Any]]) -> int:
    return sum(one["size"] + one.get("tags_size", 0) for one in found)
