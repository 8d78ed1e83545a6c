"""Lifetime of parties and nonces in the SQLite store."""

from __future__ import annotations

from contextlib import closing
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import TestCase

from mediatord.errors import DuplicateNonce, MediatorError
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.sqlite import coordination_queries
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import (
    ALICE,
    BOB,
    HOUR,
    NOON,
    ImmediateClock,
    make_database_path,
    make_payload,
    make_sqlite_store,
)
from tests.store.sqlite.operations import (
    CAROL,
    PARTY_DIDS,
    SQLiteOperations,
    create_memory_database,
    find_miscounts,
    make_contract,
)

UNREGISTERED = "did:example:stranger"
ALL = PageRequest(0, 1000)


class PartyTests(TestCase):
    """DIDs that have a party row, and how long."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.store = make_sqlite_store(self.clock, self.path, caps=DecentrlQuotas(contracts=3))
        await self.store.open()
        self.addCleanup(self.store.close)
        self.numbers = count()

    def make_guard(self, sender: str | None = None, recipient: str | None = None) -> CommandGuard:
        return CommandGuard(b"nonce %d" % next(self.numbers), NOON + 9 * HOUR, sender, recipient)

    async def register_did(self, did: str, ttl: float) -> None:
        until = self.clock.seconds() + ttl
        await self.store.decentrl.save_contract(
            self.make_guard(), make_contract(f"r{next(self.numbers)}", None, did, until)
        )

    def list_parties(self) -> dict[str, int]:
        with closing(connect(self.path)) as connection:
            return dict(connection.execute("SELECT did, id FROM party ORDER BY id").fetchall())

    async def test_unauthorized_senders_get_no_row(self) -> None:
        """A DID that only requests a contract, writes without one, or is refused gets no row."""
        await self.register_did(ALICE, HOUR)
        request = ContractRequest("q", UNREGISTERED, ALICE, "request", "key")
        await self.store.decentrl.request_contract(self.make_guard(None, ALICE), request)
        event = PendingEvent("p", ALICE, UNREGISTERED, "payload", NOON)
        for deferred in (
            self.store.decentrl.enqueue_event(self.make_guard(None, ALICE), event),
            self.store.decentrl.check_guard(self.make_guard(UNREGISTERED)),
            self.store.decentrl.check_guard(self.make_guard(None, UNREGISTERED)),
        ):
            with self.assertRaises(MediatorError):
                await deferred
        await self.store.decentrl.events(UNREGISTERED, EventFilter(participant=UNREGISTERED), ALL)
        self.assertEqual(list(self.list_parties()), [ALICE])

    async def test_prunes_expired_registrations(self) -> None:
        """Expired registrations are pruned, with their party if it has nothing else."""
        for did in (*PARTY_DIDS, "did:example:empty", "did:example:peer", "did:example:registered"):
            await self.register_did(did, 10)
        await self.register_did("did:example:registered", HOUR)
        decentrl = self.store.decentrl
        await decentrl.save_contract(self.make_guard(), make_contract("c", ALICE, "did:example:peer"))
        await decentrl.save_contract(self.make_guard(), make_contract("d", BOB, ALICE))
        await decentrl.enqueue_event(self.make_guard(), PendingEvent("p", BOB, ALICE, "payload", NOON))
        await decentrl.save_events(self.make_guard(), CAROL, [StoredEvent("e", CAROL, CAROL, "payload", (), 1.0)])
        self.clock.advance(10)
        before = self.list_parties()
        self.assertEqual(await self.store.prune_nonces(), 0)
        after = self.list_parties()
        self.assertEqual(set(before) - set(after), {"did:example:empty"})
        with closing(connect(self.path)) as connection:
            self.assertEqual(connection.execute("SELECT count(*) FROM contract WHERE owner_id = 0").fetchone(), (1,))
            self.assertEqual(find_miscounts(connection), [])
        found = await decentrl.pending_events(BOB, ALICE, ALL)
        self.assertEqual([event.sender_did for event in found.items], [ALICE])

    async def test_event_outlives_its_sender(self) -> None:
        """A pending event is readable after its sender's contract and registration were deleted."""
        decentrl = self.store.decentrl
        await self.register_did(BOB, 10)
        await self.register_did(ALICE, HOUR)
        await decentrl.save_contract(self.make_guard(), make_contract("c", ALICE, BOB, NOON + 10))
        await decentrl.enqueue_event(self.make_guard(), PendingEvent("p", ALICE, BOB, "payload", NOON))
        self.clock.advance(10)
        for number in range(3):
            await decentrl.save_contract(
                self.make_guard(), make_contract(f"c{number}", ALICE, f"did:example:{number}")
            )
        await self.store.prune_nonces()
        self.assertNotIn(BOB, self.list_parties())
        for sender in (None, BOB):
            found = await decentrl.pending_events(ALICE, sender, ALL)
            self.assertEqual([(event.id, event.sender_did) for event in found.items], [("p", BOB)])

    async def test_replaced_contracts_leave_no_peers(self) -> None:
        """Peers of contracts that were replaced are deleted with them."""
        await self.register_did(ALICE, HOUR)
        for number in range(9):
            expired = make_contract(f"c{number}", ALICE, f"did:example:{number}", NOON - 1)
            await self.store.decentrl.save_contract(self.make_guard(), expired)
        self.assertEqual(list(self.list_parties()), [ALICE, *(f"did:example:{number}" for number in (6, 7, 8))])
        await self.store.decentrl.save_contract(self.make_guard(), make_contract("self", ALICE, ALICE, NOON - 1))
        await self.store.decentrl.save_contract(self.make_guard(), make_contract("last", ALICE, BOB, NOON - 1))
        self.assertEqual(set(self.list_parties()), {ALICE, BOB, "did:example:8"})

    async def test_row_numbers_are_not_reused(self) -> None:
        """A DID gets another row number than a deleted one, so that no row is mistaken for its own."""
        await self.register_did(ALICE, 10)
        before = self.list_parties()[ALICE]
        self.clock.advance(10)
        await self.store.prune_nonces()
        self.assertEqual(self.list_parties(), {})
        await self.register_did(BOB, 10)
        self.assertGreater(self.list_parties()[BOB], before)

    async def test_repeated_registrations_do_not_accumulate(self) -> None:
        """Of a DID that registers repeatedly only the effective registrations are kept."""
        for _ in range(20):
            await self.register_did(ALICE, 10)
            self.clock.advance(5)
        with closing(connect(self.path)) as connection:
            ((number,),) = connection.execute("SELECT count(*) FROM contract").fetchall()
        self.assertLessEqual(number, 3)

    async def test_prunes_any_number(self) -> None:
        """Any number of expired registrations is pruned."""
        operations = SQLiteOperations(DecentrlQuotas(), 10_000)
        many = [
            operations.save_contract(make_contract(f"r{number}", None, f"did:example:{number}", NOON + 10))
            for number in range(2500)
        ]
        with closing(connect(self.path)) as connection:
            connection.commit_batch(many)
        self.clock.advance(10)
        await self.store.prune_nonces()
        self.assertEqual(self.list_parties(), {})


