"""Differential tests of the Decentrl part: every store gives the same results as the reference store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from twisted.internet import reactor  # noqa: TID251  txmongo connects by the global one
from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.failure import Failure
from twisted.python.monkey import MonkeyPatcher

from mediatord.store.interfaces.decentrl import (
    ContractFilter,
    DecentrlQuotas,
    EventFilter,
    IDecentrlStore,
    PageRequest,
    PublicEventFilter,
)
from mediatord.store.interfaces.messages import MessageLedger, QueueLimits
from mediatord.store.interfaces.store import IStore, ignore_observation
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.nonces import NonceCapacity
from mediatord.store.mongo.store import MongoStore
from tests.mongod import fresh_database, shared_replica_set
from tests.store.builders import HoldableRunner, ImmediateClock, make_sqlite_store, result_of
from tests.store.mongo.mongo_test_case import TIME_LIMIT, TIME_LIMIT_SETTINGS
from tests.store.random_decentrl_commands import (
    PARTY_DIDS,
    TAGS,
    RandomDecentrlCommands,
    Write,
    any_did,
    channels,
    party_dids,
    spans,
    tags,
    times,
)
from tests.store.reference_store import ReferenceStore

CAPS = DecentrlQuotas(
    requests=4,
    requests_of_one=2,
    contracts=5,
    contracts_with_one=2,
    pending=4,
    pending_bytes=30,
    stored=8,
    stored_bytes=40,
)
# More than are ever drawn: MongoDB notices a full or freed capacity a little late.
MAX_NONCES = 100_000
REACTOR: Any = reactor
ALL = PageRequest(0, 99)

bounds = st.none() | times
parts = st.builds(PageRequest, st.sampled_from([0, 1, 2, 7, 1 << 70]), st.sampled_from([99, 0, 1, 3, 1 << 70]))
event_filters = st.builds(EventFilter, tags, st.none() | any_did, bounds, bounds, st.booleans())
public_filters = st.builds(PublicEventFilter, tags, bounds, bounds, channels)

# Criteria of event queries, each by itself.
SINGLE_CRITERIA = (
    EventFilter(unprocessed_only=True),
    *(EventFilter((tag,)) for tag in TAGS),
    *(EventFilter(("x", ""), did) for did in PARTY_DIDS),
)


class DecentrlStoreComparison(RuleBasedStateMachine):
    """
    The reference store and another one, with the same operations.

    Two of three parties are registered, for a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = ImmediateClock()
        self.stores: list[Any] = [
            ReferenceStore(self.clock, QueueLimits(), caps=CAPS, max_nonces=MAX_NONCES),
            self.make_store(),
        ]
        self.commands = RandomDecentrlCommands(self.clock)
        self.assert_same(lambda store: store.open())
        for did in PARTY_DIDS[:2]:
            self.write_both(self.commands.make_registration(did, 30))
            self.write_both(self.commands.make_save(did, [self.commands.draw_event(did, tag) for tag in TAGS]))
            for peer in PARTY_DIDS:
                self.write_both(self.commands.make_contract(did, peer, 30, peer.encode()))

    def make_store(self) -> IStore:
        """The other store, closed."""
        raise NotImplementedError

    def get_result(self, deferred: Deferred[Any]) -> Any:
        """The result of a Deferred; for a refusal its class."""
        return result_of(deferred)

    def teardown(self) -> None:
        for did in PARTY_DIDS:
            self.read_all(did)
        self.assert_same(lambda store: store.close())

    def assert_same(self, operation: Callable[[IStore], Deferred[Any]]) -> Any:
        """Run an operation on both stores and compare."""
        reference, other = (self.get_result(operation(store)) for store in self.stores)
        assert reference == other, f"reference: {reference!r}\nother: {other!r}"
        return reference

    def read_both(self, operation: Callable[[IDecentrlStore], Deferred[Any]]) -> None:
        self.assert_same(lambda store: operation(store.decentrl))

    def write_both(self, write: Write) -> None:
        guard = self.commands.make_open_guard()
        self.read_both(lambda store: write(store, guard))

    @rule(data=st.data())
    def write_one(self, data: st.DataObject) -> None:
        """Run a command, and compare whether its nonce is claimed afterwards."""
        write, guard = self.commands.draw(data), self.commands.draw_guard(data)
        self.read_both(lambda store: write(store, guard))
        self.assert_same(lambda store: store.claim_nonce(guard.nonce, guard.until))

    @rule(data=st.data(), number=st.integers(1, 8))
    def write_several(self, data: st.DataObject, number: int) -> None:
        for _ in range(number):
            self.write_both(self.commands.draw(data))

    @rule(owner=party_dids, did=st.none() | any_did, before=st.none() | spans, after=st.none() | spans, part=parts)
    def list_contracts(
        self, owner: str, did: str | None, before: float | None, after: float | None, part: PageRequest
    ) -> None:
        now = self.clock.seconds()
        wanted = ContractFilter(did, None if before is None else now + before, None if after is None else now + after)
        self.read_both(lambda store: store.contracts(owner, wanted, part))
        self.read_both(lambda store: store.contracts(owner, wanted, ALL))

    @rule(did=party_dids, sender=st.none() | any_did, part=parts)
    def list_pending(self, did: str, sender: str | None, part: PageRequest) -> None:
        self.read_both(lambda store: store.contract_requests(did, part))
        self.read_both(lambda store: store.pending_events(did, sender, part))

    @rule(owner=party_dids, wanted=event_filters, part=parts)
    def list_events(self, owner: str, wanted: EventFilter, part: PageRequest) -> None:
        self.read_both(lambda store: store.events(owner, wanted, part))
        self.read_both(lambda store: store.events(owner, wanted, ALL))

    @rule(publisher=party_dids, wanted=public_filters, part=parts)
    def list_public_events(self, publisher: str, wanted: PublicEventFilter, part: PageRequest) -> None:
        self.read_both(lambda store: store.public_events(publisher, wanted, part))
        self.read_both(lambda store: store.public_events(publisher, wanted, ALL))

    @rule(did=party_dids)
    def read_all(self, did: str) -> None:
        """Read all data of an owner, its events by each criterion."""
        for wanted in SINGLE_CRITERIA:
            self.read_both(lambda store, wanted=wanted: store.events(did, wanted, ALL))  # type: ignore[misc]
        self.read_both(lambda store: store.public_events(did, PublicEventFilter(), ALL))
        self.read_both(lambda store: store.public_events(did, PublicEventFilter(channel_id=""), ALL))
        self.read_both(lambda store: store.contracts(did, ContractFilter(), ALL))
        self.read_both(lambda store: store.contract_requests(did, ALL))

    @rule(data=st.data(), release=st.booleans())
    def claim_nonces(self, data: st.DataObject, release: bool) -> None:
        guard = self.commands.draw_guard(data)
        self.assert_same(lambda store: store.claim_nonce(guard.nonce, guard.until))
        if release:
            self.assert_same(lambda store: store.release_nonce(guard.nonce))
        self.read_both(lambda store: store.check_guard(guard))

    @rule(span=spans.map(abs))
    def advance_time(self, span: float) -> None:
        self.clock.advance(span)
        self.assert_same(lambda store: store.prune_nonces())

    @rule()
    def reopen(self) -> None:
        """Close and reopen the other store, which keeps all data."""
        self.get_result(self.stores[1].close())
        self.get_result(self.stores[1].open())

    @invariant()
    def queue_sizes_agree(self) -> None:
        for did in PARTY_DIDS:
            self.read_both(lambda store, did=did: store.registered_until(did))  # type: ignore[misc]
            self.read_both(lambda store, did=did: store.pending_events(did, None, ALL))  # type: ignore[misc]
            self.read_both(lambda store, did=did: store.events(did, EventFilter(), ALL))  # type: ignore[misc]
        sizes = [self.get_result(store.queue_sizes(99)) for store in self.stores]
        ledgers = self.assert_same(lambda store: store.read_ledger())
        assert (ledgers.didcomm, ledgers.decentrl.difference) == (MessageLedger(), 0), ledgers
        assert dict(sizes[0][0]) == dict(sizes[1][0]) and sizes[0][1] == sizes[1][1], sizes


