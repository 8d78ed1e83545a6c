"""
Messages of a DIDComm v1 wallet, without I/O: packing, invitations, forwards, and the handshakes that connect it with
a mediator (Aries RFC 0019, 0023, 0094, 0160, 0434).
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from mediatord.errors import MediatorError
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_methods import expand_did_peer
from mediatord.protocol.didcomm_v1.connections import open_signed_field
from mediatord.protocol.didcomm_v1.did_document import (
    DIDForm,
    OwnDocument,
    find_did_form,
    make_own_document,
    parse_wallet_document,
)
from mediatord.protocol.didcomm_v1.did_exchange import make_signed_attachment, open_signed_attachment
from mediatord.protocol.didcomm_v1.envelope import open_envelope, pack_anoncrypt, parse_envelope
from mediatord.protocol.didcomm_v1.keys import KeySpelling, SigningKey, parse_key, spell_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, V1Message, parse_message
from mediatord.wallet.didcomm_messages import UnreadableMessage

HandshakeProtocol = Literal["didexchange/1.1", "didexchange/1.0", "connections/1.0"]

# The endpoint of a wallet that has none.
NO_ENDPOINT = "didcomm:transport/queue"
_INVITATION_PARAMETERS = ("oob", "c_i")


def generate_key() -> SigningKey:
    """A new key pair."""
    return SigningKey.from_seed(secrets.token_bytes(32))


def compose_v1_message(
    type_: str,
    members: Mapping[str, Any] | None = None,
    *,
    prefix: str = DIDCOMM_ORG,
    thread: Mapping[str, str] | None = None,
    return_route: str | None = None,
) -> dict[str, Any]:
    """
    A message with a new `@id`.

    :param type_: without prefix, unless it is a URI.
    :param members: further ones, `@id` and decorators included; None removes one.
    :param thread: `thid` and `pthid`.
    """
    message = {
        "@type": type_ if ":" in type_ else prefix + type_,
        "@id": str(uuid.uuid4()),
        "~thread": thread,
        "~transport": None if return_route is None else {"return_route": return_route},
        **(members or {}),
    }
    return {name: value for name, value in message.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OpenedV1Message:
    """
    A message that could be decrypted.

    :param sender: key that it is authenticated by; None for an anonymous one.
    :param recipient: key that it was encrypted to.
    """

    message: V1Message
    sender: str | None
    recipient: str

    @property
    def text(self) -> str:
        """The content of a basic message; empty for other messages."""
        content = self.message.members.get("content")
        return content if isinstance(content, str) else ""


def unpack_v1_message(raw: bytes, keys: Mapping[str, SigningKey]) -> OpenedV1Message:
    """
    Decrypt and parse a message.

    :param keys: of the wallet, by did:key.
    :raise UnreadableMessage: it is not for us, or a check failed.
    """
    try:
        envelope = parse_envelope(raw)
        for recipient in envelope.recipients:
            if recipient.key in keys:
                opened = open_envelope(envelope, recipient, keys[recipient.key])
                return OpenedV1Message(parse_message(opened.plaintext), opened.sender, recipient.key)
    except MediatorError as error:
        raise UnreadableMessage(type(error).__name__) from error
    raise UnreadableMessage("not encrypted for us")


def build_v1_forward(
    to: str, payload: bytes, *, prefix: str = DIDCOMM_ORG, spelling: KeySpelling = "base58"
) -> dict[str, Any]:
    """
    A forward of an envelope.

    :param to: key of the recipient, or any DID.
    :param spelling: of that key.
    """
    name = spell_key(to, spelling) if to.startswith("did:key:z6Mk") else to
    return compose_v1_message("routing/1.0/forward", {"to": name, "msg": json.loads(payload)}, prefix=prefix)


def wrap_in_v1_forwards(
    payload: bytes,
    to: str,
    routing_keys: Sequence[str],
    *,
    prefix: str = DIDCOMM_ORG,
    spelling: KeySpelling = "base58",
) -> bytes:
    """
    Wrap an envelope in one anoncrypted forward for each routing key.

    :param routing_keys: as in the recipient's document: the last one is the outermost.
    """
    for key in routing_keys:
        forward = build_v1_forward(to, payload, prefix=prefix, spelling=spelling)
        payload = pack_anoncrypt(encoding.dumps(forward), parse_key(key))
        to = parse_key(key)
    return payload


@dataclass(frozen=True, slots=True)
class V1Invitation:
    """
    An invitation of a mediator: Out-of-Band 1.x, or Connections 1.0.

    :param key: that requests are encrypted to.
    :param endpoint: http(s) URL for them.
    :param handshakes: accepted protocols, without prefix.
    """

    id: str
    label: str
    key: str
    endpoint: str
    handshakes: tuple[str, ...]

    @classmethod
    def from_url(cls, url: str) -> V1Invitation:
        """
        Read a URL that contains an invitation.

        :raise UnreadableMessage: it contains none.
        """
        parameters = parse_qs(urlsplit(url).query)
        for name in _INVITATION_PARAMETERS:
            for text in parameters.get(name, ()):
                try:
                    return cls.from_json(encoding.loads_object(encoding.decode_base64(text)))
                except ValueError:
                    raise UnreadableMessage("not an invitation") from None
        raise UnreadableMessage("a URL without an invitation")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> V1Invitation:
        """
        Read an invitation.

        :raise UnreadableMessage: it is none, or has more than one service.
        """
        try:
            message = parse_message(encoding.dumps(dict(value)))
            if message.type.key == ("connections", 1, "invitation"):
                service, handshakes = value, ["connections/1.0"]
            elif message.type.key == ("out-of-band", 1, "invitation"):
                (service,) = value["services"]
                handshakes = [uri.removeprefix(DIDCOMM_ORG) for uri in value["handshake_protocols"]]
            else:
                raise ValueError("another type")
            (key,) = service["recipientKeys"]
            endpoint = service["serviceEndpoint"]
            if not isinstance(endpoint, str) or not endpoint.startswith(("http://", "https://")):
                raise ValueError("no HTTP endpoint")
            return cls(message.id, str(value.get("label", "")), parse_key(key), endpoint, tuple(handshakes))
        except (AttributeError, KeyError, MediatorError, TypeError, ValueError):
            raise UnreadableMessage("an invalid invitation") from None


@dataclass(frozen=True, slots=True)
class V1Mediator:
    """
    A mediator that a wallet has connected with.

    :param did: for this connection, as is `key`.
    :param http_uri: for envelopes.
    :param ws_uri: of the WebSocket; None if its document has none.
    """

    did: str
    key: str
    http_uri: str
    ws_uri: str | None


@dataclass(frozen=True, slots=True)
class V1Handshake:
    """
    The wallet's side of a handshake: a request, and what becomes of the response.

    :param key: of the wallet for this connection.
    :param form: of the wallet's DID; a Connections request always has an unqualified one.
    :param endpoint: of the wallet.
    :param request_id: `@id` of the request.
    :param requires_parent: whether the response has to name the invitation, which ACA-Py insists on and Credo omits.
    """

    invitation: V1Invitation
    key: SigningKey
    protocol: HandshakeProtocol = "didexchange/1.1"
    form: DIDForm = "did:peer:4"
    endpoint: str = NO_ENDPOINT
    label: str = "wallet"
    prefix: str = DIDCOMM_ORG
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    requires_parent: bool = True

    @property
    def is_connections(self) -> bool:
        """Whether this is Connections 1.0."""
        return self.protocol == "connections/1.0"

    def make_document(self) -> OwnDocument:
        """The wallet's DID and document."""
        return make_own_document("nym" if self.is_connections else self.form, self.key, [self.endpoint])

    def make_request(self) -> dict[str, Any]:
        """The request; it asks for the response on the same connection."""
        own = self.make_document()
        members: dict[str, Any] = {"@id": self.request_id, "label": self.label}
        if self.is_connections:
            members["connection"] = {"DID": own.did, "DIDDoc": own.document}
        else:
            members["did"] = own.did
            if own.document is not None:
                content = encoding.dumps(own.document)
                attachment = make_signed_attachment(content, "application/json", self.key)
                members["did_doc~attach"] = {"@id": "did-doc", **attachment}
        thread = {"thid": self.request_id, "pthid": self.invitation.id}
        return compose_v1_message(
            f"{self.protocol}/request", members, prefix=self.prefix, thread=thread, return_route="all"
        )

    def make_complete(self) -> dict[str, Any]:
        """The last message of the handshake, to the key that the response names, which is not answered."""
        if self.is_connections:
            members = {"response_requested": False}
            return compose_v1_message("trust_ping/1.0/ping", members, prefix=self.prefix, return_route="none")
        thread = {"thid": self.request_id, "pthid": self.invitation.id}
        return compose_v1_message(f"{self.protocol}/complete", prefix=self.prefix, thread=thread, return_route="none")

    def read_response(self, opened: OpenedV1Message) -> V1Mediator:
        """
        Check a response as strictly as the strictest library does.

        :raise UnreadableMessage: not from the key of the invitation, in another thread, or not signed by that key.
        """
        message = opened.message
        if opened.sender != self.invitation.key or opened.recipient != self.key.did_key:
            raise UnreadableMessage("not from the key of the invitation")
        if f"{message.type.family}/{message.type.major}.{message.type.minor}" != self.protocol:
            raise UnreadableMessage("a response of another protocol")
        if message.type.name != "response":
            raise UnreadableMessage("a message of another type")
        parents = (self.invitation.id,) if self.requires_parent else (self.invitation.id, None)
        if message.thid != self.request_id or message.pthid not in parents:
            raise UnreadableMessage("a response in another thread")
        try:
            did, document = self._read_document(message)
            keys = parse_wallet_document(did, document).keys
        except (MediatorError, ValueError) as error:
            raise UnreadableMessage(type(error).__name__) from error
        return V1Mediator(did, keys[0], *_read_endpoints(document))

    def _read_document(self, message: V1Message) -> tuple[str, Mapping[str, Any]]:
        """
        The mediator's DID and document.

        :raise ValueError: malformed, or not signed by the key of the invitation.
        """
        if self.is_connections:
            connection, signer = open_signed_field(message.members.get("connection~sig"))
            did, document = connection.get("DID"), connection.get("DIDDoc")
            if signer != self.invitation.key or not isinstance(did, str) or not isinstance(document, dict):
                raise ValueError("no document, or one that somebody else signed")
            return did, document
        did = message.members.get("did")
        if not isinstance(did, str):
            raise ValueError("no DID")
        attached = "did_doc~attach" if find_did_form(did) in ("did:peer:1", "nym") else "did_rotate~attach"
        content, signers = open_signed_attachment(message.members.get(attached))
        if set(signers) != {self.invitation.key}:
            raise ValueError("not signed by the key of the invitation")
        if attached == "did_doc~attach":
            return did, encoding.loads_object(content)
        if content != did.encode("ascii"):
            raise ValueError("a signature of another DID")
        return did, expand_did_peer(did)


def _read_endpoints(document: Mapping[str, Any]) -> tuple[str, str | None]:
    """
    URLs for envelopes and of the WebSocket.

    :raise UnreadableMessage: there is no URL for envelopes.
    """
    services = document.get("service")
    found = [one.get("serviceEndpoint") for one in services or () if isinstance(one, dict)]
    uris = [uri for uri in found if isinstance(uri, str)]
    http = next((uri for uri in uris if uri.startswith(("http://", "https://"))), None)
    if http is None:
        raise UnreadableMessage("no HTTP endpoint")
    return http, next((uri for uri in uris if uri.startswith(("ws://", "wss://"))), None)
