"""Differential tests: every store gives the same results as the reference store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from twisted.internet import reactor  # noqa: TID251  txmongo connects by the global one
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.internet.threads import blockingCallFromThread, deferToThread
from twisted.trial.unittest import TestCase

from mediatord.errors import MediatorError
from mediatord.store.fair_share import PROBATION_SECONDS
from mediatord.store.interfaces.messages import ArrivalWindow, EnqueueRequest, MessageLedger, Payload, QueueLimits
from mediatord.store.interfaces.store import IStore, RecipientUpdateAction, ignore_observation
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.store import MongoStore
from mediatord.store.sqlite.connection import connect
from tests.mongod import fresh_database, shared_replica_set
from tests.store.builders import HoldableRunner, ImmediateClock, make_sqlite_store, result_of
from tests.store.mongo.mongo_test_case import TIME_LIMIT, TIME_LIMIT_SETTINGS
from tests.store.reference_store import ReferenceStore

POLICIES = (
    QueueLimits(4, 40),
    QueueLimits(4, 40, share=0.5),
    QueueLimits(7, 60, share=0.34),
    QueueLimits(4, 40, when_full="refuse"),
    QueueLimits(6, 60, when_full="refuse", share=0.5),
    QueueLimits(8, 80, share=0.5, reserved=0.25),
    QueueLimits(6, 60, reserved=0.34),
    QueueLimits(6, 60, when_full="refuse", share=0.67, reserved=0.34),
)
NONCES = 3

accounts = st.sampled_from(["did:a", "did:ab", "did:c", "did:d"])
recipients = st.sampled_from(["did:1", "did:12", "did:3", "did:a"])
scopes = st.none() | recipients
bodies = st.sampled_from([b"", b"x", b"same", b"0123456789", b"y" * 25, b"z" * 41])
spans = st.sampled_from([0.0, 1.0, 5.0, 20.0])
keys = st.sampled_from([b"k1", b"k2", b"k3", b"k4", b"k5"])
# Origins of two networks and two senders with the same numbers, of one half only, unknown, and the highest.
origins = st.sampled_from([1 << 32 | 1, 1 << 32 | 2, 2 << 32 | 1, 2 << 32 | 2, 1 << 32, 2, 0, (1 << 63) - 1])


class StoreComparison(RuleBasedStateMachine):
    """The reference store and another one, with the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ImmediateClock()
        self.stores: list[Any] = []
        self.numbers = count()
        self.ids: list[str] = []

    @initialize(limits=st.sampled_from(POLICIES))
    def open_stores(self, limits: QueueLimits) -> None:
        self.stores = [ReferenceStore(self.clock, limits, max_nonces=NONCES), self.make_store(limits)]
        self.assert_same(lambda store: store.open())
        self.assert_same(lambda store: store.grant("did:a"))
        self.assert_same(lambda store: store.grant("did:ab"))
        self.assert_same(
            lambda store: store.update_recipients("did:a", [("did:1", "add"), ("did:12", "add")], max_recipients=3)
        )

    def make_store(self, limits: QueueLimits) -> IStore:
        """The other store, closed and empty."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.assert_same(lambda store: store.close())

    def run_both(self, operation: Callable[[IStore], Deferred[Any]]) -> tuple[Any, Any]:
        """Results of both stores; for a refusal its class."""
        reference, other = self.stores
        return result_of(operation(reference)), self.get_result(lambda: operation(other))

    def get_result(self, operation: Callable[[], Deferred[Any]]) -> Any:
        return result_of(operation())

    def assert_same(self, operation: Callable[[IStore], Deferred[Any]]) -> Any:
        """Run an operation on both stores and compare."""
        reference, other = self.run_both(operation)
        assert reference == other, f"reference: {reference!r}\nother: {other!r}"
        return reference

    def draw_ids(self, data: st.DataObject) -> list[str]:
        digests = [sha256(body).hexdigest() for body in (b"x", b"same", b"")]
        return data.draw(st.lists(st.sampled_from([*self.ids[-12:], *digests, "unknown"]), max_size=4))

    def make_payloads(self, contents: Iterable[bytes]) -> list[Payload]:
        """Payloads with new ids."""
        payloads = [Payload(f"m{next(self.numbers)}", body, "json") for body in contents]
        self.ids += [payload.id for payload in payloads]
        return payloads

    @invariant()
    def ledgers_agree(self) -> None:
        """Both ledgers are equal and balanced after every step."""
        ledgers = self.assert_same(lambda store: store.read_ledger())
        assert (ledgers.didcomm.difference, ledgers.decentrl) == (0, MessageLedger()), ledgers

    @rule(did=recipients, contents=st.lists(bodies, max_size=6), ttl=spans, delay=st.none() | spans, origin=origins)
    def enqueue(self, did: str, contents: list[bytes], ttl: float, delay: float | None, origin: int) -> None:
        payloads, now = self.make_payloads(contents), self.clock.seconds()
        due_at = None if delay is None else now + delay
        self.assert_same(
            lambda store: store.enqueue(did, payloads, expires_at=now + ttl, due_at=due_at, origin=origin)
        )

    @rule(did=recipients, origin=origins, number=st.integers(2, 7))
    def flood(self, did: str, origin: int, number: int) -> None:
        """Enqueue one message after another of one origin."""
        until = self.clock.seconds() + 20
        for payload in self.make_payloads([b"x"] * number):
            self.assert_same(partial(self.enqueue_on, did, [payload], until, origin))

    @staticmethod
    def enqueue_on(did: str, payloads: list[Payload], until: float, origin: int, store: IStore) -> Deferred[Any]:
        return store.enqueue(did, payloads, expires_at=until, origin=origin)

    @rule(requests=st.lists(st.tuples(recipients, st.lists(bodies, max_size=2), origins), min_size=2, max_size=4))
    def enqueue_all(self, requests: list[tuple[str, list[bytes], int]]) -> None:
        until = self.clock.seconds() + 20
        deposits = [
            EnqueueRequest(did, tuple(self.make_payloads(contents)), until, origin=origin)
            for did, contents, origin in requests
        ]
        self.assert_same(lambda store: store.enqueue_all(deposits))

    @rule(did=recipients, body=bodies, data=st.data())
    def enqueue_repeated_id(self, did: str, body: bytes, data: st.DataObject) -> None:
        if not self.ids:
            return
        payloads = [Payload("once", body, "base64"), Payload(data.draw(st.sampled_from(self.ids)), body, "json")]
        until = self.clock.seconds() + 5
        self.assert_same(lambda store: store.enqueue(did, payloads, expires_at=until))
        # It is removed again, so that its id can be used next time.
        for account in ("did:a", "did:ab", "did:c", "did:d"):
            self.assert_same(partial(self.remove_repeated, account))

    @staticmethod
    def remove_repeated(account: str, store: IStore) -> Deferred[Any]:
        return store.acknowledge(account, ["once"])

    @rule(account=accounts, did=scopes, limit=st.integers(0, 5), max_bytes=st.integers(0, 60))
    def fetch(self, account: str, did: str | None, limit: int, max_bytes: int) -> None:
        self.assert_same(lambda store: store.fetch_messages(account, did, limit=limit, max_bytes=max_bytes))

    @rule(account=accounts, did=scopes)
    def read_status(self, account: str, did: str | None) -> None:
        self.assert_same(lambda store: store.get_queue_status(account, did))
        self.assert_same(lambda store: store.fetch_messages(account, did, limit=99, max_bytes=9999))

    @rule(dids=st.lists(accounts), ages=st.tuples(spans, spans), data=st.data(), limit=st.integers(0, 5))
    def find_arrivals(self, dids: list[str], ages: tuple[float, float], data: st.DataObject, limit: int) -> None:
        now = self.clock.seconds()
        after = data.draw(st.sampled_from(["", *self.ids]))
        window = ArrivalWindow(now - max(ages), now + 1 - min(ages), after)
        self.assert_same(lambda store: store.find_arrivals(dids, window, limit=limit))

    @rule(data=st.data())
    def mark_delivered(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.assert_same(lambda store: store.mark_delivered(ids))

    @rule(data=st.data())
    def mark_pending(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.assert_same(lambda store: store.mark_pending(ids))

    @rule(account=accounts, data=st.data())
    def acknowledge(self, account: str, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.assert_same(lambda store: store.acknowledge(account, ids))

    @rule(did=recipients, account=accounts, origin=origins)
    def make_sender_known(self, did: str, account: str, origin: int) -> None:
        """Acknowledge two messages of a party, long after each other."""
        for _ in range(2):
            (payload,) = self.make_payloads([b"x"])
            self.clock.advance(PROBATION_SECONDS)
            self.assert_same(lambda store: store.expire_messages(99))
            self.assert_same(
                partial(self.enqueue_on, did, [payload], self.clock.seconds() + 2 * PROBATION_SECONDS, origin)
            )
            self.assert_same(partial(self.acknowledge_all, account, [payload.id]))

    @staticmethod
    def acknowledge_all(account: str, ids: list[str], store: IStore) -> Deferred[Any]:
        return store.acknowledge(account, ids)

    @rule(span=spans, limit=st.integers(0, 3))
    def advance_time(self, span: float, limit: int) -> None:
        self.clock.advance(span)
        self.assert_same(lambda store: store.find_next_due())
        self.assert_same(lambda store: store.take_due_messages(limit))
        self.assert_same(lambda store: store.expire_messages(limit))

    @rule(did=accounts)
    def grant(self, did: str) -> None:
        self.assert_same(lambda store: store.grant(did))
        self.assert_same(lambda store: store.mark_draft03(did))
        self.assert_same(lambda store: store.get_account(did))

    @rule(
        account=accounts,
        updates=st.lists(st.tuples(recipients, st.sampled_from(["add", "remove"])), max_size=4),
        max_recipients=st.integers(1, 3),
    )
    def update_recipients(
        self, account: str, updates: list[tuple[str, RecipientUpdateAction]], max_recipients: int
    ) -> None:
        self.assert_same(lambda store: store.update_recipients(account, updates, max_recipients=max_recipients))

    @rule(account=accounts, did=recipients, offset=st.integers(0, 3), limit=st.integers(0, 3))
    def list_registrations(self, account: str, did: str, offset: int, limit: int) -> None:
        self.assert_same(lambda store: store.list_recipients(account, offset=offset, limit=limit))
        self.assert_same(lambda store: store.find_owner(did))

    @rule(prior=accounts, new=accounts)
    def move_account(self, prior: str, new: str) -> None:
        self.assert_same(lambda store: store.move_account(prior, new))

    @rule(top=st.integers(0, 4))
    def queue_sizes(self, top: int) -> None:
        # The order of equally long queues is unspecified.
        answers = self.run_both(lambda store: store.queue_sizes(top))
        lengths, rest = zip(*[([number for _, number in largest], rest) for largest, rest in answers], strict=True)
        assert lengths[0] == lengths[1] and rest[0] == rest[1], answers
        (reference, none), (other, nothing) = self.run_both(lambda store: store.queue_sizes(99))
        assert (dict(reference), none) == (dict(other), nothing) and none == 0
        expected, actual = self.run_both(lambda store: store.get_queue_totals())
        assert (expected.messages, expected.bytes, expected.recipients) == (
            actual.messages,
            actual.bytes,
            actual.recipients,
        )

    @rule(key=keys, ttl=spans, share=st.sampled_from([1.0, 0.7]), release=st.booleans())
    def claim_nonce(self, key: bytes, ttl: float, share: float, release: bool) -> None:
        until = self.clock.seconds() + ttl
        self.assert_same(lambda store: store.claim_nonce(key, until, share))
        if release:
            self.assert_same(lambda store: store.release_nonce(key))

    @rule()
    def prune_nonces(self) -> None:
        self.assert_same(lambda store: store.prune_nonces())


class SQLiteStoreComparison(StoreComparison):
    """The reference store and the SQLite store."""

    def make_store(self, limits: QueueLimits) -> IStore:
        self.folder = mkdtemp(prefix="mediatord-store-")
        self.writer = HoldableRunner()
        path = Path(self.folder) / "db"
        return make_sqlite_store(self.clock, path, limits, write=self.writer, max_nonces=NONCES)

    def teardown(self) -> None:
        super().teardown()
        with closing(connect(Path(self.folder) / "db")) as connection:
            dangling = connection.execute("PRAGMA foreign_key_check").fetchall()
            counted = connection.execute(
                """
                SELECT account_id, recipient_id, count(*), sum(size) FROM message GROUP BY 1, 2
                EXCEPT SELECT * FROM queue
                UNION ALL SELECT * FROM queue WHERE messages = 0
                """
            ).fetchall()
        assert (dangling, counted) == ([], [])
        rmtree(self.folder)

    @rule(
        requests=st.lists(
            st.tuples(recipients, st.lists(bodies, max_size=2), st.booleans(), origins), min_size=2, max_size=9
        ),
        ttl=spans,
    )
    def enqueue_concurrently(self, requests: list[tuple[str, list[bytes], bool, int]], ttl: float) -> None:
        """Many enqueues, some with an id that occurs twice, reach SQLite in one batch."""
        until = self.clock.seconds() + ttl
        valid: list[tuple[str, list[Payload], int]] = []
        for did, contents, spoiled, origin in requests:
            payloads = self.make_payloads(contents)
            valid.append((did, payloads + payloads[:1] if spoiled else payloads, origin))
        reference, sqlite = self.stores
        self.writer.hold()
        blocking = sqlite.ping()
        deferreds = [self.enqueue_on(did, payloads, until, origin, sqlite) for did, payloads, origin in valid]
        self.writer.release()
        result_of(blocking)
        expected = [
            result_of(self.enqueue_on(did, payloads, until, origin, reference)) for did, payloads, origin in valid
        ]
        assert [result_of(enqueued) for enqueued in deferreds] == expected

    @rule(
        requests=st.lists(
            st.one_of(
                st.tuples(st.sampled_from(["enqueue", "flood"]), recipients, st.lists(bodies, max_size=2)),
                st.tuples(st.just("acknowledge"), accounts, st.lists(st.integers(1, 9), max_size=3)),
                st.tuples(st.sampled_from(["remove", "mark"]), st.just(""), st.lists(st.integers(1, 9), max_size=3)),
            ),
            min_size=2,
            max_size=12,
        ),
        ttl=spans,
    )
    def mix_concurrently(self, requests: list[tuple[str, str, list[Any]]], ttl: float) -> None:
        """Enqueues, removals and marks in one batch have the same results as one after another."""
        until = self.clock.seconds() + ttl
        operations = [self.make_operation(what, did, items, until) for what, did, items in requests]
        reference, sqlite = self.stores
        self.writer.hold()
        blocking = sqlite.ping()
        deferreds = [operation(sqlite) for operation in operations]
        self.writer.release()
        result_of(blocking)
        expected = [result_of(operation(reference)) for operation in operations]
        assert [result_of(deferred) for deferred in deferreds] == expected

    def make_operation(
        self, what: str, did: str, items: list[Any], until: float
    ) -> Callable[[IStore], Deferred[Any]]:
        if what in ("enqueue", "flood"):
            payloads, origin = self.make_payloads(items), 0x0001_0001 if what == "flood" else 0
            return lambda store: store.enqueue(did, payloads, expires_at=until, origin=origin)
        ids = [self.ids[-position] for position in items if position <= len(self.ids)]
        if what == "acknowledge":
            return lambda store: store.acknowledge(did, ids)
        return lambda store: store.remove_messages(ids) if what == "remove" else store.mark_delivered(ids)


class MongoStoreComparison(StoreComparison):
    """The reference store and the MongoDB store, whose operations run in the reactor's thread."""

    def make_store(self, limits: QueueLimits) -> IStore:
        self.fresh_database = fresh_database()
        address = parse_mongo_uri(shared_replica_set().uri(self.fresh_database.__enter__()))
        clock = IReactorTime(reactor)
        server = ReplicaSetClient(address, clock, observe=ignore_observation, on_up=lambda up: None, connections=2)
        return MongoStore(server, self.clock, limits, max_nonces=NONCES)

    def teardown(self) -> None:
        super().teardown()
        self.fresh_database.__exit__(None, None, None)

    def get_result(self, operation: Callable[[], Deferred[Any]]) -> Any:
        try:
            return blockingCallFromThread(IReactorFromThreads(reactor), operation)
        except MediatorError as error:
            return type(error)


TestSQLiteStores = SQLiteStoreComparison.TestCase
TestSQLiteStores.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.exhaustive
class MongoDifferentialTests(TestCase):
    """The same for MongoDB, with fewer examples."""

    async def test_same_results_as_reference_store(self) -> None:
        """The MongoDB store gives the same results as the reference store."""
        shared_replica_set()
        for module, name in TIME_LIMIT_SETTINGS:
            self.patch(module, name, TIME_LIMIT)
        few = settings(max_examples=30, stateful_step_count=40, deadline=None)
        await deferToThread(run_state_machine_as_test, MongoStoreComparison, settings=few)