class QueueSizeTests(TestCase):
    """Queue sizes over both protocols."""

    async def test_sorts_by_sum_of_protocols(self) -> None:
        """The DID with the largest sum comes first, though others have more in one protocol."""
        clock = ImmediateClock()
        store = make_sqlite_store(clock, make_database_path(self))
        await store.open()
        self.addCleanup(store.close)
        numbers = count()

        async def fill_queue(did: str, messages: int, events: int) -> None:
            for _ in range(messages):
                await store.enqueue(did, [make_payload(f"m{next(numbers)}")], expires_at=NOON + HOUR)
            for _ in range(events):
                guard = CommandGuard(b"%d" % next(numbers), NOON + HOUR)
                await store.decentrl.enqueue_event(
                    guard, PendingEvent(f"p{next(numbers)}", did, UNREGISTERED, "", NOON)
                )

        await store.grant(ALICE)
        for did in ("both", "message", "pending", "other message", "other pending"):
            guard = CommandGuard(b"%d" % next(numbers), NOON + HOUR)
            await store.update_recipients(ALICE, [(did, "add")], max_recipients=9)
            await store.decentrl.save_contract(guard, make_contract(f"c{next(numbers)}", did, UNREGISTERED))
        await fill_queue("message", 3, 0)
        await fill_queue("pending", 0, 3)
        await fill_queue("both", 2, 2)
        self.assertEqual(await store.queue_sizes(1), ([("both", 4)], 6))
        await fill_queue("other message", 1, 0)
        self.assertEqual(await store.queue_sizes(1), ([("both", 4)], 7))
        await fill_queue("other pending", 0, 2)
        await fill_queue("other message", 0, 1)
        self.assertEqual(await store.queue_sizes(1), ([("both", 4)], 10))
        self.assertEqual(await store.queue_sizes(0), ([], 14))


