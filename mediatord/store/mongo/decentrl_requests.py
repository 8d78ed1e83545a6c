"""Contract requests in MongoDB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bson import Timestamp

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, ContractRequest, Found, Slice
from mediatord.store.mongo.decentrl_commands import Change, Scene
from mediatord.store.mongo.decentrl_keys import key_of, size_of
from mediatord.store.mongo.decentrl_pages import Listing, Reading, nothing
from mediatord.store.mongo.decentrl_parties import exchanging, of_party
from mediatord.store.mongo.decentrl_schema import REQUEST_OF_PAIR, REQUEST_OF_PARTY, REQUESTS, Table
from mediatord.store.mongo.requests import Request
from mediatord.store.mongo.server import finding


@dataclass(frozen=True, slots=True)
class Requesting:
    """To let a request wait."""

    request: ContractRequest
    caps: Caps

    @property
    def did(self) -> str:
        return self.request.recipient_did

    @property
    def creates(self) -> tuple[Table, Sequence[str]]:
        return REQUESTS, [self.request.id]

    @property
    def size(self) -> int:
        return size_of(self.request.encrypted_contract_request)

    def asks(self) -> list[Request]:
        of_one = {"party": key_of(self.did), "sender": key_of(self.request.sender_did)}
        return [
            finding(REQUESTS.name, of_one, projection={"_id": 0, "sender": 1}, hint=REQUEST_OF_PAIR),
        ]

    async def decide(self, scene: Scene) -> Change[None]:
        """:raise OverQuota: too many wait already."""
        (of_one,) = scene.found
        if scene.party.requests >= self.caps.requests or len(of_one) >= self.caps.requests_of_one:
            raise OverQuota()
        document = {
            "_id": self.request.id,
            "party": scene.party.key,
            "sender": key_of(self.request.sender_did),
            "sender_did": self.request.sender_did,
            "text": self.request.encrypted_contract_request,
            "public_key": self.request.requestor_ephemeral_public_key,
            "seq": Timestamp(0, 0),
        }
        return Change(exchanging(REQUESTS, scene.party, come=[document]), None)


@dataclass(frozen=True, slots=True)
class AcknowledgingRequests:
    """To remove some of a recipient."""

    did: str
    ids: tuple[str, ...]

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def asks(self) -> list[Request]:
        return [of_party(REQUESTS, self.did, self.ids)]

    async def decide(self, scene: Scene) -> Change[None]:
        (found,) = scene.found
        return Change(exchanging(REQUESTS, scene.party, gone=found), None)


async def requests(reading: Reading, recipient: str, part: Slice) -> Found[ContractRequest]:
    party = await reading.party(recipient)
    if not party.requests:
        return nothing()
    listing = Listing(REQUESTS.name, {"party": party.key}, {"seq": 1}, REQUEST_OF_PARTY)
    found, total = await reading.page(listing, part, party.requests)
    items = [
        ContractRequest(one["_id"], one["sender_did"], recipient, one["text"], one["public_key"]) for one in found
    ]
    return Found(tuple(items), total)
