"""Commands during faults of the MongoDB server, and under too much load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred, DeferredList

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    PayloadTooLarge,
    PublicEventNotFound,
    ReplayCacheFull,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    ContractRequest,
    EventFilter,
    PageRequest,
    PublicEvent,
    StoredEvent,
)
from mediatord.store.interfaces.messages import MessageLedger, RemovedMessage
from mediatord.store.mongo.decentrl_commands import CommandContext, Decision, MongoGuardedCommand
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.driver import client
from mediatord.store.mongo.ledger import read_ledger_with, read_nothing
from mediatord.store.mongo.removal import UncertainRemovalReporter
from mediatord.store.mongo.schema import PENDING_EVENTS
from tests.store.builders import ALICE, BOB, NOON
from tests.store.mongo.decentrl_test_case import MongoDecentrlTestCase
from tests.store.mongo.mongo_test_case import (
    LOST_REPLY_TIME_LIMIT,
    SHORT_TIME_LIMIT,
    TIME_LIMIT,
    wait_for_recovery,
    wait_until,
)

ALL = PageRequest(0, 1000)
TRANSIENT: dict[str, Any] = {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}
UNKNOWN_OUTCOME: dict[str, Any] = {"writeConcernError": {"code": 91, "errmsg": "going down"}}

Write = Callable[[CommandGuard], Deferred[Any]]


class FaultTestCase(MongoDecentrlTestCase):
    """A node with short time limits."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.save_contract()
        await self.register_dids(ALICE)
        self.before = self.list_all_documents()

    @contextmanager
    def with_short_time_limit(self, seconds: float = SHORT_TIME_LIMIT) -> Iterator[None]:
        """Operations have little time in this context, and the server is probed often."""
        interval = self.patch(client, "PROBE_INTERVAL", 0.05)
        try:
            with super().with_short_time_limit(seconds):
                yield
        finally:
            interval.restore()

    def list_all_documents(self) -> dict[str, Any]:
        """All documents, nonces included, except the schema, the health probe and the ledger."""
        others = ("schema", "health_probe", "ledger")
        names = [name for name in self.documents.list_collection_names() if name not in others]
        found = {name: list(self.documents[name].find({}, {"edition": 0, "seq": 0})) for name in names}
        return {name: documents for name, documents in found.items() if documents}

    def make_writes(self) -> dict[str, Write]:
        """Commands that add documents."""
        decentrl = self.decentrl
        return {
            "save_contract": lambda guard: decentrl.save_contract(
                guard, self.make_contract(ALICE, "did:example:carol")
            ),
            "request_contract": lambda guard: decentrl.request_contract(
                guard, ContractRequest("request", BOB, ALICE, "", "")
            ),
            "deliver": lambda guard: decentrl.enqueue_event(guard, self.make_pending_event(payload="payload")),
            "save_events": lambda guard: decentrl.save_events(
                guard, ALICE, [self.make_stored_event("tag"), self.make_stored_event("tag")]
            ),
            "publish": lambda guard: decentrl.publish(
                guard, ALICE, PublicEvent("public", "event", ("tag",), 1.0, "")
            ),
            "admit": decentrl.check_guard,
        }


