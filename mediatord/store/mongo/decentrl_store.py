"""The Decentrl half of the MongoDB store."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster import MAX_CLOCK_SKEW
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    IDecentrlStore,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
)
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, RemovedMessage
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.mongo import decentrl_contracts, decentrl_events
from mediatord.store.mongo.decentrl_commands import (
    CommandSerializer,
    MongoCheckGuardCommand,
    MongoGuardedCommand,
    MongoStoreCommand,
)
from mediatord.store.mongo.decentrl_parties import PartyReader
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.nonces import NonceCapacity
from mediatord.store.mongo.removal import LateCommitReporter

T = TypeVar("T")

_TOKEN_BYTES = 12


@implementer(IDecentrlStore)
class MongoDecentrlStore:
    """
    Decentrl data in MongoDB; every command is a transaction with its guard.

    :param clock: which registrations and contracts expire by.
    :param late_commits: informed of events removed by acknowledgements that were reported as failed.
    :param refuses: whether a write of this name is refused for want of space.
    :param step: stored or public events of an owner beyond which positions in its lists are cached.
    """

    def __init__(
        self,
        client: ReplicaSetClient,
        clock: IReactorTime,
        caps: DecentrlQuotas,
        nonces: NonceCapacity | None = None,
        clocks: ClockSkewMonitor | None = None,
        late_commits: LateCommitReporter | None = None,
        refuses: Callable[[str], bool] = lambda operation: False,
        *,
        step: int = decentrl_events.EVENTS_PER_STEP,
    ) -> None:
        self._client = client
        self._clocks = clocks or ClockSkewMonitor(client, MAX_CLOCK_SKEW)
        self._refuses = refuses
        self._late_commits = late_commits or LateCommitReporter(lambda removed: None)
        self._clock = clock
        self._caps = caps
        self._command_serializer = CommandSerializer(
            client, nonces or NonceCapacity(client, 1_000_000), BatchLimits()
        )
        self._position_cache = decentrl_events.EventPositionCache(step)

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._run("admit", guard, MongoCheckGuardCommand(None))

    def registered_until(self, did: str) -> Deferred[float | None]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())  # a registration would seem to have expired
        now = self._clock.seconds()

        async def read(reader: PartyReader) -> float | None:
            until = (await reader.read_party(did)).registered_until
            return until if until > now else None

        return self._read("registered_until", read)

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        caps, now = self._caps, self._clock.seconds()
        command: MongoStoreCommand[None]
        if contract.owner_did is None:
            command = decentrl_contracts.MongoRegisterCommand(contract.peer_did, contract, caps, now)
        else:
            command = decentrl_contracts.MongoSaveContractCommand(contract.owner_did, contract, caps, now)
        return self._run("save_contract", guard, command)

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        return self._read("contracts", lambda reader: decentrl_contracts.find_contracts(reader, owner, wanted, part))

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        command = decentrl_contracts.MongoRequestContractCommand(request.recipient_did, request, self._caps)
        return self._run("request_contract", guard, command)

    def contract_requests(self, recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        return self._read(
            "contract_requests", lambda reader: decentrl_contracts.find_contract_requests(reader, recipient, part)
        )

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        command = decentrl_contracts.MongoAcknowledgeRequestsCommand(recipient, tuple(ids))
        return self._run("acknowledge_requests", guard, command)

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        command = decentrl_events.MongoDeliverCommand(event.recipient_did, event, self._caps, self._clock.seconds())
        return self._run("deliver", guard, command)

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        return self._read(
            "pending_events", lambda reader: decentrl_events.find_pending_events(reader, recipient, sender, part)
        )

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        wanted = tuple(ids)
        return self._read("find_pending", lambda reader: decentrl_events.find_pending_by_id(reader, wanted))

    def find_pending_arrivals(
        self, recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        dids = tuple(recipients)
        return self._read(
            "arrived_pending", lambda reader: decentrl_events.list_pending_arrivals(reader, dids, window, limit)
        )

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        command = decentrl_events.MongoAcknowledgeEventsCommand(recipient, tuple(ids))
        return self._run("acknowledge_events", guard, command, self._late_commits.report)

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        return self._run(
            "save_events", guard, decentrl_events.MongoSaveEventsCommand(owner, tuple(events), self._caps)
        )

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        cache = self._position_cache
        return self._read(
            "events", lambda reader: decentrl_events.find_stored_events(reader, cache, owner, wanted, part)
        )

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        return self._run("update_tags", guard, decentrl_events.MongoUpdateTagsCommand(owner, dict(tags), self._caps))

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        return self._run("publish", guard, decentrl_events.MongoPublishCommand(publisher, event, self._caps))

    def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        return self._run("unpublish", guard, decentrl_events.MongoUnpublishCommand(publisher, event_id))

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        cache = self._position_cache
        return self._read(
            "public_events", lambda reader: decentrl_events.find_public_events(reader, cache, publisher, wanted, part)
        )

    def drop_expired_registrations(self) -> Deferred[int]:
        """Delete expired registrations, and then parties without any documents."""
        return Deferred.fromCoroutine(
            decentrl_contracts.drop_expired_registrations(self._client, self._clock.seconds())
        )

    def _read(self, name: str, work: Callable[[PartyReader], Awaitable[T]]) -> Deferred[T]:
        def read(executor: OperationExecutor, deadline: float) -> Awaitable[T]:
            return work(PartyReader(executor, self._client.clock, deadline))

        return Deferred.fromCoroutine(self._client.operate(name, read))

    def _run(
        self,
        name: str,
        guard: CommandGuard,
        command: MongoStoreCommand[T],
        on_late_answer: Callable[[T], None] | None = None,
    ) -> Deferred[T]:
        # With a skewed clock registrations would seem to have expired, and data would not be found by its recipient.
        if self._clocks.is_skewed or self._refuses(name):
            return fail(StoreUnavailable())
        guarded = MongoGuardedCommand(guard, command, self._clock.seconds(), os.urandom(_TOKEN_BYTES), on_late_answer)
        return Deferred.fromCoroutine(self._command_serializer.run_command(name, guarded))
