"""Base of tests of the Decentrl part of the MongoDB store on a real server."""

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
    One or several nodes on one database.

    :ivar decentrl: the store of the first node; its client is the first of `clients`.
    """

    caps = DecentrlQuotas()
    most_nonces = 100_000
    nodes = 1
    step = 8192

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        super().setUp()
        self.clock = ImmediateClock()
        self.numbers = count()
        self.clients: list[ReplicaSetClient] = []
        self.node_stores = [await self.open_node() for _ in range(self.nodes)]
        self.decentrl = self.node_stores[0]

    async def open_node(self) -> MongoDecentrlStore:
        """Open a store of another process on the same database."""
        server = self.make_client()
        store = MongoStore(server, self.clock, QueueLimits(), caps=self.caps)
        await store.open()
        self.addCleanup(store.close)
        self.clients.append(server)
        return MongoDecentrlStore(
            server, self.clock, self.caps, NonceCapacity(server, self.most_nonces), step=self.step
        )

    def make_guard(self, sender: str | None = None, recipient: str | None = None) -> CommandGuard:
        """Make a guard with a new nonce."""
        return CommandGuard(b"nonce %d" % next(self.numbers), NOON + HOUR, sender, recipient)

    async def register_dids(self, *dids: str) -> None:
        for did in dids:
            await self.decentrl.save_contract(self.make_guard(), self.make_contract(None, did))

    async def save_contract(self, owner: str = ALICE, peer: str = BOB) -> None:
        await self.decentrl.save_contract(self.make_guard(), self.make_contract(owner, peer))

    def make_contract(self, owner: str | None, peer: str, until: float = NOON + HOUR) -> Contract:
        """Make a contract that differs from all others."""
        id = f"contract {next(self.numbers)}"
        return Contract(id, owner, peer, until, id.encode(), b"{}")

    def make_pending_event(self, to: str = ALICE, sender: str = BOB, payload: str = "") -> PendingEvent:
        return PendingEvent(f"pending {next(self.numbers)}", to, sender, payload, self.clock.seconds())

    def make_stored_event(self, *tags: str, at: float = 1.0, sender: str = BOB, payload: str = "x") -> StoredEvent:
        return StoredEvent(f"event {next(self.numbers)}", sender, ALICE, payload, tags, at)

    def find_miscounted(self) -> list[str]:
        """Parties with wrong counters, and payloads without events."""
        miscounted = []
        for party in self.documents.parties.find():
            counted = _expected_counters(self.documents, party["_id"])
            actual = {name: party.get(name, False) for name in counted}
            if actual != counted:
                miscounted.append(f"{party['did']}: {actual} but {counted}")
        for events, payloads in (("stored_events", "stored_payloads"), ("public_events", "public_payloads")):
            ids = [sorted(self.documents[name].distinct("_id")) for name in (events, payloads)]
            if ids[0] != ids[1]:
                miscounted.append(f"{events} and {payloads} differ")
        return miscounted


def _expected_counters(documents: Database[dict[str, Any]], key: bytes) -> dict[str, int]:
    """The counters that a party should have."""
    query = {"party": key}
    pending = list(documents.pending_events.find(query))
    stored = list(documents.stored_events.find(query))
    public = list(documents.public_events.find(query))
    contracts = documents.contracts.count_documents(query)
    requests = documents.contract_requests.count_documents(query)
    return {
        "contracts": contracts,
        "requests": requests,
        "pending": len(pending),
        "pending_bytes": _sum_sizes(pending),
        "stored": len(stored),
        "published": len(public),
        "archive_bytes": _sum_sizes([*stored, *public]),
        "waited_for": bool(pending),
        "unused": not (contracts or requests or pending or stored or public),
    }


def _sum_sizes(found: Sequence[dict[str, Any]]) -> int:
    return sum(item["size"] + item.get("tags_size", 0) for item in found)
