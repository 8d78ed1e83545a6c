"""Contracts, registrations and contract requests of Decentrl parties."""

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
from mediatord.store.mongo.decentrl_commands import CommandContext, CommandOutcome, MongoStoreCommand
from mediatord.store.mongo.decentrl_parties import (
    EMPTY_PAGE,
    DocumentListing,
    PartyReader,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    make_party_key,
    sum_utf8_sizes,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_deletes, build_find, build_inserts
from mediatord.store.mongo.schema import CONTRACT_REQUESTS, CONTRACTS, PARTIES, REGISTRATIONS, PartyCollection

_DELETE_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class MongoRegisterCommand(MongoStoreCommand[None]):
    """
    Stores a registration: a contract with the mediator.

    :param did: its peer.
    """

    did: str
    contract: Contract
    caps: DecentrlQuotas
    now: float

    @property
    def size(self) -> int:
        return len(self.contract.text)

    def build_queries(self) -> list[MongoCommand]:
        mine = {"party": make_party_key(self.did)}
        return [build_find(REGISTRATIONS, mine, projection={"digest": 1, "until": 1}, hint="registration_of_party")]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """Delete expired registrations, and of too many the one that expires first, which may be the new one."""
        (found,) = context.found
        until = float(self.contract.expires_at)
        gone = [one for one in found if one["until"] <= self.now]
        live = [one for one in found if one["until"] > self.now]
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
        requests = build_party_update(context.party, context.party.registered(until))
        if gone:
            requests += build_deletes(REGISTRATIONS, {"_id": {"$in": [one["_id"] for one in gone]}})
        return CommandOutcome([*requests, *build_inserts(REGISTRATIONS, [document])], None)


@dataclass(frozen=True, slots=True)
class MongoSaveContractCommand(MongoStoreCommand[None]):
    """Stores a contract for its owner."""

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
        same = {"party": make_party_key(self.did), "digest": self.contract.digest}
        return [
            build_find(CONTRACTS.name, same, limit=1, projection={"_id": 1}, hint="contract_digest"),
            build_find(CONTRACTS.name, self._of_pair(), projection={"_id": 0, "seq": 1}, hint="contract_of_pair"),
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: there are too many, none of them expired."""
        same, of_pair = context.found
        if same:
            return CommandOutcome((), None)
        gone: list[Document] = []
        if len(of_pair) >= self.caps.contracts_with_one:
            gone = await self._find_oldest_expired(context, self._of_pair(), "contract_of_pair")
        elif context.party.contracts >= self.caps.contracts:
            gone = await self._find_oldest_expired(context, {"party": context.party.key}, "contract_of_party")
        document = {
            "_id": self.contract.id,
            **self._of_pair(),
            "peer_did": self.contract.peer_did,
            "until": float(self.contract.expires_at),
            "digest": self.contract.digest,
            "text": self.contract.text,
            "seq": Timestamp(0, 0),
        }
        return CommandOutcome(build_party_changes(CONTRACTS, context.party, come=[document], gone=gone), None)

    def _of_pair(self) -> Document:
        return {"party": make_party_key(self.did), "peer": make_party_key(self.contract.peer_did)}

    async def _find_oldest_expired(self, context: CommandContext, mine: Document, index: str) -> list[Document]:
        """:raise QuotaExceeded: none has expired."""
        expired = {**mine, "until": {"$lte": self.now}}
        found = await context.transaction.find(
            CONTRACTS.name, expired, sort={"seq": 1}, limit=1, projection={"_id": 1}, hint=index
        )
        if not found:
            raise QuotaExceeded()
        return found


@dataclass(frozen=True, slots=True)
class MongoRequestContractCommand(MongoStoreCommand[None]):
    """Stores a contract request for its recipient."""

    did: str
    request: ContractRequest
    caps: DecentrlQuotas

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return CONTRACT_REQUESTS, [self.request.id]

    @property
    def size(self) -> int:
        return sum_utf8_sizes(self.request.encrypted_contract_request)

    def build_queries(self) -> list[MongoCommand]:
        of_pair = {"party": make_party_key(self.did), "sender": make_party_key(self.request.sender_did)}
        return [
            build_find(CONTRACT_REQUESTS.name, of_pair, projection={"_id": 0, "sender": 1}, hint="request_of_pair")
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: there are too many."""
        (of_pair,) = context.found
        if context.party.requests >= self.caps.requests or len(of_pair) >= self.caps.requests_of_one:
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
class MongoAcknowledgeRequestsCommand(MongoStoreCommand[None]):
    """Deletes contract requests of a recipient."""

    did: str
    ids: tuple[str, ...]

    def build_queries(self) -> list[MongoCommand]:
        return [build_party_documents_query(CONTRACT_REQUESTS, self.did, self.ids)]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        (found,) = context.found
        return CommandOutcome(build_party_changes(CONTRACT_REQUESTS, context.party, gone=found), None)


async def find_contracts(
    reader: PartyReader, owner: str, wanted: ContractFilter, page: PageRequest
) -> ResultPage[Contract]:
    party = await reader.read_party(owner)
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
    listing = DocumentListing(CONTRACTS.name, filter, {"seq": 1}, index)
    found, total = await reader.read_page(listing, page, party.contracts if len(filter) == 1 else None)
    items = [Contract(one["_id"], owner, one["peer_did"], one["until"], one["digest"], one["text"]) for one in found]
    return ResultPage(tuple(items), total)


async def find_contract_requests(
    reader: PartyReader, recipient: str, page: PageRequest
) -> ResultPage[ContractRequest]:
    party = await reader.read_party(recipient)
    if not party.requests:
        return EMPTY_PAGE
    listing = DocumentListing(CONTRACT_REQUESTS.name, {"party": party.key}, {"seq": 1}, "request_of_party")
    found, total = await reader.read_page(listing, page, party.requests)
    items = [
        ContractRequest(one["_id"], one["sender_did"], recipient, one["text"], one["public_key"]) for one in found
    ]
    return ResultPage(tuple(items), total)


async def drop_expired_registrations(client: ReplicaSetClient, now: float) -> int:
    """Delete expired registrations, and then parties without any documents; return the number of registrations."""
    expired = {"until": {"$lte": now}}
    dropped = await client.delete_in_batches(
        "prune", REGISTRATIONS, expired, batch=_DELETE_BATCH, hint="registration_until"
    )
    unused = {"unused": True, "registered_until": {"$lte": now}}
    await client.delete_in_batches("prune", PARTIES, unused, batch=_DELETE_BATCH, hint="party_unused")
    return dropped
