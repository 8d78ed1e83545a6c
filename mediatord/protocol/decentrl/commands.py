"""
The requests of DCTRL-0004 and DCTRL-0007 as models: the one declaration that commands are checked against and that
the OpenAPI document is written from.

Nothing is coerced: a truth value is no number, and neither is a text of digits. An optional member may be absent, but
not null. Members that are unknown are passed over.

What a reader of a public channel asks for in a URL (DCTRL-0007, reference 10.3).

Commands as they arrive by POST, and the first frame of a socket (DCTRL-0004 sections 4 and 10.2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
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

from mediatord.errors import InvalidCommand, InvalidMessage
from mediatord.protocol import encoding
from mediatord.protocol.decentrl import canonical_json
from mediatord.protocol.encoding import JSONSource

MAX_DID_CHARACTERS = 2048
MAX_TEXT_CHARACTERS = 1024
MAX_ITEMS = 1000
# In all events of a command together.
MAX_TAGS = 10_000
# Characters of an encrypted request, and bytes of a signed contract as JSON; both have less than a tenth of that.
MAX_CONTRACT_REQUEST_CHARACTERS = 16_384
MAX_CONTRACT_BYTES = 16_384
MAX_PAGE_SIZE = 1000
# Times the largest page size, this still is a signed integer of 64 bits, which databases count in.
MAX_PAGE_NUMBER = 2**53 - 1

# 8-4-4-4-12 hexadecimal digits, of whichever version (reference 6.1).
UUID_PATTERN = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_VISIBLE_CHARACTERS = "^[!-~]+$"


class _NonNullable:
    """Takes the null out of a member that may be absent."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = handler(source)["schema"]
        return schema


def _to_integer(value: object) -> object:
    """JSON has one kind of number: 1.0 and 1e0 are the integer 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


DID = Annotated[str, Field(max_length=MAX_DID_CHARACTERS, pattern=_VISIBLE_CHARACTERS)]
# Where nothing is stored under a name that does not resolve, any text may stand: whether it is a DID, or a key of
# one, is what SENDER_NOT_FOUND and the like are for.
ClaimedDID = Annotated[str, Field(min_length=1, description="Only a DID is ever found.")]
ClaimedKeyID = Annotated[str, Field(min_length=1, description="Only a DID URL is ever found.")]
Nonce = Annotated[str, Field(pattern=UUID_PATTERN)]
Timestamp = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[Timestamp, Field(description="Unix seconds.")]
Milliseconds = Annotated[Timestamp, Field(description="Unix milliseconds.")]
Text = Annotated[str, Field(min_length=1)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
Signature = Annotated[str, Field(repr=False, description="Ed25519, in base64.")]
EncryptionPublicKey = Annotated[ShortText, Field(repr=False, description="X25519, in base64.")]
OpaqueText = Annotated[str, Field(repr=False)]
RecordID = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
Tag = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
PageNumber = Annotated[int, Field(ge=0, le=MAX_PAGE_NUMBER), BeforeValidator(_to_integer)]
PageSize = Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE), BeforeValidator(_to_integer)]
Tags = Annotated[tuple[Tag, ...], Field(strict=False, max_length=MAX_ITEMS, repr=False)]
RecordIDs = Annotated[tuple[RecordID, ...], Field(strict=False, max_length=MAX_ITEMS)]

# Beside `... | None` and a default of None.
OPTIONAL = _NonNullable()


class WireModel(BaseModel):
    """An object on the wire."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)


class Pagination(WireModel):
    """Which part of the result is wanted; `page` counts from 0 (DCTRL-0004 section 9)."""

    page: PageNumber = 0
    page_size: PageSize = 10


class CommunicationContract(WireModel):
    """What two identities agree on; times are Unix seconds (DCTRL-0003, reference 7.1)."""

    requestor_did: ClaimedDID
    recipient_did: ClaimedDID
    requestor_signing_key_id: ClaimedKeyID
    recipient_signing_key_id: ClaimedKeyID
    requestor_encryption_public_key: EncryptionPublicKey
    recipient_encryption_public_key: EncryptionPublicKey
    expires_at: Seconds
    timestamp: Seconds

    @model_validator(mode="after")
    def _between_two(self) -> CommunicationContract:
        if self.requestor_did == self.recipient_did:
            raise ValueError("a contract with oneself")
        return self


class SignedCommunicationContract(WireModel):
    """A contract with the signatures of both (DCTRL-0003, reference 7.1)."""

    communication_contract: CommunicationContract
    requestor_signature: Signature
    recipient_signature: Signature


