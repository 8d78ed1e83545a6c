"""
Contracts and registrations in MongoDB.

Contract requests in MongoDB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bson import Timestamp

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import (
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    PageRequest,
    ResultPage,
)
from mediatord.store.mongo.decentrl_commands import CommandContext, CommandOutcome
from mediatord.store.mongo.decentrl_parties import (
    DocumentListing,
    PartyReader,
    build_empty_result,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    make_party_key,
    sum_utf8_sizes,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_deletes, build_find, build_inserts
from mediatord.store.mongo.schema import (
    CONTRACT_DIGEST,
    CONTRACT_OF_PAIR,
    CONTRACT_OF_PARTY,
    CONTRACT_REQUESTS,
    CONTRACTS,
    PARTIES,
    PARTY_UNUSED,
    REGISTRATION_OF_PARTY,
    REGISTRATION_UNTIL,
    REGISTRATIONS,
    REQUEST_OF_PAIR,
    REQUEST_OF_PARTY,
    PartyCollection,
)

_DELETE_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class MongoRegisterCommand:
    """To keep a registration."""

    contract: Contract
    caps: DecentrlQuotas
    now: float

    @property
    def did(self) -> str:
        return self.contract.peer_did

    @property
    def creates(self) -> None:
        """Nothing that is counted."""

    @property
    def size(self) -> int:
        return len(self.contract.text)

    def build_queries(self) -> list[MongoCommand]:
        mine = {"party": make_party_key(self.did)}
        return [build_find(REGISTRATIONS, mine, projection={"digest": 1, "until": 1}, hint=REGISTRATION_OF_PARTY)]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """Those that have expired go, and if there are too many the one that expires first, be it the new one."""
        (kept,) = context.found
        until = float(self.contract.expires_at)
        gone = [one for one in kept if one["until"] <= self.now]
        live = [one for one in kept if one["until"] > self.now]
        if any(one["digest"] == self.contract.digest for one in live):
            return CommandOutcome((), None)
        if len(live) >= self.caps.contracts_with_one:
            earliest = min(live, key=lambda one: float(one["until"]))
            if earliest["until"] > until:
                return CommandOutcome((), None)
            gone.append(earliest)
        document = {
            "_id": self.contract.id,
            "party": context.party.key,
            "until": until,
            "digest": self.contract.digest,
            "text": self.contract.text,
        }
        leaving = build_deletes(REGISTRATIONS, {"_id": {"$in": [one["_id"] for one in gone]}}) if gone else []
        return CommandOutcome(
            [
                *build_party_update(context.party, context.party.registered(until)),
                *leaving,
                *build_inserts(REGISTRATIONS, [document]),
            ],
            None,
        )


@dataclass(frozen=True, slots=True)
class MongoSaveContractCommand:
    """To keep a contract of its owner."""

    did: str
    contract: Contract
    caps: DecentrlQuotas
    now: float

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return CONTRACTS, [self.contract.id]

    @property
    def size(self) -> int:
        return len(self.contract.text)

    def build_queries(self) -> list[MongoCommand]:
        return [
            build_find(
                CONTRACTS.name,
                {"party": make_party_key(self.did), "digest": self.contract.digest},
                limit=1,
                projection={"_id": 1},
                hint=CONTRACT_DIGEST,
            ),
            build_find(CONTRACTS.name, self._with_one(), projection={"_id": 0, "seq": 1}, hint=CONTRACT_OF_PAIR),
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: it would be one too many, and none has expired that could make room."""
        same, with_one = context.found
        if same:
            return CommandOutcome((), None)
        gone: list[Document] = []
        if len(with_one) >= self.caps.contracts_with_one:
            gone = await self._oldest_expired(context, self._with_one(), CONTRACT_OF_PAIR)
        elif context.party.contracts >= self.caps.contracts:
            gone = await self._oldest_expired(context, {"party": context.party.key}, CONTRACT_OF_PARTY)
        document = {
            "_id": self.contract.id,
            **self._with_one(),
            "peer_did": self.contract.peer_did,
            "until": float(self.contract.expires_at),
            "digest": self.contract.digest,
            "text": self.contract.text,
            "seq": Timestamp(0, 0),
        }
        return CommandOutcome(build_party_changes(CONTRACTS, context.party, come=[document], gone=gone), None)

    def _with_one(self) -> Document:
        """All with the same peer."""
        return {"party": make_party_key(self.did), "peer": make_party_key(self.contract.peer_did)}

    async def _oldest_expired(self, context: CommandContext, mine: Document, index: str) -> list[Document]:
        expired = {**mine, "until": {"$lte": self.now}}
        found = await context.transaction.find(
            CONTRACTS.name, expired, sort={"seq": 1}, limit=1, projection={"_id": 1}, hint=index
        )
        if not found:
            raise QuotaExceeded()
        return found