class NonceTests(TestCase):
    """Nonces of the SQLite store."""

    async def test_prunes_in_small_transactions(self) -> None:
        """Pruning takes many small transactions, so that others write in between, and counts all of them."""
        clock, path, observed = ImmediateClock(), make_database_path(self), list[str]()
        store = make_sqlite_store(
            clock, path, max_nonces=11_000, observe=lambda operation, seconds: observed.append(operation)
        )
        await store.open()
        self.addCleanup(store.close)
        claims = [
            coordination_queries.NonceClaim(
                b"%d" % number, NOON + (200 if number % 5 == 0 else 10), NOON, capacity=11_000
            )
            for number in range(11_000)
        ]
        with closing(connect(path)) as connection:
            self.assertEqual(coordination_queries.claim_nonces(connection, claims), [True] * 11_000)
        self.assertEqual(await store.prune_nonces(), 0)
        clock.advance(10 + NONCE_GRACE_SECONDS)
        observed.clear()
        self.assertEqual(await store.prune_nonces(), 8_800)
        self.assertGreaterEqual(observed.count("commit"), 3)
        self.assertFalse(await store.claim_nonce(b"5", NOON + 999))
        self.assertTrue(await store.claim_nonce(b"6", NOON + 999))
        with closing(connect(path)) as connection:
            self.assertEqual(find_miscounts(connection), [])
            self.assertEqual(connection.execute("SELECT count(*) FROM nonce").fetchone(), (2_201,))

    @given(
        batches=st.lists(
            st.lists(
                st.tuples(
                    st.sampled_from(b"abcdefg"), st.sampled_from([-1.0, 1.0, 9.0]), st.sampled_from([0.5, 1.0])
                ),
                max_size=9,
            ),
            max_size=4,
        )
    )
    @settings(max_examples=200, deadline=None)
    def test_batched_claims_equal_single_claims(self, batches: list[list[tuple[int, float, float]]]) -> None:
        """Claims in one batch have the same outcomes and leave the same rows as one by one."""
        with closing(create_memory_database()) as alone, closing(create_memory_database()) as together:
            for number, batch in enumerate(batches):
                now = NOON + 2 * number
                claims = [
                    coordination_queries.NonceClaim(bytes([key]), now + ttl, now, share, 4)
                    for key, ttl, share in batch
                ]
                one_by_one = [coordination_queries.claim_nonces(alone, [claim])[0] for claim in claims]
                at_once = coordination_queries.claim_nonces(together, claims)
                self.assertEqual([repr(one) for one in at_once], [repr(one) for one in one_by_one])
                stored = [
                    connection.execute("SELECT key, until FROM nonce ORDER BY place").fetchall()
                    for connection in (alone, together)
                ]
                self.assertEqual(stored[0], stored[1])
                self.assertEqual(find_miscounts(together), [])

    async def test_claims_are_shared_between_processes(self) -> None:
        """A claim of one process holds in the other, alone and in a batch of commands."""
        clock, path = ImmediateClock(), make_database_path(self)
        stores = [make_sqlite_store(clock, path) for _ in range(2)]
        for store in stores:
            await store.open()
            self.addCleanup(store.close)
        self.assertTrue(await stores[0].claim_nonce(b"a", NOON + 9))
        await stores[1].decentrl.check_guard(CommandGuard(b"b", NOON + 9))
        self.assertFalse(await stores[1].claim_nonce(b"a", NOON + 9))
        self.assertFalse(await stores[0].claim_nonce(b"b", NOON + 9))


class RestartTests(TestCase):
    """Data that survives a restart."""

    async def test_data_survives_restart(self) -> None:
        """All Decentrl data survives a restart unchanged."""
        clock, path = ImmediateClock(), make_database_path(self)
        store = make_sqlite_store(clock, path)
        await store.open()
        guards = (CommandGuard(b"%d" % number, NOON + HOUR) for number in count())
        decentrl = store.decentrl
        await decentrl.save_contract(next(guards), make_contract("r", None, ALICE))
        await decentrl.save_contract(next(guards), make_contract("c", ALICE, BOB))
        await decentrl.request_contract(next(guards), ContractRequest("q", UNREGISTERED, ALICE, "request", "key"))
        await decentrl.enqueue_event(next(guards), PendingEvent("p", ALICE, BOB, "payload", NOON))
        await decentrl.save_events(
            next(guards), ALICE, [StoredEvent("e", BOB, ALICE, "payload", ("x", "y"), 1.5, "c")]
        )
        await decentrl.publish(next(guards), ALICE, PublicEvent("x", "event", ("x",), 2.5, "signature", "blog"))
        before = await self.read_everything(store)
        await store.close()
        store = make_sqlite_store(clock, path)
        await store.open()
        self.addCleanup(store.close)
        self.assertEqual(await self.read_everything(store), before)
        with self.assertRaises(DuplicateNonce):
            await store.decentrl.check_guard(CommandGuard(b"0", NOON + HOUR))

    async def read_everything(self, store: SQLiteStore) -> list[Any]:
        decentrl = store.decentrl
        return [
            await decentrl.registered_until(ALICE),
            await decentrl.contracts(ALICE, ContractFilter(), ALL),
            await decentrl.contract_requests(ALICE, ALL),
            await decentrl.pending_events(ALICE, None, ALL),
            await decentrl.events(ALICE, EventFilter(("x",), BOB, unprocessed_only=True), ALL),
            await decentrl.public_events(ALICE, PublicEventFilter(("x",), channel_id="blog"), ALL),
            await store.queue_sizes(9),
        ]
