"""Contracts, registrations and contract requests of Decentrl parties."""

from __future__ import annotations

from collections.abc import Sequence

from bson import Timestamp

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    PageRequest,
    ResultPage,
)
from mediatord.store.mongo.decentrl_commands import CommandContext, DecentrlCommandRunner, Decision
from mediatord.store.mongo.decentrl_parties import (
    EMPTY_PAGE,
    DocumentListing,
    build_pair_filter,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    make_party_key,
    read_party,
    sum_utf8_sizes,
)
from mediatord.store.mongo.driver.collection import Document
from mediatord.store.mongo.driver.operation import Operation, operation
from mediatord.store.mongo.schema import CONTRACT_REQUESTS, CONTRACTS, PARTIES, REGISTRATIONS

_DELETE_BATCH = 1_000


class MongoContractStore(DecentrlCommandRunner):
    """Contracts in MongoDB; see `IDecentrlStore`."""

    _caps: DecentrlQuotas

    @operation
    async def registered_until(self, did: str) -> float | None:
        self._clocks.check()
        now = self._clock.seconds()

        async def read(run: Operation) -> float | None:
            until = (await read_party(run, did)).registered_until
            return until if until > now else None

        return await self._client.operate("registered_until", read)

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
            requests = build_party_update(context.party, context.party.registered(until))
            if gone:
                requests += REGISTRATIONS.delete({"_id": {"$in": [one["_id"] for one in gone]}})
            return [*requests, *REGISTRATIONS.insert([document])], None

        mine = {"party": make_party_key(contract.peer_did)}
        query = REGISTRATIONS.find(mine, projection={"digest": 1, "until": 1}, hint="registration_of_party")
        await self._run("save_contract", guard, contract.peer_did, register, query, size=len(contract.text))

    @operation
    async def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> ResultPage[Contract]:
        async def read(run: Operation) -> ResultPage[Contract]:
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

        return await self._client.operate("contracts", read)

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
        made, size = (CONTRACT_REQUESTS, [request.id]), sum_utf8_sizes(request.encrypted_contract_request)
        await self._run("request_contract", guard, recipient, save, query, creates=made, size=size)

    @operation
    async def contract_requests(self, recipient: str, part: PageRequest) -> ResultPage[ContractRequest]:
        async def read(run: Operation) -> ResultPage[ContractRequest]:
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

        return await self._client.operate("contract_requests", read)

    @operation
    async def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> None:
        async def delete(context: CommandContext) -> Decision[None]:
            return build_party_changes(CONTRACT_REQUESTS, context.party, gone=context.found[0]), None

        query = build_party_documents_query(CONTRACT_REQUESTS, recipient, ids)
        await self._run("acknowledge_requests", guard, recipient, delete, query)

    @operation
    async def drop_expired_registrations(self) -> int:
        """Delete expired registrations, and then parties without any documents; return the number of the former."""
        now, delete = self._clock.seconds(), self._client.delete_in_batches
        expired, unused = {"until": {"$lte": now}}, {"unused": True, "registered_until": {"$lte": now}}
        dropped = await delete("prune", REGISTRATIONS, expired, batch=_DELETE_BATCH, hint="registration_until")
        await delete("prune", PARTIES, unused, batch=_DELETE_BATCH, hint="party_unused")
        return dropped


async def _find_oldest_expired(context: CommandContext, mine: Document, now: float, index: str) -> list[Document]:
    """:raise QuotaExceeded: none has expired."""
    query = CONTRACTS.find(
        {**mine, "until": {"$lte": now}}, sort={"seq": 1}, limit=1, projection={"_id": 1}, hint=index
    )
    if found := await context.transaction.query(query):
        return found
    raise QuotaExceeded()