class SQLiteDecentrlComparison(DecentrlStoreComparison):
    """The reference store and the SQLite store, which batches commands."""

    def make_store(self) -> IStore:
        self.folder = mkdtemp(prefix="mediatord-store-")
        self.writer = HoldableRunner()
        return make_sqlite_store(
            self.clock, Path(self.folder) / "db", caps=CAPS, write=self.writer, max_nonces=MAX_NONCES
        )

    def teardown(self) -> None:
        super().teardown()
        rmtree(self.folder)

    @rule(data=st.data(), number=st.integers(2, 8))
    def write_concurrently(self, data: st.DataObject, number: int) -> None:
        """Many commands, some of which are refused or fail, reach SQLite in one batch."""
        deferred = [(self.commands.draw(data), self.commands.draw_guard(data)) for _ in range(number)]
        reference, sqlite = self.stores
        self.writer.hold()
        blocking = sqlite.ping()
        deferreds = [write(sqlite.decentrl, guard) for write, guard in deferred]
        self.writer.release()
        result_of(blocking)
        expected = [result_of(write(reference.decentrl, guard)) for write, guard in deferred]
        assert [result_of(one) for one in deferreds] == expected


class MongoDecentrlComparison(DecentrlStoreComparison):
    """The reference store and the MongoDB store on a real server, in which two events are a long list."""

    def make_store(self) -> IStore:
        self.patience = MonkeyPatcher(*[(module, name, TIME_LIMIT) for module, name in TIME_LIMIT_SETTINGS])
        self.patience.patch()
        self.fresh_database = fresh_database()
        address = parse_mongo_uri(shared_replica_set().uri(self.fresh_database.__enter__()))
        server = ReplicaSetClient(address, REACTOR, observe=ignore_observation, on_up=lambda up: None, connections=2)
        store = MongoStore(server, self.clock, QueueLimits(), caps=CAPS, max_nonces=MAX_NONCES)
        store.decentrl = MongoDecentrlStore(server, self.clock, CAPS, NonceCapacity(server, MAX_NONCES), step=1)
        return store

    def get_result(self, deferred: Deferred[Any]) -> Any:
        fired: list[Any] = []
        deferred.addBoth(fired.append)
        while not fired:
            due = REACTOR.timeout()
            REACTOR.iterate(0.05 if due is None else due)
        (result,) = fired
        return result_of(fail(result) if isinstance(result, Failure) else succeed(result))

    def teardown(self) -> None:
        super().teardown()
        self.fresh_database.__exit__(None, None, None)
        self.patience.restore()


TestSQLiteDecentrlStores = SQLiteDecentrlComparison.TestCase
TestSQLiteDecentrlStores.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestMongoDecentrlStores = pytest.mark.exhaustive(MongoDecentrlComparison.TestCase)
TestMongoDecentrlStores.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
