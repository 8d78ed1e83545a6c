"""Commands as they arrive by POST, and the first frame of a socket (DCTRL-0004 sections 4 and 10.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from mediatord.errors import InvalidCommand, InvalidMessage
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl import canonical
from mediatord.protocol.decentrl.shapes import (
    AuthenticateMessage,
    ClaimedDID,
    ClaimedKeyID,
    DirectPayload,
    Milliseconds,
    Nonce,
    PublicPayload,
    Shape,
    Signature,
    Text,
)
from mediatord.protocol.json_source import JSONSource

Channel: TypeAlias = Literal["DIRECT_AUTHENTICATED", "TWO_WAY_PRIVATE", "ONE_WAY_PUBLIC"]

_NO_DOCUMENT: Mapping[str, Any] = MappingProxyType({})


class Header(Shape):
    """Who says something to whom, and when: Unix milliseconds (DCTRL-0004 4.2)."""

    sender_did: ClaimedDID
    sender_signing_key_id: ClaimedKeyID
    recipient_did: ClaimedDID
    timestamp: Milliseconds
    nonce: Nonce


class DirectHeader(Header):
    """Of a command to a mediator."""

    channel: Literal["DIRECT_AUTHENTICATED"]


class PrivateHeader(Header):
    """Of an event for another identity."""

    channel: Literal["TWO_WAY_PRIVATE"]


class PublicHeader(Header):
    """Of a command about a public channel."""

    channel: Literal["ONE_WAY_PUBLIC"]


class DirectCommand(Shape):
    """What an identity asks of a mediator (DCTRL-0004 sections 6 and 8)."""

    header: DirectHeader
    payload: Annotated[DirectPayload, Field(discriminator="type")]
    signature: Signature


class PrivateCommand(Shape):
    """An encrypted event for another identity (DCTRL-0004 section 7)."""

    header: PrivateHeader
    payload: Annotated[Text, Field(repr=False)]
    signature: Signature


class PublicCommand(Shape):
    """What a publisher asks of its mediator (DCTRL-0007)."""

    header: PublicHeader
    payload: Annotated[PublicPayload, Field(discriminator="type")]
    signature: Signature


Envelope: TypeAlias = DirectCommand | PrivateCommand | PublicCommand

_KINDS: Mapping[str, type[Envelope]] = {
    "DIRECT_AUTHENTICATED": DirectCommand,
    "TWO_WAY_PRIVATE": PrivateCommand,
    "ONE_WAY_PUBLIC": PublicCommand,
}
_AUTHENTICATED = ("did", "signing_key_id", "timestamp", "nonce")


@dataclass(frozen=True, slots=True)
class Command:
    """
    A command whose shape is right, and nothing more: it may be stale, repeated, or signed by nobody.

    :param document: the payload as it came, unknown members included; empty on TWO_WAY_PRIVATE.
    :param signed: what the signature is over.
    :param source: the JSON that it was read from.
    """

    envelope: Envelope
    document: Mapping[str, Any] = field(repr=False)
    signed: bytes = field(repr=False)
    source: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Type of the payload; where that has none, the channel."""
        payload = self.envelope.payload
        return "TWO_WAY_PRIVATE" if isinstance(payload, str) else payload.type

    @property
    def channel(self) -> Channel:
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


def parse_command(raw: bytes) -> Command:
    """
    Read the body of a POST.

    What is signed is taken from what arrived, unknown members and all: a model would add and drop some.

    :raise InvalidCommand: it is no command, whatever else it is.
    """
    try:
        document = canonical.loads(raw)
        envelope = _kind_of(document).model_validate(document)
        payload = document["payload"]
        signed = canonical.canonical({"header": document["header"], "payload": payload})
    except ValueError:
        raise InvalidCommand from None
    return Command(envelope, payload if isinstance(payload, dict) else _NO_DOCUMENT, signed, raw)


def _kind_of(document: Mapping[str, Any]) -> type[Envelope]:
    header = document.get("header")
    channel = header.get("channel") if isinstance(header, dict) else None
    if not isinstance(channel, str) or channel not in _KINDS:
        raise ValueError("no channel")
    return _KINDS[channel]


@dataclass(frozen=True, slots=True)
class Authenticate:
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


def parse_authenticate(raw: bytes) -> Authenticate:
    """
    Read the first frame of a socket.

    :raise InvalidMessage: it is no authentication, whatever else it is.
    """
    try:
        document = canonical.loads(raw)
        said = AuthenticateMessage.model_validate(document)
        signed = canonical.canonical({name: document[name] for name in _AUTHENTICATED})
    except ValueError:
        raise InvalidMessage from None
    return Authenticate(said.did, said.signing_key_id, said.timestamp, said.nonce, said.signature, signed)


def is_envelope(frame: bytes) -> bool:
    """Whether the first frame of a socket is a DIDComm envelope: a JSON object with `protected`."""
    try:
        # Nobody has paid for the frame yet, so it is not parsed in vain.
        return (b"protected" in frame or b"\\u" in frame) and "protected" in jsontext.loads_object(frame)
    except ValueError:
        return False