class UncertainCommitTests(FaultTestCase):
    """A command with an unknown outcome is undone."""

    async def run_without_reply(self, write: Write, guard: CommandGuard, **fault: Any) -> None:
        """Run a command whose commit gets no reply."""
        with self.with_short_time_limit(LOST_REPLY_TIME_LIMIT), self.servers.failpoint("commitTransaction", **fault):
            await self.assertFailure(write(guard), StoreUnavailable)
        await wait_for_recovery(self.clients[0])

    async def test_committed_command_is_undone(self) -> None:
        """A command that succeeded is undone, and can be repeated with the same nonce."""
        for name, write in self.make_writes().items():
            guard = self.make_guard(ALICE)
            await self.run_without_reply(write, guard, **UNKNOWN_OUTCOME)
            self.assertEqual(self.list_all_documents(), self.before, name)
            self.assertEqual(self.find_miscounted(), [], name)
        with self.clients[0].operate("ledger") as run:
            ledger, _ = await read_ledger_with(run, read_nothing)
        self.assertEqual(ledger.decentrl, MessageLedger(accepted=1, withdrawn=1))
        for name, write in self.make_writes().items():
            await write(CommandGuard(name.encode(), 9e9, ALICE))
        self.assertEqual(self.find_miscounted(), [])

    async def test_uncommitted_command_needs_no_undo(self) -> None:
        """A command that did not succeed needs no undo."""
        guard, write = self.make_guard(), self.make_writes()["deliver"]
        await self.run_without_reply(write, guard, closeConnection=True)
        self.assertEqual(self.list_all_documents(), self.before)
        await write(guard)
        self.assertEqual((await self.decentrl.pending_events(ALICE, None, ALL)).total, 1)

    async def test_acknowledged_events_stay_removed(self) -> None:
        """Acknowledged events stay removed, and are reported once even if the undo is uncertain too."""
        reported: list[Sequence[RemovedMessage]] = []
        decentrl = MongoDecentrlStore(
            self.clients[0], self.clock, self.caps, reporter=UncertainRemovalReporter(reported.append)
        )
        events = [self.make_pending_event(), self.make_pending_event()]
        for event in events:
            await decentrl.enqueue_event(self.make_guard(), event)
        guard, ids = self.make_guard(), [event.id for event in events]

        def acknowledge(guard: CommandGuard) -> Deferred[Any]:
            return decentrl.acknowledge_events(guard, ALICE, [ids[0], "unknown"])

        with (
            self.with_short_time_limit(LOST_REPLY_TIME_LIMIT),
            self.servers.failpoint("commitTransaction", **UNKNOWN_OUTCOME),
        ):
            await self.assertFailure(acknowledge(guard), StoreUnavailable)
            # The undo releases the nonce, though its own outcome is not reported.
            await wait_until(lambda: any("undo of an uncertain commit" in line for line in self.log_lines))
            self.assertEqual(self.documents["nonces"].count_documents({"_id": guard.nonce}), 0)
        await wait_for_recovery(self.clients[0])
        self.assertEqual([[one.id for one in some] for some in reported], [ids[:1]])
        self.assertEqual((await decentrl.pending_events(ALICE, None, ALL)).items, (events[1],))
        self.assertEqual(await acknowledge(guard), [])
        await self.run_without_reply(acknowledge, self.make_guard(), **UNKNOWN_OUTCOME)
        self.assertEqual((len(reported), self.find_miscounted()), (1, []))

    async def test_unpublished_event_stays_deleted(self) -> None:
        """An unpublished event stays deleted, and a repetition says so."""
        await self.make_writes()["publish"](self.make_guard())
        guard = self.make_guard()
        await self.run_without_reply(
            lambda guard: self.decentrl.unpublish(guard, ALICE, "public"), guard, **UNKNOWN_OUTCOME
        )
        await self.assertFailure(self.decentrl.unpublish(guard, ALICE, "public"), PublicEventNotFound)

    async def test_failed_acknowledgement_reports_nothing(self) -> None:
        """Events that were not acknowledged are not reported."""
        reported: list[Sequence[RemovedMessage]] = []
        decentrl = MongoDecentrlStore(
            self.clients[0], self.clock, self.caps, reporter=UncertainRemovalReporter(reported.append)
        )
        event = self.make_pending_event()
        await decentrl.enqueue_event(self.make_guard(), event)
        await self.run_without_reply(
            lambda guard: decentrl.acknowledge_events(guard, ALICE, [event.id]),
            self.make_guard(),
            closeConnection=True,
        )
        self.assertEqual(reported, [])
        self.assertEqual(len(await decentrl.acknowledge_events(self.make_guard(), ALICE, [event.id])), 1)

    async def test_rejection_claims_no_nonce(self) -> None:
        """A rejection without a reply has claimed no nonce."""
        guard, unauthorized_event = self.make_guard(), self.make_pending_event(sender="did:example:stranger")
        await self.run_without_reply(
            lambda guard: self.decentrl.enqueue_event(guard, unauthorized_event), guard, **UNKNOWN_OUTCOME
        )
        self.assertEqual(self.list_all_documents(), self.before)
        await self.assertFailure(self.decentrl.enqueue_event(guard, unauthorized_event), ContractNotFound)

    async def test_repetition_before_undo_is_not_duplicate(self) -> None:
        """It is not rejected as a duplicate; after the undo it is run."""
        guard, event = self.make_guard(), self.make_pending_event()
        undone = Deferred[None]()
        undo = MongoGuardedCommand.undo

        async def later(guarded: MongoGuardedCommand[Any], transaction: Any) -> Any:
            await undone
            return await undo(guarded, transaction)

        self.patch(MongoGuardedCommand, "undo", later)
        with (
            self.with_short_time_limit(LOST_REPLY_TIME_LIMIT),
            self.servers.failpoint("commitTransaction", **UNKNOWN_OUTCOME),
        ):
            await self.assertFailure(self.decentrl.enqueue_event(guard, event), StoreUnavailable)
        await self.assertFailure(self.decentrl.enqueue_event(guard, event), StoreUnavailable)
        undone.callback(None)
        await wait_for_recovery(self.clients[0])
        await self.decentrl.enqueue_event(guard, event)
        await self.assertFailure(self.decentrl.enqueue_event(guard, event), DuplicateNonce)
        self.assertEqual((await self.decentrl.pending_events(ALICE, None, ALL)).items, (event,))

    async def test_undo_spares_nonce_of_other_node(self) -> None:
        """What another node has done with the same nonce meanwhile is not undone."""
        guard, event = self.make_guard(), self.make_pending_event()

        async def do_nothing(_: CommandContext) -> Decision[None]:
            return (), None

        expected = PENDING_EVENTS, [event.id]
        uncertain = MongoGuardedCommand(guard, ALICE, do_nothing, (), expected, NOON, b"another token")
        await self.decentrl.enqueue_event(guard, event)
        await self.clients[0].transact("undo", uncertain.undo)
        await self.assertFailure(self.decentrl.enqueue_event(guard, event), DuplicateNonce)
        self.assertEqual((await self.decentrl.pending_events(ALICE, None, ALL)).items, (event,))


