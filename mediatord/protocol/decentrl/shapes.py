"""
The requests of DCTRL-0004 and DCTRL-0007 as models: the one declaration that commands are checked against and that
the OpenAPI document is written from.

Nothing is coerced: a truth value is no number, and neither is a text of digits. An optional member may be absent, but
not null. Members that are unknown are passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

LONGEST_DID = 2048
LONGEST_TEXT = 1024
MOST_ITEMS = 1000
# In all events of a command together.
MOST_TAGS = 10_000
# Characters of an encrypted request, and bytes of a signed contract as JSON; both have less than a tenth of that.
LONGEST_REQUEST = 16_384
LONGEST_CONTRACT = 16_384
LARGEST_PAGE = 1000
# Times the largest page size, this still is a signed integer of 64 bits, which databases count in.
LAST_PAGE = 2**53 - 1

# 8-4-4-4-12 hexadecimal digits, of whichever version (reference 6.1).
UUID_PATTERN = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_VISIBLE = "^[!-~]+$"


class _NotNull:
    """Takes the null out of a member that may be absent."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = handler(source)["schema"]
        return schema


def _whole(value: object) -> object:
    """JSON has one kind of number: 1.0 and 1e0 are the integer 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


DID = Annotated[str, Field(max_length=LONGEST_DID, pattern=_VISIBLE)]
# Where nothing is stored under a name that does not resolve, any text may stand: whether it is a DID, or a key of
# one, is what SENDER_NOT_FOUND and the like are for.
ClaimedDID = Annotated[str, Field(min_length=1, description="Only a DID is ever found.")]
ClaimedKeyID = Annotated[str, Field(min_length=1, description="Only a DID URL is ever found.")]
Nonce = Annotated[str, Field(pattern=UUID_PATTERN)]
Time = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[Time, Field(description="Unix seconds.")]
Milliseconds = Annotated[Time, Field(description="Unix milliseconds.")]
Text = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
Signature = Annotated[str, Field(repr=False, description="Ed25519, in base64.")]
PublicKey = Annotated[Label, Field(repr=False, description="X25519, in base64.")]
Opaque = Annotated[str, Field(repr=False)]
ID = Annotated[str, Field(max_length=LONGEST_TEXT)]
Tag = Annotated[str, Field(max_length=LONGEST_TEXT)]
PageNumber = Annotated[int, Field(ge=0, le=LAST_PAGE), BeforeValidator(_whole)]
PageSize = Annotated[int, Field(ge=1, le=LARGEST_PAGE), BeforeValidator(_whole)]
Tags = Annotated[tuple[Tag, ...], Field(strict=False, max_length=MOST_ITEMS, repr=False)]
IDs = Annotated[tuple[ID, ...], Field(strict=False, max_length=MOST_ITEMS)]

# Beside `... | None` and a default of None.
OPTIONAL = _NotNull()


class Shape(BaseModel):
    """An object on the wire."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)


class Pagination(Shape):
    """Which part of the result is wanted; `page` counts from 0 (DCTRL-0004 section 9)."""

    page: PageNumber = 0
    page_size: PageSize = 10


class CommunicationContract(Shape):
    """What two identities agree on; times are Unix seconds (DCTRL-0003, reference 7.1)."""

    requestor_did: ClaimedDID
    recipient_did: ClaimedDID
    requestor_signing_key_id: ClaimedKeyID
    recipient_signing_key_id: ClaimedKeyID
    requestor_encryption_public_key: PublicKey
    recipient_encryption_public_key: PublicKey
    expires_at: Seconds
    timestamp: Seconds

    @model_validator(mode="after")
    def _between_two(self) -> CommunicationContract:
        if self.requestor_did == self.recipient_did:
            raise ValueError("a contract with oneself")
        return self


class SignedCommunicationContract(Shape):
    """A contract with the signatures of both (DCTRL-0003, reference 7.1)."""

    communication_contract: CommunicationContract
    requestor_signature: Signature
    recipient_signature: Signature


class RequestCommunicationContract(Shape):
    """Registers with the mediator, or asks another identity for a contract (DCTRL-0004 8.1)."""

    type: Literal["REQUEST_COMMUNICATION_CONTRACT"]
    encrypted_contract_request: Annotated[Text, Field(repr=False, max_length=LONGEST_REQUEST)]
    requestor_ephemeral_public_key: PublicKey


class CommunicationContractResponse(Shape):
    """Gives a contract to the other participant (DCTRL-0004 8.2)."""

    type: Literal["COMMUNICATION_CONTRACT_RESPONSE"]
    signed_communication_contract: SignedCommunicationContract


class QueryPendingCommunicationContractRequests(Shape):
    """Asks which requests for a contract wait for the sender (DCTRL-0004 8.3)."""

    type: Literal["QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS"]
    pagination: Pagination = Pagination()


class AcknowledgePendingCommunicationContractRequests(Shape):
    """Removes requests that wait for the sender; the ids are those of requests (DCTRL-0004 8.4)."""

    type: Literal["ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS"]
    communication_contract_ids: IDs


