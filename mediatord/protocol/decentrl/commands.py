"""
Decentrl requests (DCTRL-0004, DCTRL-0007): models of commands, public channel queries and socket authentication.

The models validate requests and are the source of the OpenAPI document. Nothing is coerced: booleans and numeric
strings are no numbers. Optional members may be absent, but not null; unknown members are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
# In all events of one command.
MAX_TAGS = 10_000
# Characters of an encrypted request, and bytes of a signed contract as JSON; real ones take less than a tenth.
MAX_CONTRACT_REQUEST_CHARACTERS = 16_384
MAX_CONTRACT_BYTES = 16_384
# Of an encrypted device for push notifications; the longest token takes two thirds.
MAX_PUSH_DEVICE_CHARACTERS = 8192
MAX_PAGE_SIZE = 1000
# Its product with the largest page size fits into a signed 64-bit integer, as databases use.
MAX_PAGE_NUMBER = 2**53 - 1

# UUID of any version (reference 6.1).
UUID_PATTERN = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_VISIBLE_CHARACTERS = "^[!-~]+$"


class _NonNullable:
    """Removes null from the type of an optional member."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = handler(source)["schema"]
        return schema


def _to_integer(value: object) -> object:
    """JSON has one number type: 1.0 and 1e0 are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


DID = Annotated[str, Field(max_length=MAX_DID_CHARACTERS, pattern=_VISIBLE_CHARACTERS)]
# Any text is accepted where an unknown name is not stored; whether it is a DID or key id shows later
# (SENDER_NOT_FOUND and others).
ClaimedDID = Annotated[str, Field(min_length=1, description="Text that is not a DID is never found.")]
ClaimedKeyID = Annotated[str, Field(min_length=1, description="Text that is not a DID URL is never found.")]
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

# Annotation of members with type `... | None` and default None.
OPTIONAL = _NonNullable()


class WireModel(BaseModel):
    """Base of all wire objects."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)


class Pagination(WireModel):
    """Requested page of a result; `page` counts from 0 (DCTRL-0004 section 9)."""

    page: PageNumber = 0
    page_size: PageSize = 10


class CommunicationContract(WireModel):
    """Terms between two identities; times in Unix seconds (DCTRL-0003, reference 7.1)."""

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
    """A contract with the signatures of both parties (DCTRL-0003, reference 7.1)."""

    communication_contract: CommunicationContract
    requestor_signature: Signature
    recipient_signature: Signature


class RequestCommunicationContract(WireModel):
    """Registers with the mediator, or requests a contract with another identity (DCTRL-0004 8.1)."""

    type: Literal["REQUEST_COMMUNICATION_CONTRACT"]
    encrypted_contract_request: Annotated[Text, Field(repr=False, max_length=MAX_CONTRACT_REQUEST_CHARACTERS)]
    requestor_ephemeral_public_key: EncryptionPublicKey


class CommunicationContractResponse(WireModel):
    """Returns a signed contract to its requestor (DCTRL-0004 8.2)."""

    type: Literal["COMMUNICATION_CONTRACT_RESPONSE"]
    signed_communication_contract: SignedCommunicationContract


class QueryPendingCommunicationContractRequests(WireModel):
    """Lists pending contract requests to the sender (DCTRL-0004 8.3)."""

    type: Literal["QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS"]
    pagination: Pagination = Pagination()


class AcknowledgePendingCommunicationContractRequests(WireModel):
    """Removes pending contract requests to the sender, by request id (DCTRL-0004 8.4)."""

    type: Literal["ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS"]
    communication_contract_ids: RecordIDs


class SaveCommunicationContract(WireModel):
    """Stores a contract of the sender (DCTRL-0004 8.5)."""

    type: Literal["SAVE_COMMUNICATION_CONTRACT"]
    signed_communication_contract: SignedCommunicationContract


class ContractsFilter(WireModel):
    """`did` is either party; bounds are inclusive, in Unix seconds."""

    did: Annotated[ClaimedDID | None, OPTIONAL] = None
    expires_at_before: Annotated[Seconds | None, OPTIONAL] = None
    expires_at_after: Annotated[Seconds | None, OPTIONAL] = None


class QueryCommunicationContracts(WireModel):
    """Lists contracts of the sender, including expired ones (DCTRL-0004 8.6)."""

    type: Literal["QUERY_COMMUNICATION_CONTRACTS"]
    filter: ContractsFilter = ContractsFilter()
    pagination: Pagination = Pagination()


class PendingEventsFilter(WireModel):
    """Restricts the result to events of one sender."""

    sender_did: Annotated[ClaimedDID | None, OPTIONAL] = None


