"""Contracts and registrations in MongoDB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bson import Timestamp

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, Contract, ContractFilter, Found, Slice
from mediatord.store.mongo.decentrl_commands import Change, Scene
from mediatord.store.mongo.decentrl_keys import key_of
from mediatord.store.mongo.decentrl_pages import Listing, Reading, nothing
from mediatord.store.mongo.decentrl_parties import changing, exchanging
from mediatord.store.mongo.decentrl_schema import (
    CONTRACT_DIGEST,
    CONTRACT_OF_PAIR,
    CONTRACT_OF_PARTY,
    CONTRACTS,
    PARTIES,
    PARTY_UNUSED,
    REGISTRATION_OF_PARTY,
    REGISTRATION_UNTIL,
    REGISTRATIONS,
    Table,
)
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import Server, deleting, finding, inserting

_AT_A_TIME = 1_000


@dataclass(frozen=True, slots=True)
class Registering:
    """To keep a registration."""

    contract: Contract
    caps: Caps
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

    def asks(self) -> list[Request]:
        mine = {"party": key_of(self.did)}
        return [finding(REGISTRATIONS, mine, projection={"digest": 1, "until": 1}, hint=REGISTRATION_OF_PARTY)]

    async def decide(self, scene: Scene) -> Change[None]:
        """Those that have expired go, and if there are too many the one that expires first, be it the new one."""
        (kept,) = scene.found
        until = float(self.contract.expires_at)
        gone = [one for one in kept if one["until"] <= self.now]
        live = [one for one in kept if one["until"] > self.now]
        if any(one["digest"] == self.contract.digest for one in live):
            return Change((), None)
        if len(live) >= self.caps.contracts_with_one:
            earliest = min(live, key=lambda one: float(one["until"]))
            if earliest["until"] > until:
                return Change((), None)
            gone.append(earliest)
        document = {
            "_id": self.contract.id,
            "party": scene.party.key,
            "until": until,
            "digest": self.contract.digest,
            "text": self.contract.text,
        }
        leaving = deleting(REGISTRATIONS, {"_id": {"$in": [one["_id"] for one in gone]}}) if gone else []
        return Change(
            [*changing(scene.party, scene.party.registered(until)), *leaving, *inserting(REGISTRATIONS, [document])],
            None,
        )


@dataclass(frozen=True, slots=True)
class Agreeing:
    """To keep a contract of its owner."""

    did: str
    contract: Contract
    caps: Caps
    now: float

    @property
    def creates(self) -> tuple[Table, Sequence[str]]:
        return CONTRACTS, [self.contract.id]

    @property
    def size(self) -> int:
        return len(self.contract.text)

    def asks(self) -> list[Request]:
        return [
            finding(
                CONTRACTS.name,
                {"party": key_of(self.did), "digest": self.contract.digest},
                limit=1,
                projection={"_id": 1},
                hint=CONTRACT_DIGEST,
            ),
            finding(CONTRACTS.name, self._with_one(), projection={"_id": 0, "seq": 1}, hint=CONTRACT_OF_PAIR),
        ]

    async def decide(self, scene: Scene) -> Change[None]:
        """:raise OverQuota: it would be one too many, and none has expired that could make room."""
        same, with_one = scene.found
        if same:
            return Change((), None)
        gone: list[Document] = []
        if len(with_one) >= self.caps.contracts_with_one:
            gone = await self._oldest_expired(scene, self._with_one(), CONTRACT_OF_PAIR)
        elif scene.party.contracts >= self.caps.contracts:
            gone = await self._oldest_expired(scene, {"party": scene.party.key}, CONTRACT_OF_PARTY)
        document = {
            "_id": self.contract.id,
            **self._with_one(),
            "peer_did": self.contract.peer_did,
            "until": float(self.contract.expires_at),
            "digest": self.contract.digest,
            "text": self.contract.text,
            "seq": Timestamp(0, 0),
        }
        return Change(exchanging(CONTRACTS, scene.party, come=[document], gone=gone), None)

    def _with_one(self) -> Document:
        """All with the same peer."""
        return {"party": key_of(self.did), "peer": key_of(self.contract.peer_did)}

    async def _oldest_expired(self, scene: Scene, mine: Document, index: str) -> list[Document]:
        expired = {**mine, "until": {"$lte": self.now}}
        found = await scene.transaction.find(
            CONTRACTS.name, expired, sort={"seq": 1}, limit=1, projection={"_id": 1}, hint=index
        )
        if not found:
            raise OverQuota()
        return found


async def contracts(reading: Reading, owner: str, wanted: ContractFilter, part: Slice) -> Found[Contract]:
    party = await reading.party(owner)
    if not party.contracts:
        return nothing()
    filter: Document = {"party": party.key}
    index, total = CONTRACT_OF_PARTY, party.contracts
    if wanted.did not in (None, owner):
        filter["peer"], index = key_of(wanted.did or ""), CONTRACT_OF_PAIR
    bounds = {"$gte": wanted.expires_after, "$lte": wanted.expires_before}
    given = {operator: float(bound) for operator, bound in bounds.items() if bound is not None}
    if given:
        filter["until"] = given
    listing = Listing(CONTRACTS.name, filter, {"seq": 1}, index)
    found, total = await reading.page(listing, part, total if len(filter) == 1 else None)
    items = [Contract(one["_id"], owner, one["peer_did"], one["until"], one["digest"], one["text"]) for one in found]
    return Found(tuple(items), total)


async def drop_expired_registrations(server: Server, now: float) -> int:
    """Those of parties for whom nothing is kept then go as well; how many registrations those were."""
    dropped = await _drop_all(server, REGISTRATIONS, {"until": {"$lte": now}}, REGISTRATION_UNTIL)
    await _drop_all(server, PARTIES, {"unused": True, "registered_until": {"$lte": now}}, PARTY_UNUSED)
    return dropped


async def _drop_all(server: Server, collection: str, filter: Document, index: str) -> int:
    """In slices, between which others write. What has changed since it was found stays."""
    dropped = 0
    while True:
        found = await server.find("prune", collection, filter, limit=_AT_A_TIME, projection={"_id": 1}, hint=index)
        if found:
            gone = {"_id": {"$in": [one["_id"] for one in found]}, **filter}
            replies = await server.write("prune", deleting(collection, gone))
            dropped += sum(reply["n"] for reply in replies)
        if len(found) < _AT_A_TIME:
            return dropped