async def find_contracts(
    reading: PartyReader, owner: str, wanted: ContractFilter, part: PageRequest
) -> ResultPage[Contract]:
    party = await reading.party(owner)
    if not party.contracts:
        return build_empty_result()
    filter: Document = {"party": party.key}
    index, total = CONTRACT_OF_PARTY, party.contracts
    if wanted.did not in (None, owner):
        filter["peer"], index = make_party_key(wanted.did or ""), CONTRACT_OF_PAIR
    bounds = {"$gte": wanted.expires_after, "$lte": wanted.expires_before}
    given = {operator: float(bound) for operator, bound in bounds.items() if bound is not None}
    if given:
        filter["until"] = given
    listing = DocumentListing(CONTRACTS.name, filter, {"seq": 1}, index)
    found, total = await reading.page(listing, part, total if len(filter) == 1 else None)
    items = [Contract(one["_id"], owner, one["peer_did"], one["until"], one["digest"], one["text"]) for one in found]
    return ResultPage(tuple(items), total)


async def drop_expired_registrations(client: ReplicaSetClient, now: float) -> int:
    """Those of parties for whom nothing is kept then go as well; how many registrations those were."""
    dropped = await _delete_in_batches(client, REGISTRATIONS, {"until": {"$lte": now}}, REGISTRATION_UNTIL)
    await _delete_in_batches(client, PARTIES, {"unused": True, "registered_until": {"$lte": now}}, PARTY_UNUSED)
    return dropped


async def _delete_in_batches(client: ReplicaSetClient, collection: str, filter: Document, index: str) -> int:
    """In slices, between which others write. What has changed since it was found stays."""
    dropped = 0
    while True:
        found = await client.find("prune", collection, filter, limit=_DELETE_BATCH, projection={"_id": 1}, hint=index)
        if found:
            gone = {"_id": {"$in": [one["_id"] for one in found]}, **filter}
            replies = await client.write("prune", build_deletes(collection, gone))
            dropped += sum(reply["n"] for reply in replies)
        if len(found) < _DELETE_BATCH:
            return dropped


@dataclass(frozen=True, slots=True)
class MongoRequestContractCommand:
    """To let a request wait."""

    request: ContractRequest
    caps: DecentrlQuotas

    @property
    def did(self) -> str:
        return self.request.recipient_did

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return CONTRACT_REQUESTS, [self.request.id]

    @property
    def size(self) -> int:
        return sum_utf8_sizes(self.request.encrypted_contract_request)

    def build_queries(self) -> list[MongoCommand]:
        of_one = {"party": make_party_key(self.did), "sender": make_party_key(self.request.sender_did)}
        return [
            build_find(CONTRACT_REQUESTS.name, of_one, projection={"_id": 0, "sender": 1}, hint=REQUEST_OF_PAIR),
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: too many wait already."""
        (of_one,) = context.found
        if context.party.requests >= self.caps.requests or len(of_one) >= self.caps.requests_of_one:
            raise QuotaExceeded()
        document = {
            "_id": self.request.id,
            "party": context.party.key,
            "sender": make_party_key(self.request.sender_did),
            "sender_did": self.request.sender_did,
            "text": self.request.encrypted_contract_request,
            "public_key": self.request.requestor_ephemeral_public_key,
            "seq": Timestamp(0, 0),
        }
        return CommandOutcome(build_party_changes(CONTRACT_REQUESTS, context.party, come=[document]), None)


@dataclass(frozen=True, slots=True)
class MongoAcknowledgeRequestsCommand:
    """To remove some of a recipient."""

    did: str
    ids: tuple[str, ...]

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def build_queries(self) -> list[MongoCommand]:
        return [build_party_documents_query(CONTRACT_REQUESTS, self.did, self.ids)]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        (found,) = context.found
        return CommandOutcome(build_party_changes(CONTRACT_REQUESTS, context.party, gone=found), None)


async def find_contract_requests(
    reading: PartyReader, recipient: str, part: PageRequest
) -> ResultPage[ContractRequest]:
    party = await reading.party(recipient)
    if not party.requests:
        return build_empty_result()
    listing = DocumentListing(CONTRACT_REQUESTS.name, {"party": party.key}, {"seq": 1}, REQUEST_OF_PARTY)
    found, total = await reading.page(listing, part, party.requests)
    items = [
        ContractRequest(one["_id"], one["sender_did"], recipient, one["text"], one["public_key"]) for one in found
    ]
    return ResultPage(tuple(items), total)
