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
from mediatord.interfaces import Arrival, Removed, Window
from mediatord.interfaces.decentrl import (
    Caps,
    Contract,
    ContractFilter,
    ContractRequest,
    EventFilter,
    Found,
    Guard,
    IDecentrlStore,
    PendingEvent,
    PublicEvent,
    PublicFilter,
    Slice,
    StoredEvent,
)
from mediatord.store.batches import Bounds
from mediatord.store.mongo import (
    decentrl_archive,
    decentrl_channels,
    decentrl_contracts,
    decentrl_pending,
    decentrl_requests,
)
from mediatord.store.mongo.aftermath import Aftermath
from mediatord.store.mongo.clocks import Clocks
from mediatord.store.mongo.decentrl_commands import Admitting, Command, Guarded
from mediatord.store.mongo.decentrl_lists import STEP, Memory
from mediatord.store.mongo.decentrl_pages import Reading
from mediatord.store.mongo.decentrl_turns import Turns
from mediatord.store.mongo.nonces import Nonces
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.server import Server

T = TypeVar("T")

_TOKEN_BYTES = 12


@implementer(IDecentrlStore)
class MongoDecentrl:
    """
    Every command is a transaction with its guard. Its many methods are those of the interface.

    :param clock: what registrations and contracts expire by.
    :param aftermath: told of events that were acknowledged by what had failed for all that was known.
    :param refuses: whether a write of this name is refused, as there is no space for it.
    :param step: stored or public events of an owner beyond which places in its lists are remembered.
    """

    def __init__(
        self,
        server: Server,
        clock: IReactorTime,
        caps: Caps,
        nonces: Nonces | None = None,
        clocks: Clocks | None = None,
        aftermath: Aftermath | None = None,
        refuses: Callable[[str], bool] = lambda operation: False,
        *,
        step: int = STEP,
    ) -> None:
        self._server = server
        self._clocks = clocks or Clocks(server)
        self._refuses = refuses
        self._aftermath = aftermath or Aftermath(lambda removed: None)
        self._clock = clock
        self._caps = caps
        self._turns = Turns(server, nonces or Nonces(server, 1_000_000), Bounds())
        self._lists = Memory(step)

    def admit(self, guard: Guard) -> Deferred[None]:
        return self._guarded("admit", guard, Admitting())

    def registered_until(self, did: str) -> Deferred[float | None]:
        if self._clocks.differ:
            return fail(StoreUnavailable())  # it would seem to have expired
        now = self._clock.seconds()
        return self._read("registered_until", partial(_registered_until, did=did, now=now))

    def save_contract(self, guard: Guard, contract: Contract) -> Deferred[None]:
        caps, now = self._caps, self._clock.seconds()
        if contract.owner_did is None:
            return self._guarded("save_contract", guard, decentrl_contracts.Registering(contract, caps, now))
        agreeing = decentrl_contracts.Agreeing(contract.owner_did, contract, caps, now)
        return self._guarded("save_contract", guard, agreeing)

    def contracts(self, owner: str, wanted: ContractFilter, part: Slice) -> Deferred[Found[Contract]]:
        return self._read("contracts", partial(decentrl_contracts.contracts, owner=owner, wanted=wanted, part=part))

    def request_contract(self, guard: Guard, request: ContractRequest) -> Deferred[None]:
        return self._guarded("request_contract", guard, decentrl_requests.Requesting(request, self._caps))

    def contract_requests(self, recipient: str, part: Slice) -> Deferred[Found[ContractRequest]]:
        return self._read("contract_requests", partial(decentrl_requests.requests, recipient=recipient, part=part))

    def acknowledge_requests(self, guard: Guard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        acknowledging = decentrl_requests.AcknowledgingRequests(recipient, tuple(ids))
        return self._guarded("acknowledge_requests", guard, acknowledging)

    def deliver(self, guard: Guard, event: PendingEvent) -> Deferred[None]:
        delivering = decentrl_pending.Delivering(event, self._caps, self._clock.seconds())
        return self._guarded("deliver", guard, delivering)

    def pending_events(self, recipient: str, sender: str | None, part: Slice) -> Deferred[Found[PendingEvent]]:
        return self._read(
            "pending_events", partial(decentrl_pending.pending_events, recipient=recipient, sender=sender, part=part)
        )

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        return self._read("find_pending", partial(decentrl_pending.find_pending, ids=tuple(ids)))

    def arrived_pending(self, recipients: Sequence[str], window: Window, *, limit: int) -> Deferred[list[Arrival]]:
        dids = tuple(recipients)
        arrived = partial(decentrl_pending.arrived_pending, recipients=dids, window=window, limit=limit)
        return self._read("arrived_pending", arrived)

    def acknowledge_events(self, guard: Guard, recipient: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        acknowledging = decentrl_pending.AcknowledgingEvents(recipient, tuple(ids))
        return self._guarded("acknowledge_events", guard, acknowledging, self._aftermath.tell)

    def save_events(self, guard: Guard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        return self._guarded("save_events", guard, decentrl_archive.Saving(owner, tuple(events), self._caps))

    def events(self, owner: str, wanted: EventFilter, part: Slice) -> Deferred[Found[StoredEvent]]:
        return self._read(
            "events", partial(decentrl_archive.events, memory=self._lists, owner=owner, wanted=wanted, part=part)
        )

    def update_tags(self, guard: Guard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> Deferred[None]:
        return self._guarded("update_tags", guard, decentrl_archive.Tagging(owner, dict(tags), self._caps))

    def publish(self, guard: Guard, publisher: str, event: PublicEvent) -> Deferred[None]:
        return self._guarded("publish", guard, decentrl_channels.Publishing(publisher, event, self._caps))

    def unpublish(self, guard: Guard, publisher: str, event_id: str) -> Deferred[None]:
        return self._guarded("unpublish", guard, decentrl_channels.Unpublishing(publisher, event_id))

    def public_events(self, publisher: str, wanted: PublicFilter, part: Slice) -> Deferred[Found[PublicEvent]]:
        return self._read(
            "public_events",
            partial(
                decentrl_channels.public_events, memory=self._lists, publisher=publisher, wanted=wanted, part=part
            ),
        )

    def drop_expired_registrations(self) -> Deferred[int]:
        """Forget registrations that nobody can ask for any more, and parties for whom nothing is kept then."""
        return Deferred.fromCoroutine(
            decentrl_contracts.drop_expired_registrations(self._server, self._clock.seconds())
        )

    def _read(self, name: str, work: Callable[[Reading], Awaitable[T]]) -> Deferred[T]:
        def read(operations: Operations, deadline: float) -> Awaitable[T]:
            return work(Reading(operations, self._server.clock, deadline))

        return Deferred.fromCoroutine(self._server.operate(name, read))

    def _guarded(
        self, name: str, guard: Guard, command: Command[T], tell: Callable[[T], None] | None = None
    ) -> Deferred[T]:
        # With clocks that differ registrations would seem to have expired; what is kept would not be found where its
        # recipient is.
        if self._clocks.differ or self._refuses(name):
            return fail(StoreUnavailable())
        guarded = Guarded(guard, command, self._clock.seconds(), os.urandom(_TOKEN_BYTES), tell)
        return Deferred.fromCoroutine(self._turns.carry_out(name, guarded))


async def _registered_until(reading: Reading, did: str, now: float) -> float | None:
    until = (await reading.party(did)).registered_until
    return until if until > now else None