class SaveCommunicationContract(Shape):
    """Keeps a contract for the sender (DCTRL-0004 8.5)."""

    type: Literal["SAVE_COMMUNICATION_CONTRACT"]
    signed_communication_contract: SignedCommunicationContract


class ContractsFilter(Shape):
    """`did` is either participant; bounds are inclusive, in Unix seconds."""

    did: Annotated[ClaimedDID | None, OPTIONAL] = None
    expires_at_before: Annotated[Seconds | None, OPTIONAL] = None
    expires_at_after: Annotated[Seconds | None, OPTIONAL] = None


class QueryCommunicationContracts(Shape):
    """Asks for contracts of the sender, expired ones too (DCTRL-0004 8.6)."""

    type: Literal["QUERY_COMMUNICATION_CONTRACTS"]
    filter: ContractsFilter = ContractsFilter()
    pagination: Pagination = Pagination()


class PendingEventsFilter(Shape):
    """Events of one sender only."""

    sender_did: Annotated[ClaimedDID | None, OPTIONAL] = None


class QueryPendingEvents(Shape):
    """Asks which events wait for the sender (DCTRL-0004 8.7)."""

    type: Literal["QUERY_PENDING_EVENTS"]
    filter: PendingEventsFilter = PendingEventsFilter()
    pagination: Pagination = Pagination()


class AcknowledgePendingEvents(Shape):
    """Removes events that wait for the sender (DCTRL-0004 8.8)."""

    type: Literal["ACKNOWLEDGE_PENDING_EVENTS"]
    event_ids: IDs


class Tagged(Shape):
    """Something with the tags that its owner has encrypted."""

    encrypted_tags: Tags


class EventToSave(Tagged):
    """One event as its owner stores it; payload and tags are opaque (DCTRL-0004 8.9)."""

    sender_did: DID
    recipient_did: DID
    contract_id: Annotated[ID | None, OPTIONAL] = None
    timestamp: Time
    payload: Opaque


SomeTagged = TypeVar("SomeTagged", bound=Tagged)


def _few_tags(events: tuple[SomeTagged, ...]) -> tuple[SomeTagged, ...]:
    if sum(len(event.encrypted_tags) for event in events) > MOST_TAGS:
        raise ValueError("too many tags")
    return events


class SaveEvents(Shape):
    """Stores events, all or none (DCTRL-0004 8.9)."""

    type: Literal["SAVE_EVENTS"]
    events: Annotated[tuple[EventToSave, ...], Field(strict=False, max_length=MOST_ITEMS), AfterValidator(_few_tags)]


class EventsFilter(Shape):
    """All of it has to match; of the tags one is enough; bounds are inclusive (DCTRL-0004 8.10)."""

    after_timestamp: Annotated[Time | None, OPTIONAL] = None
    before_timestamp: Annotated[Time | None, OPTIONAL] = None
    participant_did: Annotated[ClaimedDID | None, OPTIONAL] = None
    encrypted_tags: Tags = ()
    unprocessed_only: bool = False


class QueryEvents(Shape):
    """Asks for stored events of the sender (DCTRL-0004 8.10)."""

    type: Literal["QUERY_EVENTS"]
    filter: EventsFilter = EventsFilter()
    pagination: Pagination = Pagination()


class TagsToUpdate(Tagged):
    """The tags that an event has from now on."""

    event_id: ID


class UpdateEventTags(Shape):
    """Replaces the tags of stored events and marks them processed (DCTRL-0004 8.11)."""

    type: Literal["UPDATE_EVENT_TAGS"]
    events: Annotated[tuple[TagsToUpdate, ...], Field(strict=False, max_length=MOST_ITEMS), AfterValidator(_few_tags)]


class PublishPublicEvent(Shape):
    """Says something to everybody; content and tags are in the clear (DCTRL-0007, reference 10.1)."""

    type: Literal["PUBLISH_PUBLIC_EVENT"]
    event: Opaque
    tags: Tags
    timestamp: Time
    event_signature: Signature
    channel_id: Annotated[Label | None, OPTIONAL] = None


class DeletePublicEvent(Shape):
    """Takes back what the sender published (DCTRL-0007, reference 10.2)."""

    type: Literal["DELETE_PUBLIC_EVENT"]
    public_event_id: ID


DirectPayload: TypeAlias = (
    RequestCommunicationContract
    | CommunicationContractResponse
    | QueryPendingCommunicationContractRequests
    | AcknowledgePendingCommunicationContractRequests
    | SaveCommunicationContract
    | QueryCommunicationContracts
    | QueryPendingEvents
    | AcknowledgePendingEvents
    | SaveEvents
    | QueryEvents
    | UpdateEventTags
)
PublicPayload: TypeAlias = PublishPublicEvent | DeletePublicEvent


class AuthenticateMessage(Shape):
    """The first frame of a socket; Unix milliseconds (DCTRL-0004 10.2)."""

    type: Literal["AUTHENTICATE"]
    did: ClaimedDID
    signing_key_id: ClaimedKeyID
    timestamp: Milliseconds
    nonce: Nonce
    signature: Signature