class RequestCommunicationContract(WireModel):
    """Registers with the mediator, or asks another identity for a contract (DCTRL-0004 8.1)."""

    type: Literal["REQUEST_COMMUNICATION_CONTRACT"]
    encrypted_contract_request: Annotated[Text, Field(repr=False, max_length=MAX_CONTRACT_REQUEST_CHARACTERS)]
    requestor_ephemeral_public_key: EncryptionPublicKey


class CommunicationContractResponse(WireModel):
    """Gives a contract to the other participant (DCTRL-0004 8.2)."""

    type: Literal["COMMUNICATION_CONTRACT_RESPONSE"]
    signed_communication_contract: SignedCommunicationContract


class QueryPendingCommunicationContractRequests(WireModel):
    """Asks which requests for a contract wait for the sender (DCTRL-0004 8.3)."""

    type: Literal["QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS"]
    pagination: Pagination = Pagination()


class AcknowledgePendingCommunicationContractRequests(WireModel):
    """Removes requests that wait for the sender; the ids are those of requests (DCTRL-0004 8.4)."""

    type: Literal["ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS"]
    communication_contract_ids: RecordIDs


class SaveCommunicationContract(WireModel):
    """Keeps a contract for the sender (DCTRL-0004 8.5)."""

    type: Literal["SAVE_COMMUNICATION_CONTRACT"]
    signed_communication_contract: SignedCommunicationContract


class ContractsFilter(WireModel):
    """`did` is either participant; bounds are inclusive, in Unix seconds."""

    did: Annotated[ClaimedDID | None, OPTIONAL] = None
    expires_at_before: Annotated[Seconds | None, OPTIONAL] = None
    expires_at_after: Annotated[Seconds | None, OPTIONAL] = None


class QueryCommunicationContracts(WireModel):
    """Asks for contracts of the sender, expired ones too (DCTRL-0004 8.6)."""

    type: Literal["QUERY_COMMUNICATION_CONTRACTS"]
    filter: ContractsFilter = ContractsFilter()
    pagination: Pagination = Pagination()


class PendingEventsFilter(WireModel):
    """Events of one sender only."""

    sender_did: Annotated[ClaimedDID | None, OPTIONAL] = None


class QueryPendingEvents(WireModel):
    """Asks which events wait for the sender (DCTRL-0004 8.7)."""

    type: Literal["QUERY_PENDING_EVENTS"]
    filter: PendingEventsFilter = PendingEventsFilter()
    pagination: Pagination = Pagination()


class AcknowledgePendingEvents(WireModel):
    """Removes events that wait for the sender (DCTRL-0004 8.8)."""

    type: Literal["ACKNOWLEDGE_PENDING_EVENTS"]
    event_ids: RecordIDs


class TaggedEvent(WireModel):
    """Something with the tags that its owner has encrypted."""

    encrypted_tags: Tags


class EventToSave(TaggedEvent):
    """One event as its owner stores it; payload and tags are opaque (DCTRL-0004 8.9)."""

    sender_did: DID
    recipient_did: DID
    contract_id: Annotated[RecordID | None, OPTIONAL] = None
    timestamp: Timestamp
    payload: OpaqueText


AnyTaggedEvent = TypeVar("AnyTaggedEvent", bound=TaggedEvent)


def _check_tag_count(events: tuple[AnyTaggedEvent, ...]) -> tuple[AnyTaggedEvent, ...]:
    if sum(len(event.encrypted_tags) for event in events) > MAX_TAGS:
        raise ValueError("too many tags")
    return events


class SaveEvents(WireModel):
    """Stores events, all or none (DCTRL-0004 8.9)."""

    type: Literal["SAVE_EVENTS"]
    events: Annotated[
        tuple[EventToSave, ...], Field(strict=False, max_length=MAX_ITEMS), AfterValidator(_check_tag_count)
    ]


class EventsFilter(WireModel):
    """All of it has to match; of the tags one is enough; bounds are inclusive (DCTRL-0004 8.10)."""

    after_timestamp: Annotated[Timestamp | None, OPTIONAL] = None
    before_timestamp: Annotated[Timestamp | None, OPTIONAL] = None
    participant_did: Annotated[ClaimedDID | None, OPTIONAL] = None
    encrypted_tags: Tags = ()
    unprocessed_only: bool = False


class QueryEvents(WireModel):
    """Asks for stored events of the sender (DCTRL-0004 8.10)."""

    type: Literal["QUERY_EVENTS"]
    filter: EventsFilter = EventsFilter()
    pagination: Pagination = Pagination()


class TagsToUpdate(TaggedEvent):
    """The tags that an event has from now on."""

    event_id: RecordID


class UpdateEventTags(WireModel):
    """Replaces the tags of stored events and marks them processed (DCTRL-0004 8.11)."""

    type: Literal["UPDATE_EVENT_TAGS"]
    events: Annotated[
        tuple[TagsToUpdate, ...], Field(strict=False, max_length=MAX_ITEMS), AfterValidator(_check_tag_count)
    ]