class QueryPendingEvents(WireModel):
    """Lists pending events for the sender (DCTRL-0004 8.7)."""

    type: Literal["QUERY_PENDING_EVENTS"]
    filter: PendingEventsFilter = PendingEventsFilter()
    pagination: Pagination = Pagination()


class AcknowledgePendingEvents(WireModel):
    """Removes pending events for the sender (DCTRL-0004 8.8)."""

    type: Literal["ACKNOWLEDGE_PENDING_EVENTS"]
    event_ids: RecordIDs


class TaggedEvent(WireModel):
    """Base of events with encrypted tags."""

    encrypted_tags: Tags


class EventToSave(TaggedEvent):
    """An event to store; payload and tags are opaque (DCTRL-0004 8.9)."""

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
    """All conditions must hold; one matching tag is enough; bounds are inclusive (DCTRL-0004 8.10)."""

    after_timestamp: Annotated[Timestamp | None, OPTIONAL] = None
    before_timestamp: Annotated[Timestamp | None, OPTIONAL] = None
    participant_did: Annotated[ClaimedDID | None, OPTIONAL] = None
    encrypted_tags: Tags = ()
    unprocessed_only: bool = False


class QueryEvents(WireModel):
    """Lists stored events of the sender (DCTRL-0004 8.10)."""

    type: Literal["QUERY_EVENTS"]
    filter: EventsFilter = EventsFilter()
    pagination: Pagination = Pagination()


class TagsToUpdate(TaggedEvent):
    """The new tags of an event."""

    event_id: RecordID


class UpdateEventTags(WireModel):
    """Replaces the tags of stored events and marks them processed (DCTRL-0004 8.11)."""

    type: Literal["UPDATE_EVENT_TAGS"]
    events: Annotated[
        tuple[TagsToUpdate, ...], Field(strict=False, max_length=MAX_ITEMS), AfterValidator(_check_tag_count)
    ]


class PublishPublicEvent(WireModel):
    """Publishes an event; content and tags are not encrypted (DCTRL-0007, reference 10.1)."""

    type: Literal["PUBLISH_PUBLIC_EVENT"]
    event: OpaqueText
    tags: Tags
    timestamp: Timestamp
    event_signature: Signature
    channel_id: Annotated[ShortText | None, OPTIONAL] = None


class DeletePublicEvent(WireModel):
    """Deletes a public event of the sender (DCTRL-0007, reference 10.2)."""

    type: Literal["DELETE_PUBLIC_EVENT"]
    public_event_id: RecordID


class SetPushDevice(WireModel):
    """
    Registers a device for push notifications; where push.decentrl is on, a command of mediatord's own. The device is
    encrypted as a contract request to the mediator is.
    """

    type: Literal["SET_PUSH_DEVICE"]
    encrypted_push_device: Annotated[Text, Field(repr=False, max_length=MAX_PUSH_DEVICE_CHARACTERS)]
    sender_ephemeral_public_key: EncryptionPublicKey


class QueryPushDevices(WireModel):
    """Lists the devices of the sender, encrypted to the given key; where push.decentrl is on."""

    type: Literal["QUERY_PUSH_DEVICES"]
    sender_ephemeral_public_key: EncryptionPublicKey


class RemovePushDevices(WireModel):
    """Removes the devices of the sender with one push service; where push.decentrl is on."""

    type: Literal["REMOVE_PUSH_DEVICES"]
    service: Literal["fcm", "apns", "web_push"]


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
    | SetPushDevice
    | QueryPushDevices
    | RemovePushDevices
)
PublicPayload: TypeAlias = PublishPublicEvent | DeletePublicEvent


class AuthenticateMessage(WireModel):
    """First frame of a socket; timestamp in Unix milliseconds (DCTRL-0004 10.2)."""

    type: Literal["AUTHENTICATE"]
    did: ClaimedDID
    signing_key_id: ClaimedKeyID
    timestamp: Milliseconds
    nonce: Nonce
    signature: Signature


# A JSON number; Python would also accept `1_0`, ` 1`, `+1` and `inf`.
_JSON_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_PARAMETERS = (b"after", b"before", b"page", b"page_size")


class PublicQuery(WireModel):
    """All conditions must hold; one matching tag is enough; bounds are inclusive, in the unit of the events."""

    tags: Tags = ()
    after: Annotated[Timestamp | None, OPTIONAL] = None
    before: Annotated[Timestamp | None, OPTIONAL] = None
    channel_id: Annotated[ShortText | None, OPTIONAL] = None
    page: PageNumber = 0
    page_size: PageSize = 20


