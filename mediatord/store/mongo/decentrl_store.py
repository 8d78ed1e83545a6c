"""The Decentrl part of the MongoDB store: registrations, contracts, contract requests and pending events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from bson import Timestamp
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import ContractNotFound, QuotaExceeded
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    IDecentrlStore,
    PageRequest,
    PendingEvent,
    ResultPage,
    get_utf8_size,
)
from mediatord.store.interfaces.messages import ArrivalWindow, LedgerEntry, MessageArrival, RemovedMessage
from mediatord.store.mongo.decentrl_commands import CommandContext, Decision
from mediatord.store.mongo.decentrl_event_archive import EVENTS_PER_STEP, EventPositionCache, MongoEventArchive
from mediatord.store.mongo.decentrl_parties import (
    EMPTY_PAGE,
    DocumentListing,
    PartyRecord,
    build_pair_filter,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    check_page_size,
    make_party_key,
    read_party,
)
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.operation import operation
from mediatord.store.mongo.driver.transactions import SessionSlot, Transaction
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.message_queues import list_arrivals
from mediatord.store.mongo.nonces import NonceCapacity
from mediatord.store.mongo.removal import UncertainRemovalReporter
from mediatord.store.mongo.schema import (
    CONTRACT_REQUESTS,
    CONTRACTS,
    DEVICES,
    PARTIES,
    PENDING_EVENTS,
    REGISTRATIONS,
    WAKEUPS,
)

_DELETE_BATCH = 1_000


@implementer(IDecentrlStore)
class MongoDecentrlStore(MongoEventArchive):
    """
    Decentrl data in MongoDB; every command is a transaction with its guard.

    :param clock: which registrations and contracts expire by.
    :param reporter: informed of events removed by acknowledgements that were reported as failed.
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
        reporter: UncertainRemovalReporter | None = None,
        refuses: Callable[[str], bool] = lambda operation: False,
        *,
        step: int = EVENTS_PER_STEP,
    ) -> None:
        nonces = nonces or NonceCapacity(client, 1_000_000)
        super().__init__(client, clock, nonces, clocks or ClockSkewMonitor(client, MAX_CLOCK_SKEW), refuses)
        self._caps = caps
        self._reporter = reporter or UncertainRemovalReporter(lambda removed: None)
        self._position_cache = EventPositionCache(step)

    @operation
    async def check_guard(self, guard: CommandGuard) -> None:
        async def do_nothing(_: CommandContext) -> Decision[None]:
            return (), None

        await self._run("admit", guard, None, do_nothing)

    @operation
    async def registered_until(self, did: str) -> float | None:
        self._clocks.check()
        now = self._clock.seconds()
        with self._client.operate("registered_until") as run:
            until = (await read_party(run, did)).registered_until
            return until if until > now else None

    @operation
    async def save_contract(self, guard: CommandGuard, contract: Contract) -> None:
        if contract.owner_did is None:
            await self._register(guard, contract)
            return
        owner, caps, now = contract.owner_did, self._caps, self._clock.seconds()
        of_party = {"party": make_party_key(owner)}
        of_pair = build_pair_filter(owner, "peer", contract.peer_did)
        same = {**of_party, "digest": contract.digest}

        async def save(context: CommandContext) -> Decision[None]:
            duplicates, found_of_pair = context.found
            if duplicates:
                return (), None
            gone: list[Document] = []
            if len(found_of_pair) >= caps.contracts_with_one:
                gone = await _find_oldest_expired(context, of_pair, now, "contract_of_pair")
            elif context.party.contracts >= caps.contracts:
                gone = await _find_oldest_expired(context, of_party, now, "contract_of_party")
            document = {
                "_id": contract.id,
                **of_pair,
                "peer_did": contract.peer_did,
                "until": float(contract.expires_at),
                "digest": contract.digest,
                "text": contract.text,
                "seq": Timestamp(0, 0),
            }
            return build_party_changes(CONTRACTS, context.party, come=[document], gone=gone), None

        await self._run(
            "save_contract",
            guard,
            owner,
            save,
            CONTRACTS.find(same, limit=1, projection={"_id": 1}, hint="contract_digest"),
            CONTRACTS.find(of_pair, projection={"_id": 0, "seq": 1}, hint="contract_of_pair"),
            creates=(CONTRACTS, [contract.id]),
            size=len(contract.text),
        )

    async def _register(self, guard: CommandGuard, contract: Contract) -> None:
        """Store a registration, which is a contract of the peer with the mediator."""
        limit, now = self._caps.contracts_with_one, self._clock.seconds()

        async def register(context: CommandContext) -> Decision[None]:
            """Delete expired registrations, and of too many the one that expires first, which may be the new one."""
            (found,) = context.found
            until = float(contract.expires_at)
            gone = [one for one in found if one["until"] <= now]
            live = [one for one in found if one["until"] > now]
            if any(one["digest"] == contract.digest for one in live):
                return (), None
            if len(live) >= limit:
                earliest = min(live, key=lambda one: float(one["until"]))
                if earliest["until"] > until:
                    return (), None
                gone.append(earliest)
            document = {
                "_id": contract.id,
                "party": context.party.key,
                "until": until,
                "digest": contract.digest,
                "text": contract.text,
            }
            requests = build_party_update(context.party.registered(until))
            if gone:
                requests += REGISTRATIONS.delete({"_id": {"$in": [one["_id"] for one in gone]}})
            return [*requests, *REGISTRATIONS.insert([document])], None

        mine = {"party": make_party_key(contract.peer_did)}
        query = REGISTRATIONS.find(mine, projection={"digest": 1, "until": 1}, hint="registration_of_party")
        await self._run("save_contract", guard, contract.peer_did, register, query, size=len(contract.text))

    @operation
    async def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> ResultPage[Contract]:
        with self._client.operate("contracts") as run:
            party = await read_party(run, owner)
            if not party.contracts:
                return EMPTY_PAGE
            filter: Document = {"party": party.key}
            index = "contract_of_party"
            if wanted.did not in (None, owner):
                filter["peer"], index = make_party_key(wanted.did or ""), "contract_of_pair"
            bounds = {"$gte": wanted.expires_after, "$lte": wanted.expires_before}
            given = {operator: float(bound) for operator, bound in bounds.items() if bound is not None}
            if given:
                filter["until"] = given
            listing = DocumentListing(CONTRACTS, filter, {"seq": 1}, index)
            found, total = await listing.read_page(run, part, party.contracts if len(filter) == 1 else None)
            items = [
                Contract(one["_id"], owner, one["peer_did"], one["until"], one["digest"], one["text"])
                for one in found
            ]
            return ResultPage(tuple(items), total)

    @operation
    async def request_contract(self, guard: CommandGuard, request: ContractRequest) -> None:
        caps, recipient = self._caps, request.recipient_did
        of_pair = build_pair_filter(recipient, "sender", request.sender_did)

        async def save(context: CommandContext) -> Decision[None]:
            if context.party.requests >= caps.requests or len(context.found[0]) >= caps.requests_of_one:
                raise QuotaExceeded()
            document = {
                "_id": request.id,
                **of_pair,
                "sender_did": request.sender_did,
                "text": request.encrypted_contract_request,
                "public_key": request.requestor_ephemeral_public_key,
                "seq": Timestamp(0, 0),
            }
            return build_party_changes(CONTRACT_REQUESTS, context.party, come=[document]), None

        query = CONTRACT_REQUESTS.find(of_pair, projection={"_id": 0, "sender": 1}, hint="request_of_pair")
        made, size = (CONTRACT_REQUESTS, [request.id]), get_utf8_size(request.encrypted_contract_request)
        await self._run("request_contract", guard, recipient, save, query, creates=made, size=size)

    @operation
    async def contract_requests(self, recipient: str, part: PageRequest) -> ResultPage[ContractRequest]:
        with self._client.operate("contract_requests") as run:
            party = await read_party(run, recipient)
            if not party.requests:
                return EMPTY_PAGE
            listing = DocumentListing(CONTRACT_REQUESTS, {"party": party.key}, {"seq": 1}, "request_of_party")
            found, total = await listing.read_page(run, part, party.requests)
            items = [
                ContractRequest(one["_id"], one["sender_did"], recipient, one["text"], one["public_key"])
                for one in found
            ]
            return ResultPage(tuple(items), total)

    @operation
    async def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> None:
        async def delete(context: CommandContext) -> Decision[None]:
            return build_party_changes(CONTRACT_REQUESTS, context.party, gone=context.found[0]), None

        query = build_party_documents_query(CONTRACT_REQUESTS, recipient, ids)
        await self._run("acknowledge_requests", guard, recipient, delete, query)

    @operation
    async def drop_expired_registrations(self) -> int:
        """
        Delete expired registrations, with the devices of parties without a later one, and then parties without any
        documents; return the number of the first.
        """
        now, dropped = self._clock.seconds(), 0
        while number := await self._client.transact("prune", partial(_drop_registrations, now=now)):
            dropped += number
        while await self._client.transact("prune", partial(_drop_parties, now=now)):
            pass
        return dropped

    @operation
    async def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> None:
        recipient, caps, now = event.recipient_did, self._caps, self._clock.seconds()
        size = get_utf8_size(event.payload)

        async def enqueue(context: CommandContext) -> Decision[None]:
            (contracts,), party = context.found, context.party
            if not contracts:
                raise ContractNotFound()
            if party.pending >= caps.pending or (size and party.pending_bytes + size > caps.pending_bytes):
                raise QuotaExceeded()
            document = {
                "_id": event.id,
                **build_pair_filter(recipient, "sender", event.sender_did),
                "recipient_did": recipient,
                "sender_did": event.sender_did,
                "received_at": float(event.received_at),
                "size": size,
                "payload": event.payload,
                "seq": Timestamp(0, 0),
            }
            entries = build_ledger_entries(context.transaction.slot, "decentrl", accepted=1)
            return [*build_party_changes(PENDING_EVENTS, party, come=[document]), *entries], None

        valid = {**build_pair_filter(recipient, "peer", event.sender_did), "until": {"$gt": now}}
        query = CONTRACTS.find(valid, limit=1, projection={"_id": 0, "until": 1}, hint="contract_of_pair")
        made = PENDING_EVENTS, [event.id]
        await self._run("deliver", guard, recipient, enqueue, query, creates=made, size=size)

    @operation
    async def pending_events(self, recipient: str, sender: str | None, part: PageRequest) -> ResultPage[PendingEvent]:
        with self._client.operate("pending_events") as run:
            party = await read_party(run, recipient)
            if not party.pending:
                return EMPTY_PAGE
            listing = DocumentListing(PENDING_EVENTS, {"party": party.key}, {"seq": 1}, "pending_of_party")
            total: int | None = party.pending
            if sender is not None:
                of_pair = build_pair_filter(recipient, "sender", sender)
                listing, total = replace(listing, filter=of_pair, hint="pending_of_pair"), None
            if party.pending_bytes > MAX_PAGE_BYTES:
                sizes, total = await replace(listing, projection={"size": 1}).read_page(run, part, total)
                check_page_size(sizes)
            found, total = await listing.read_page(run, part, total)
            check_page_size(found)
            return ResultPage(tuple([_parse_pending_event(one) for one in found]), total)

    @operation
    async def find_pending(self, ids: Sequence[str]) -> list[PendingEvent]:
        missing = dict.fromkeys(ids)
        with self._client.operate("find_pending") as run:
            found: list[Document] = []
            while missing and sum([document["size"] for document in found]) <= MAX_PAGE_BYTES:
                # One batch has about as much as a page: mostly it is all there is.
                query = PENDING_EVENTS.find(
                    {"_id": {"$in": list(missing)}}, sort={"seq": 1}, limit=len(missing), hint="_id_"
                )
                some = await run.query(query.with_fields({"singleBatch": True}))
                if not some:
                    break
                found += some
                for one in some:
                    del missing[one["_id"]]
            sizes = list(accumulate([document["size"] for document in found]))
            return [_parse_pending_event(one) for one in found[: max(1, bisect_right(sizes, MAX_PAGE_BYTES))]]

    @operation
    async def find_pending_arrivals(
        self, recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> list[MessageArrival]:
        with self._client.operate("arrived_pending") as run:
            dids = {make_party_key(did): did for did in recipients} if limit > 0 else {}
            fields = "party", "received_at", "pending_arrived"
            return await list_arrivals(run.query, PENDING_EVENTS, fields, dids, window, limit)

    @operation
    async def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> list[RemovedMessage]:
        async def delete(context: CommandContext) -> Decision[list[RemovedMessage]]:
            return build_pending_removal(context.party, context.found[0], context.transaction.slot, "acknowledged")

        query = build_party_documents_query(PENDING_EVENTS, recipient, ids, {"received_at": 1})
        report = self._reporter.report
        return await self._run("acknowledge_events", guard, recipient, delete, query, on_late_answer=report)


async def _drop_registrations(t: Transaction, now: float) -> int:
    """Delete some of the registrations that have expired; return their number."""
    expired = REGISTRATIONS.find(
        {"until": {"$lte": now}}, limit=_DELETE_BATCH, projection={"party": 1}, hint="registration_until"
    )
    found = await t.query(expired)
    if found:
        parties = {"_id": {"$in": list({one["party"] for one in found})}, "registered_until": {"$lte": now}}
        former = [one["_id"] for one in await t.query(PARTIES.find(parties, projection={"_id": 1}, hint="_id_"))]
        t.write_at_end(
            DEVICES.delete({"owner": {"$in": former}}),
            WAKEUPS.delete({"_id": {"$in": former}}),
            REGISTRATIONS.delete({"_id": {"$in": [one["_id"] for one in found]}}),
        )
    return len(found)


async def _drop_parties(t: Transaction, now: float) -> int:
    """Delete some of the parties without any documents; return their number."""
    unused = {"unused": True, "registered_until": {"$lte": now}}
    found = await t.query(PARTIES.find(unused, limit=_DELETE_BATCH, projection={"_id": 1}, hint="party_unused"))
    if found:
        keys = {"_id": {"$in": [one["_id"] for one in found]}}
        t.write_at_end(WAKEUPS.delete(keys), PARTIES.delete(keys))
    return len(found)


def build_pending_removal(
    party: PartyRecord, found: Sequence[Document], slot: SessionSlot, entry: LedgerEntry
) -> tuple[list[MongoCommand], list[RemovedMessage]]:
    """
    Build the writes that remove pending events of a party, and their records.

    :param entry: of the ledger.
    """
    entries = build_ledger_entries(slot, "decentrl", **{entry: len(found)})
    did = party.did
    removed = [RemovedMessage(one["_id"], did, did, one["size"], one["received_at"], 0) for one in found]
    return [*build_party_changes(PENDING_EVENTS, party, gone=found), *entries], removed


def _parse_pending_event(document: Document) -> PendingEvent:
    return PendingEvent(
        id=document["_id"],
        recipient_did=document["recipient_did"],
        sender_did=document["sender_did"],
        payload=document["payload"],
        received_at=document["received_at"],
    )


async def _find_oldest_expired(context: CommandContext, mine: Document, now: float, index: str) -> list[Document]:
    """:raise QuotaExceeded: none has expired."""
    query = CONTRACTS.find(
        {**mine, "until": {"$lte": now}}, sort={"seq": 1}, limit=1, projection={"_id": 1}, hint=index
    )
    if found := await context.transaction.query(query):
        return found
    raise QuotaExceeded()