class PublishPublicEvent(WireModel):
    """Says something to everybody; content and tags are in the clear (DCTRL-0007, reference 10.1)."""

    type: Literal["PUBLISH_PUBLIC_EVENT"]
    event: OpaqueText
    tags: Tags
    timestamp: Timestamp
    event_signature: Signature
    channel_id: Annotated[ShortText | None, OPTIONAL] = None


class DeletePublicEvent(WireModel):
    """Takes back what the sender published (DCTRL-0007, reference 10.2)."""

    type: Literal["DELETE_PUBLIC_EVENT"]
    public_event_id: RecordID


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


class AuthenticateMessage(WireModel):
    """The first frame of a socket; Unix milliseconds (DCTRL-0004 10.2)."""

    type: Literal["AUTHENTICATE"]
    did: ClaimedDID
    signing_key_id: ClaimedKeyID
    timestamp: Milliseconds
    nonce: Nonce
    signature: Signature


# A number as JSON has it, and nothing around it: Python itself would take `1_0`, ` 1`, `+1` and `inf`.
_JSON_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_PARAMETERS = (b"after", b"before", b"page", b"page_size")


class PublicQuery(WireModel):
    """All of it has to match; of the tags one is enough; bounds are inclusive, in the unit of the events."""

    tags: Tags = ()
    after: Annotated[Timestamp | None, OPTIONAL] = None
    before: Annotated[Timestamp | None, OPTIONAL] = None
    channel_id: Annotated[ShortText | None, OPTIONAL] = None
    page: PageNumber = 0
    page_size: PageSize = 20


def parse_public_query(arguments: Mapping[bytes, Sequence[bytes]]) -> PublicQuery:
    """
    Read the query part of a URL; parameters that are unknown are passed over.

    :param arguments: all values of each parameter, percent-decoded.
    :raise InvalidCommand: a value that its parameter cannot have, or several where there is one at most.
    """
    try:
        asked: dict[str, Any] = {"tags": _parse_tags(arguments.get(b"tags", ()))}
        asked |= {
            name.decode("ascii"): _parse_number(arguments[name]) for name in _NUMBER_PARAMETERS if name in arguments
        }
        if b"channel_id" in arguments:
            asked["channel_id"] = _require_single(arguments[b"channel_id"]).decode("utf-8")
        return PublicQuery.model_validate(asked)
    except ValueError:
        raise InvalidCommand from None


def _parse_tags(values: Sequence[bytes]) -> list[str]:
    """Joined by commas, repeated, or both; between two commas with nothing in between there is no tag."""
    return [tag for value in values for tag in value.decode("utf-8").split(",") if tag]


def _parse_number(values: Sequence[bytes]) -> Any:
    text = _require_single(values)
    if not _JSON_NUMBER.fullmatch(text):
        raise ValueError("not a number")
    return encoding.loads(text)


def _require_single(values: Sequence[bytes]) -> bytes:
    if len(values) != 1:
        raise ValueError("not one value")
    return values[0]


ChannelType: TypeAlias = Literal["DIRECT_AUTHENTICATED", "TWO_WAY_PRIVATE", "ONE_WAY_PUBLIC"]

_EMPTY_DOCUMENT: Mapping[str, Any] = MappingProxyType({})


class CommandHeader(WireModel):
    """Who says something to whom, and when: Unix milliseconds (DCTRL-0004 4.2)."""

    sender_did: ClaimedDID
    sender_signing_key_id: ClaimedKeyID
    recipient_did: ClaimedDID
    timestamp: Milliseconds
    nonce: Nonce


class DirectHeader(CommandHeader):
    """Of a command to a mediator."""

    channel: Literal["DIRECT_AUTHENTICATED"]


class PrivateHeader(CommandHeader):
    """Of an event for another identity."""

    channel: Literal["TWO_WAY_PRIVATE"]


class PublicHeader(CommandHeader):
    """Of a command about a public channel."""

    channel: Literal["ONE_WAY_PUBLIC"]


class DirectCommand(WireModel):
    """What an identity asks of a mediator (DCTRL-0004 sections 6 and 8)."""

    header: DirectHeader
    payload: Annotated[DirectPayload, Field(discriminator="type")]
    signature: Signature


class PrivateCommand(WireModel):
    """An encrypted event for another identity (DCTRL-0004 section 7)."""

    header: PrivateHeader
    payload: Annotated[Text, Field(repr=False)]
    signature: Signature


class PublicCommand(WireModel):
    """What a publisher asks of its mediator (DCTRL-0007)."""

    header: PublicHeader
    payload: Annotated[PublicPayload, Field(discriminator="type")]
    signature: Signature


CommandModel: TypeAlias = DirectCommand | PrivateCommand | PublicCommand

