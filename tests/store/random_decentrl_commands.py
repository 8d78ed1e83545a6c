"""Random Decentrl commands, as writes to a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractRequest,
    IDecentrlStore,
    PendingEvent,
    PublicEvent,
    StoredEvent,
)

Write = Callable[[IDecentrlStore, CommandGuard], Deferred[Any]]

PARTY_DIDS = ("did:a", "did:ab", "did:c")
TAGS = ("", "x", "X", "\u20ac", "tag")

party_dids = st.sampled_from(PARTY_DIDS)
any_did = st.sampled_from([*PARTY_DIDS, "did:stranger"])
spans = st.sampled_from([1.0, 5.0, 20.0, 50.0, 0.0, -1.0])
texts = st.sampled_from(["x", "", "\0", "\u20ac", "12345", "y" * 20, "z" * 31])
tags = st.lists(st.sampled_from(TAGS), max_size=3).map(tuple)
times = st.sampled_from([2.0, 1.0, 0.0, -1.5, 2.5])
channels = st.sampled_from([None, "", "blog"])
digests = st.sampled_from([b"1", b"2", b"3", b"4", b"5", b"6"])


class RandomDecentrlCommands:
    """Draws commands whose ids are new, or were used for others of their kind."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._numbers = count()
        self._known: defaultdict[str, list[str]] = defaultdict(lambda: ["unknown"])
        self._kinds: tuple[Callable[[st.DataObject], Write], ...] = (
            self.draw_delivery,
            self.draw_save,
            self.draw_tagging,
            self.draw_publication,
            self.draw_acknowledgement,
            self.draw_contract,
            self.draw_request,
            self.draw_unpublication,
            self.draw_registration,
            self.draw_request_acknowledgement,
        )

    def draw(self, data: st.DataObject) -> Write:
        """A command of any kind."""
        kind: Callable[[st.DataObject], Write] = data.draw(st.sampled_from(self._kinds))
        return kind(data)

    def draw_guard(self, data: st.DataObject) -> CommandGuard:
        """A guard, mostly one that admits the command."""
        until = self._clock.seconds() + data.draw(spans)
        if data.draw(st.integers(0, 4)) < 4:
            return self.make_open_guard(until)
        return CommandGuard(data.draw(digests), until, data.draw(st.none() | any_did), data.draw(st.none() | any_did))

    def make_open_guard(self, until: float = 9e9) -> CommandGuard:
        """A guard that admits any command."""
        return CommandGuard(self._draw_id("nonce").encode(), until)

    def draw_registration(self, data: st.DataObject) -> Write:
        return self.make_registration(data.draw(party_dids), data.draw(spans))

    def make_registration(self, did: str, ttl: float) -> Write:
        """Register a DID."""
        id = self._draw_id("contract")
        registration = Contract(id, None, did, self._clock.seconds() + ttl, id.encode(), b"")
        return lambda store, guard: store.save_contract(guard, registration)

    def draw_contract(self, data: st.DataObject) -> Write:
        return self.make_contract(data.draw(party_dids), data.draw(any_did), data.draw(spans), data.draw(digests))

    def make_contract(self, owner: str, peer: str, ttl: float, digest: bytes) -> Write:
        """Save a contract."""
        contract = Contract(self._draw_id("contract"), owner, peer, self._clock.seconds() + ttl, digest, b"{}")
        return lambda store, guard: store.save_contract(guard, contract)

    def draw_request(self, data: st.DataObject) -> Write:
        did = data.draw(party_dids)
        request = ContractRequest(self._draw_id(f"request {did}", data), data.draw(any_did), did, "request", "key")
        return lambda store, guard: store.request_contract(guard, request)

    def draw_request_acknowledgement(self, data: st.DataObject) -> Write:
        did = data.draw(party_dids)
        ids = self._draw_used_ids(f"request {did}", data)
        return lambda store, guard: store.acknowledge_requests(guard, did, ids)

    def draw_delivery(self, data: st.DataObject) -> Write:
        did, sender, received_at = data.draw(party_dids), data.draw(any_did), self._clock.seconds()
        event = PendingEvent(self._draw_id(f"pending {did}", data), did, sender, data.draw(texts), received_at)
        return lambda store, guard: store.enqueue_event(guard, event)

    def draw_acknowledgement(self, data: st.DataObject) -> Write:
        did = data.draw(party_dids)
        ids = self._draw_used_ids(f"pending {did}", data)
        return lambda store, guard: store.acknowledge_events(guard, did, ids)

    def draw_save(self, data: st.DataObject) -> Write:
        owner = data.draw(party_dids)
        return self.make_save(owner, [self._draw_event(owner, data) for _ in range(data.draw(st.integers(0, 3)))])

    def make_save(self, owner: str, events: list[StoredEvent]) -> Write:
        """Save events."""
        return lambda store, guard: store.save_events(guard, owner, events)

    def draw_event(self, owner: str, tag: str) -> StoredEvent:
        """An event with a random participant."""
        return StoredEvent(self._draw_id(owner), PARTY_DIDS[0], owner, "x", (tag,), 1.0)

    def draw_tagging(self, data: st.DataObject) -> Write:
        owner = data.draw(party_dids)
        updates = [(id, data.draw(tags)) for id in self._draw_used_ids(owner, data)]
        return lambda store, guard: store.update_tags(guard, owner, updates)

    def draw_publication(self, data: st.DataObject) -> Write:
        publisher = data.draw(party_dids)
        id = self._draw_id(f"public {publisher}", data)
        event = PublicEvent(id, data.draw(texts), data.draw(tags), data.draw(times), "signature", data.draw(channels))
        return lambda store, guard: store.publish(guard, publisher, event)

    def draw_unpublication(self, data: st.DataObject) -> Write:
        publisher = data.draw(party_dids)
        id = self._draw_used_ids(f"public {publisher}", data)[0]
        return lambda store, guard: store.unpublish(guard, publisher, id)

    def _draw_event(self, owner: str, data: st.DataObject) -> StoredEvent:
        party_dids = data.draw(any_did), data.draw(any_did)
        id, payload, own_tags, at = self._draw_id(owner, data), data.draw(texts), data.draw(tags), data.draw(times)
        return StoredEvent(id, *party_dids, payload, own_tags, at, data.draw(st.none() | texts))

    def _draw_id(self, kind: str, data: st.DataObject | None = None) -> str:
        """A new id; if `data` may decide, one that was used before now and then."""
        if data is not None and data.draw(st.integers(0, 11)) == 11:
            return data.draw(st.sampled_from(self._known[kind][-4:]))
        id = f"{kind} {next(self._numbers)}"
        self._known[kind].append(id)
        return id

    def _draw_used_ids(self, kind: str, data: st.DataObject) -> list[str]:
        """Ids used before; their items may be gone, or belong to others."""
        candidates = [*reversed(self._known[kind][-6:]), *self._known[kind.replace(*PARTY_DIDS[:2])][-1:]]
        return data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=5))
