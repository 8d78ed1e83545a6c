"""The Decentrl half of the store in MongoDB."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
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
from mediatord.store.message_operations import BatchLimits
from mediatord.store.mongo import decentrl_contracts, decentrl_events, decentrl_pending
from mediatord.store.mongo.decentrl_commands import (
    CommandSerializer,
    MongoAdmitCommand,
    MongoGuardedCommand,
    MongoStoreCommand,
)
from mediatord.store.mongo.decentrl_events import EVENTS_PER_STEP, EventPositionCache
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
    Every command is a transaction with its guard. Its many methods are those of the interface.

    :param clock: what registrations and contracts expire by.
    :param aftermath: told of events that were acknowledged by what had failed for all that was known.
    :param refuses: whether a write of this name is refused, as there is no space for it.
    :param step: stored or public events of an owner beyond which places in its lists are remembered.
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
        step: int = EVENTS_PER_STEP,
    ) -> None:
        self._client = client
        self._clocks = clocks or ClockSkewMonitor(client)
        self._refuses = refuses
        self._late_commits = late_commits or LateCommitReporter(lambda removed: None)
        self._clock = clock
        self._caps = caps
        self._command_serializer = CommandSerializer(
            client, nonces or NonceCapacity(client, 1_000_000), BatchLimits()
        )
        self._position_cache = EventPositionCache(step)

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._guarded("admit", guard, MongoAdmitCommand())

    def registered_until(self, did: str) -> Deferred[float | None]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())  # it would seem to have expired
        now = self._clock.seconds()
        return self._read("registered_until", partial(_read_registered_until, did=did, now=now))

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        caps, now = self._caps, self._clock.seconds()
        if contract.owner_did is None:
            return self._guarded("save_contract", guard, decentrl_contracts.MongoRegisterCommand(contract, caps, now))
        agreeing = decentrl_contracts.MongoSaveContractCommand(contract.owner_did, contract, caps, now)
        return self._guarded("save_contract", guard, agreeing)

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        return self._read(
            "contracts", partial(decentrl_contracts.find_contracts, owner=owner, wanted=wanted, part=part)
        )

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        return self._guarded(
            "request_contract", guard, decentrl_contracts.MongoRequestContractCommand(request, self._caps)
        )

    def contract_requests(self, recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        return self._read(
            "contract_requests", partial(decentrl_contracts.find_contract_requests, recipient=recipient, part=part)
        )

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        acknowledging = decentrl_contracts.MongoAcknowledgeRequestsCommand(recipient, tuple(ids))
        return self._guarded("acknowledge_requests", guard, acknowledging)

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        delivering = decentrl_pending.MongoDeliverCommand(event, self._caps, self._clock.seconds())
        return self._guarded("deliver", guard, delivering)

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        return self._read(
            "pending_events",
            partial(decentrl_pending.find_pending_events, recipient=recipient, sender=sender, part=part),
        )

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        return self._read("find_pending", partial(decentrl_pending.find_pending_by_id, ids=tuple(ids)))

    def find_pending_arrivals(
        self, recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        dids = tuple(recipients)
        arrived = partial(decentrl_pending.list_pending_arrivals, recipients=dids, window=window, limit=limit)
        return self._read("arrived_pending", arrived)

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        acknowledging = decentrl_pending.MongoAcknowledgeEventsCommand(recipient, tuple(ids))
        return self._guarded("acknowledge_events", guard, acknowledging, self._late_commits.tell)

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        return self._guarded(
            "save_events", guard, decentrl_events.MongoSaveEventsCommand(owner, tuple(events), self._caps)
        )

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        return self._read(
            "events",
            partial(
                decentrl_events.find_stored_events,
                position_cache=self._position_cache,
                owner=owner,
                wanted=wanted,
                part=part,
            ),
        )

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        return self._guarded(
            "update_tags", guard, decentrl_events.MongoUpdateTagsCommand(owner, dict(tags), self._caps)
        )

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        return self._guarded("publish", guard, decentrl_events.MongoPublishCommand(publisher, event, self._caps))

    def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        return self._guarded("unpublish", guard, decentrl_events.MongoUnpublishCommand(publisher, event_id))

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        return self._read(
            "public_events",
            partial(
                decentrl_events.find_public_events,
                position_cache=self._position_cache,
                publisher=publisher,
                wanted=wanted,
                part=part,
            ),
        )

    def drop_expired_registrations(self) -> Deferred[int]:
        """Forget registrations that nobody can ask for any more, and parties for whom nothing is kept then."""
        return Deferred.fromCoroutine(
            decentrl_contracts.drop_expired_registrations(self._client, self._clock.seconds())
        )

    def _read(self, name: str, work: Callable[[PartyReader], Awaitable[T]]) -> Deferred[T]:
        def read(executor: OperationExecutor, deadline: float) -> Awaitable[T]:
            return work(PartyReader(executor, self._client.clock, deadline))

        return Deferred.fromCoroutine(self._client.operate(name, read))

    def _guarded(
        self, name: str, guard: CommandGuard, command: MongoStoreCommand[T], tell: Callable[[T], None] | None = None
    ) -> Deferred[T]:
        # With clocks that differ registrations would seem to have expired; what is kept would not be found where its
        # recipient is.
        if self._clocks.is_skewed or self._refuses(name):
            return fail(StoreUnavailable())
        guarded = MongoGuardedCommand(guard, command, self._clock.seconds(), os.urandom(_TOKEN_BYTES), tell)
        return Deferred.fromCoroutine(self._command_serializer.run_command(name, guarded))


async def _read_registered_until(reading: PartyReader, did: str, now: float) -> float | None:
    until = (await reading.party(did)).registered_until
    return until if until > now else None