_MODEL_OF_CHANNEL: Mapping[str, type[CommandModel]] = {
    "DIRECT_AUTHENTICATED": DirectCommand,
    "TWO_WAY_PRIVATE": PrivateCommand,
    "ONE_WAY_PUBLIC": PublicCommand,
}
_SIGNED_MEMBERS = ("did", "signing_key_id", "timestamp", "nonce")


@dataclass(frozen=True, slots=True)
class DecentrlCommand:
    """
    A command whose shape is right, and nothing more: it may be stale, repeated, or signed by nobody.

    :param document: the payload as it came, unknown members included; empty on TWO_WAY_PRIVATE.
    :param signed: what the signature is over.
    :param source: the JSON that it was read from.
    """

    envelope: CommandModel
    document: Mapping[str, Any] = field(repr=False)
    signed: bytes = field(repr=False)
    source: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Type of the payload; where that has none, the channel."""
        payload = self.envelope.payload
        return "TWO_WAY_PRIVATE" if isinstance(payload, str) else payload.type

    @property
    def channel(self) -> ChannelType:
        """Which rules it is under."""
        return self.envelope.header.channel

    @property
    def sender_did(self) -> str:
        """Who claims to send it."""
        return self.envelope.header.sender_did

    @property
    def sender_signing_key_id(self) -> str:
        """The key that it claims to be signed with."""
        return self.envelope.header.sender_signing_key_id

    @property
    def recipient_did(self) -> str:
        """Whom it is for."""
        return self.envelope.header.recipient_did

    @property
    def timestamp_ms(self) -> float:
        """When it was sent, as its sender says: milliseconds."""
        return self.envelope.header.timestamp

    @property
    def nonce(self) -> str:
        """Unique among the commands of its sender."""
        return self.envelope.header.nonce

    @property
    def payload(self) -> DirectPayload | PublicPayload | str:
        """A model, or the opaque text of an event on TWO_WAY_PRIVATE."""
        return self.envelope.payload

    @property
    def signature(self) -> str:
        """Base64, unless it is malformed."""
        return self.envelope.signature

    def text(self, name: str) -> bytes:
        """
        How a member of the payload is written.

        :raise InvalidCommand: there is none, or there are more members around it than any command has.
        """
        source = JSONSource(self.source)
        try:
            span = source.find("payload", name)
        except ValueError:
            raise InvalidCommand from None
        if span is None:
            raise InvalidCommand
        return source.text(span)


def parse_command(raw: bytes) -> DecentrlCommand:
    """
    Read the body of a POST.

    What is signed is taken from what arrived, unknown members and all: a model would add and drop some.

    :raise InvalidCommand: it is no command, whatever else it is.
    """
    try:
        document = canonical_json.loads(raw)
        envelope = _find_model(document).model_validate(document)
        payload = document["payload"]
        signed = canonical_json.canonicalize({"header": document["header"], "payload": payload})
    except ValueError:
        raise InvalidCommand from None
    return DecentrlCommand(envelope, payload if isinstance(payload, dict) else _EMPTY_DOCUMENT, signed, raw)


def _find_model(document: Mapping[str, Any]) -> type[CommandModel]:
    header = document.get("header")
    channel = header.get("channel") if isinstance(header, dict) else None
    if not isinstance(channel, str) or channel not in _MODEL_OF_CHANNEL:
        raise ValueError("no channel")
    return _MODEL_OF_CHANNEL[channel]


@dataclass(frozen=True, slots=True)
class AuthenticationRequest:
    """
    What a socket says of itself, not proven yet.

    :param timestamp_ms: milliseconds.
    :param signed: what the signature is over.
    """

    did: str
    signing_key_id: str
    timestamp_ms: float
    nonce: str
    signature: str = field(repr=False)
    signed: bytes = field(repr=False)


def parse_authentication_request(raw: bytes) -> AuthenticationRequest:
    """
    Read the first frame of a socket.

    :raise InvalidMessage: it is no authentication, whatever else it is.
    """
    try:
        document = canonical_json.loads(raw)
        said = AuthenticateMessage.model_validate(document)
        signed = canonical_json.canonicalize({name: document[name] for name in _SIGNED_MEMBERS})
    except ValueError:
        raise InvalidMessage from None
    return AuthenticationRequest(said.did, said.signing_key_id, said.timestamp, said.nonce, said.signature, signed)


def is_didcomm_envelope(frame: bytes) -> bool:
    """Whether the first frame of a socket is a DIDComm envelope: a JSON object with `protected`."""
    try:
        # Nobody has paid for the frame yet, so it is not parsed in vain.
        return (b"protected" in frame or b"\\u" in frame) and "protected" in encoding.loads_object(frame)
    except ValueError:
        return False