class RetryTests(FaultTestCase):
    """Transient faults are not noticed, and nothing is done twice."""

    async def test_every_command_runs_once(self) -> None:
        """Every command is run once, whatever fault there is."""
        faults: dict[str, dict[str, Any]] = {
            "insert": TRANSIENT,
            "update": TRANSIENT,
            "find": {"closeConnection": True},
            "commitTransaction": UNKNOWN_OUTCOME,
        }
        for command, fault in faults.items():
            await self.decentrl.acknowledge_events(
                self.make_guard(), ALICE, self.documents.pending_events.distinct("_id")
            )
            guard, event = self.make_guard(None, ALICE), self.make_pending_event()
            with self.servers.failpoint(command, times=1, **fault):
                await self.decentrl.enqueue_event(guard, event)
            found = await self.decentrl.pending_events(ALICE, None, ALL)
            self.assertEqual(found.items, (event,), command)
            await self.assertFailure(self.decentrl.enqueue_event(guard, event), DuplicateNonce)
            self.assertEqual(self.find_miscounted(), [])

    async def test_many_failing_commands_do_not_block_next(self) -> None:
        """Hundreds of commands of one party that fail together do so, and the next one is run."""
        with self.with_short_time_limit(), self.servers.failpoint("find", closeConnection=True):
            deferreds = [
                self.decentrl.enqueue_event(self.make_guard(), self.make_pending_event()) for _ in range(600)
            ]
            results: list[Any] = await DeferredList(deferreds, consumeErrors=True)
        self.assertEqual({result.type for _, result in results}, {StoreUnavailable})
        await wait_until(lambda: self.clients[0].is_available)
        await self.decentrl.enqueue_event(self.make_guard(), self.make_pending_event())
        self.assertEqual(self.find_miscounted(), [])