def parse_public_query(arguments: Mapping[bytes, Sequence[bytes]]) -> PublicQuery:
    """
    Parse the query string of a public channel; unknown parameters are ignored.

    :param arguments: all values of each parameter, percent-decoded.
    :raise InvalidCommand: an invalid value, or repeated where only one is allowed.
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
    """Tags may be comma-separated, repeated, or both; empty ones are dropped."""
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


class CommandHeader(WireModel):
    """Sender, recipient and time of a command; timestamp in Unix milliseconds (DCTRL-0004 4.2)."""

    sender_did: ClaimedDID
    sender_signing_key_id: ClaimedKeyID
    recipient_did: ClaimedDID
    timestamp: Milliseconds
    nonce: Nonce


class DirectHeader(CommandHeader):
    """Header of a command to a mediator."""

    channel: Literal["DIRECT_AUTHENTICATED"]


class PrivateHeader(CommandHeader):
    """Header of an event for another identity."""

    channel: Literal["TWO_WAY_PRIVATE"]


class PublicHeader(CommandHeader):
    """Header of a command on a public channel."""

    channel: Literal["ONE_WAY_PUBLIC"]


class DirectCommand(WireModel):
    """Command of an identity to a mediator (DCTRL-0004 sections 6 and 8)."""

    header: DirectHeader
    payload: Annotated[DirectPayload, Field(discriminator="type")]
    signature: Signature


class PrivateCommand(WireModel):
    """Encrypted event for another identity (DCTRL-0004 section 7)."""

    header: PrivateHeader
    payload: Annotated[Text, Field(repr=False)]
    signature: Signature


class PublicCommand(WireModel):
    """Command of a publisher to its mediator (DCTRL-0007)."""

    header: PublicHeader
    payload: Annotated[PublicPayload, Field(discriminator="type")]
    signature: Signature


CommandModel: TypeAlias = DirectCommand | PrivateCommand | PublicCommand

_COMMAND_MODELS: Mapping[str, type[CommandModel]] = {
    "DIRECT_AUTHENTICATED": DirectCommand,
    "TWO_WAY_PRIVATE": PrivateCommand,
    "ONE_WAY_PUBLIC": PublicCommand,
}
_SIGNED_MEMBERS = ("did", "signing_key_id", "timestamp", "nonce")


@dataclass(frozen=True, slots=True)
class DecentrlCommand:
    """
    A command of valid shape; freshness, uniqueness and signature are unchecked.

    :param name: payload type; the channel if the payload has none.
    :param document: payload as received, unknown members included; empty for TWO_WAY_PRIVATE.
    :param signed: bytes that the signature covers.
    :param source: JSON source of the command.
    """

    name: str
    header: DirectHeader | PrivateHeader | PublicHeader
    payload: DirectPayload | PublicPayload | str = field(repr=False)
    signature: str = field(repr=False)
    document: Mapping[str, Any] = field(repr=False)
    signed: bytes = field(repr=False)
    source: bytes = field(repr=False)

    def text(self, name: str) -> bytes:
        """
        Source text of a payload member.

        :raise InvalidCommand: it is absent, or there are more members than any command has.
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
    Parse the body of a POST.

    The signed bytes are made from the received document, because a model drops unknown members and adds defaults.

    :raise InvalidCommand: not a valid command.
    """
    try:
        document = canonical_json.loads(raw)
        header = document.get("header")
        channel = header.get("channel") if isinstance(header, dict) else None
        if not isinstance(channel, str) or channel not in _COMMAND_MODELS:
            raise InvalidCommand
        model = _COMMAND_MODELS[channel].model_validate(document)
        payload = document["payload"]
        signed = canonical_json.canonicalize({"header": header, "payload": payload})
    except ValueError:
        raise InvalidCommand from None
    name, members = (channel, {}) if isinstance(payload, str) else (payload["type"], payload)
    return DecentrlCommand(name, model.header, model.payload, model.signature, members, signed, raw)


def parse_authentication_request(raw: bytes) -> tuple[AuthenticateMessage, bytes]:
    """
    Parse the first frame of a socket; returns the message and the bytes that its signature covers.

    :raise InvalidMessage: not an authentication.
    """
    try:
        document = canonical_json.loads(raw)
        message = AuthenticateMessage.model_validate(document)
        return message, canonical_json.canonicalize({name: document[name] for name in _SIGNED_MEMBERS})
    except ValueError:
        raise InvalidMessage from None


def is_didcomm_envelope(frame: bytes) -> bool:
    """Whether the first frame of a socket is a DIDComm envelope: a JSON object with `protected`."""
    try:
        # The frame is not rate-limited yet, so parsing is avoided where possible.
        return (b"protected" in frame or b"\\u" in frame) and "protected" in encoding.loads_object(frame)
    except ValueError:
        return False