class NonceTests(FaultTestCase):
    """Nonces of commands, which share the capacity of the store."""

    most_nonces = 6

    def list_nonces(self) -> list[bytes]:
        """Nonces in the order of their claims."""
        return [document["_id"] for document in self.documents.nonces.find().sort("seq", 1)]

    async def test_number_of_nonces_is_bounded(self) -> None:
        """The nonces are bounded, those of rejected commands included; without room a command is not run."""
        before = self.list_nonces()
        guards = [self.make_guard(ALICE if number % 2 else "did:example:stranger") for number in range(10)]
        outcomes: list[Any] = []
        for guard in guards:
            outcomes += await DeferredList([self.decentrl.check_guard(guard)], consumeErrors=True)
        room = 6 - len(before)
        self.assertEqual(self.list_nonces(), before + [guard.nonce for guard in guards[:room]])
        refusals = [outcome.type for _, outcome in outcomes[room:]]
        self.assertEqual(refusals, [ReplayCacheFull] * (10 - room))

    async def test_command_succeeds_without_count(self) -> None:
        """A command succeeds even if the nonces cannot be counted."""
        event = self.make_pending_event()
        with self.servers.failpoint("count", errorCode=8000):
            await self.decentrl.enqueue_event(self.make_guard(), event)
            await self.assertFailure(
                self.decentrl.check_guard(self.make_guard("did:example:stranger")), UnauthorizedCommand
            )
        self.assertEqual((await self.decentrl.pending_events(ALICE, None, ALL)).items, (event,))


class SizeTests(FaultTestCase):
    """Commands that exceed limits of a document, a message or this process."""

    async def test_rejects_document_over_limit(self) -> None:
        """A document over the limit is rejected before it is sent, with its nonce."""
        large = "x" * (MAX_PAGE_BYTES + 1)
        stored = StoredEvent("large", BOB, ALICE, large, (), 1.0)
        for write in (
            lambda guard: self.decentrl.save_events(guard, ALICE, [self.make_stored_event(), stored]),
            lambda guard: self.decentrl.publish(guard, ALICE, PublicEvent("large", large, (), 1.0, "")),
        ):
            guard = self.make_guard()
            await self.assertFailure(write(guard), PayloadTooLarge)
            await self.assertFailure(self.decentrl.check_guard(guard), DuplicateNonce)
        self.assertEqual(self.find_miscounted(), [])
        self.assertEqual((await self.decentrl.events(ALICE, EventFilter(), ALL)).total, 0)

    async def test_stores_events_over_message_size(self) -> None:
        """Events that exceed one message are stored together."""
        events = [replace(self.make_stored_event("tag"), payload="x" * 9_000_000) for _ in range(3)]
        await self.decentrl.save_events(self.make_guard(), ALICE, events)
        self.assertEqual(
            (await self.decentrl.events(ALICE, EventFilter(("tag",)), PageRequest(2, 1))).items, (events[2],)
        )
        self.assertEqual(self.find_miscounted(), [])

    async def test_stores_very_many_events(self) -> None:
        """Very many events are stored, and tagged anew, in one command."""
        self.patch(client, "REQUEST_TIME_LIMIT", 6 * TIME_LIMIT)
        events = [self.make_stored_event(at=number, sender=ALICE) for number in range(5_001)]
        await self.decentrl.save_events(self.make_guard(), ALICE, events)
        self.assertEqual(
            (await self.decentrl.events(ALICE, EventFilter(), PageRequest(5_000, 9))).items, (events[-1],)
        )
        await self.decentrl.update_tags(self.make_guard(), ALICE, [(event.id, ("new",)) for event in events])
        found = await self.decentrl.events(ALICE, EventFilter(("new",)), PageRequest(0, 1))
        self.assertEqual(found.total, 5_001)
        self.assertEqual(self.find_miscounted(), [])

    async def test_bounds_data_of_running_commands(self) -> None:
        """The data of running commands is bounded (back-pressure)."""
        payload = "x" * 15_000_000
        events = [self.make_pending_event(f"did:example:{number}", payload=payload) for number in range(9)]
        deferreds = [self.decentrl.enqueue_event(self.make_guard(), event) for event in events]
        results: list[Any] = await DeferredList(deferreds, consumeErrors=True)
        outcomes = [result.type for _, result in results]
        self.assertEqual(outcomes, [*[ContractNotFound] * 8, StoreUnavailable])
        await self.assertFailure(self.decentrl.enqueue_event(self.make_guard(), events[-1]), ContractNotFound)
