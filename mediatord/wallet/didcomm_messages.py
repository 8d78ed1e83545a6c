"""
Packing and unpacking of a wallet's messages, without I/O (reference 1, 2 and 4.8).

DIDs are resolved locally. The document of a did:web has to be added to the :class:`DIDDocumentCache` first.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mediatord.errors import DecryptionError, MediatorError
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm import json_web_signature, jwe
from mediatord.protocol.didcomm.did_document import DIDDocument, strip_did_url
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE, Enc
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm.message import PLAINTEXT_MEDIA_TYPE, Message, parse_message, parse_message_object
from mediatord.wallet.didcomm_identity import WalletIdentity

BASIC_MESSAGE = "https://didcomm.org/basicmessage/2.0/message"

ResolveDID = Callable[[str], DIDDocument]
AttachmentForm = Literal["json", "base64"]

_MAX_LAYERS = 3
_MAX_HOPS = 10


class UnreadableMessage(Exception):
    """A message is not for us, not intact, or not authentic; the text names the first check that failed."""


class DIDDocumentCache:
    """Resolves DIDs locally, or to documents added before."""

    def __init__(self) -> None:
        self._documents: dict[str, DIDDocument] = {}

    def add(self, document: DIDDocument) -> None:
        """Add a document; a did:peer:4 is found by both its forms."""
        self._documents[canonicalize_did(document.did)] = document

    def resolve(self, did: str) -> DIDDocument:
        """
        Resolve a DID.

        :raise LookupError: an unknown did:web, or the short form of an unknown did:peer:4.
        :raise MediatorError: it is invalid or not supported.
        """
        known = self._documents.get(canonicalize_did(did))
        if known is not None:
            return known
        document = resolve_local(did)
        if canonicalize_did(did) != did:
            self.add(document)
        return document


def compose_message(type_: str, body: Mapping[str, Any] | None = None, **headers: Any) -> dict[str, Any]:
    """
    A plaintext message with a new `id`.

    :param headers: further ones, `id` and `typ` included; None removes one. `from` is a keyword, hence
        `**{"from": did}`.
    """
    message = {
        "id": str(uuid.uuid4()),
        "type": type_,
        "typ": PLAINTEXT_MEDIA_TYPE,
        "body": dict(body or {}),
        **headers,
    }
    return {name: value for name, value in message.items() if value is not None}


def build_attachment(payload: bytes, form: AttachmentForm = "json", id_: str | None = None) -> dict[str, Any]:
    """An encrypted message as an attachment."""
    data = (
        {"json": encoding.loads_object(payload)} if form == "json" else {"base64": encoding.encode_base64url(payload)}
    )
    return {"id": id_ or secrets.token_hex(8), "media_type": ENCRYPTED_MEDIA_TYPE, "data": data}


def build_forward(
    next_: str, payloads: Sequence[bytes], *, form: AttachmentForm = "json", **headers: Any
) -> dict[str, Any]:
    """A forward of encrypted messages to `next_`; `headers` as in :func:`compose_message` (reference 4)."""
    attachments = [build_attachment(payload, form) for payload in payloads]
    return compose_message(FORWARD, {"next": next_}, attachments=attachments, **headers)


def authcrypt(
    message: Mapping[str, Any],
    sender: WalletIdentity,
    recipient: DIDDocument,
    ephemeral: jwe.EphemeralKey | None = None,
) -> bytes:
    """
    Encrypt and authenticate for all keys of `recipient` on the sender's curve.

    :param ephemeral: a key to use again; by default a new one.
    :raise ValueError: the recipient has no key on that curve.
    """
    key = sender.agreement
    keys = _recipient_keys(recipient, key.private.curve)
    return jwe.encrypt_authcrypt(encoding.dumps(message), (key.kid, key.private), keys, ephemeral)


def anoncrypt(message: Mapping[str, Any], recipient: DIDDocument, *, enc: Enc = "A256CBC-HS512") -> bytes:
    """
    Encrypt anonymously for all keys of `recipient` on the curve of its first one.

    :raise ValueError: the recipient has no key.
    """
    return jwe.encrypt_anoncrypt(encoding.dumps(message), _recipient_keys(recipient, None), enc=enc)


def _recipient_keys(recipient: DIDDocument, curve: str | None) -> list[tuple[str, PublicKey]]:
    curve = curve or next((method.key.curve for method in recipient.key_agreement), None)
    return [(method.id, method.key) for method in recipient.key_agreement if method.key.curve == curve]


@dataclass(frozen=True, slots=True)
class Route:
    """
    The route to a recipient.

    :param uri: of the first hop.
    :param hops: DIDs to wrap forwards for, outermost first; empty for the recipient's own endpoint.
    """

    uri: str
    hops: tuple[str, ...]


def find_route(recipient: DIDDocument, resolve: ResolveDID) -> Route:
    """
    Find the HTTP endpoint of the first service of a document (reference 4.8).

    :raise UnreadableMessage: there is none.
    """
    endpoint = next(iter(recipient.endpoints), None)
    if endpoint is None or len(endpoint.routing_keys) > _MAX_HOPS:
        raise UnreadableMessage("no service to send to")
    hops = tuple(strip_did_url(key) for key in endpoint.routing_keys)
    if not endpoint.uri.startswith("did:"):
        return Route(endpoint.uri, hops)
    mediator = resolve(strip_did_url(endpoint.uri))
    # An endpoint that is a DID must not lead to another one.
    uris = [one.uri for one in mediator.http_endpoints()]
    if not uris:
        raise UnreadableMessage("the mediator has no HTTP endpoint")
    return Route(uris[0], (mediator.did, *hops))


def wrap_in_forwards(payload: bytes, recipient_did: str, hops: Sequence[str], resolve: ResolveDID) -> bytes:
    """Wrap `payload` in an anoncrypted forward per hop, the innermost one to `recipient_did` (reference 4.6)."""
    next_ = recipient_did
    for hop in reversed(hops):
        payload = anoncrypt(build_forward(next_, [payload], to=[hop]), resolve(hop))
        next_ = hop
    return payload


@dataclass(frozen=True, slots=True)
class OpenedMessage:
    """
    A message that passed every check.

    :param sender: authenticated DID; None for an anonymous message.
    :param recipient_kid: of the key that decrypted it.
    """

    message: Message
    sender: str | None
    recipient_kid: str
    plaintext: bytes = field(repr=False)

    @property
    def body(self) -> dict[str, Any]:
        """The body; empty if it is not an object."""
        return self.message.body or {}

    @property
    def text(self) -> str:
        """The content of a basic message; empty for other messages."""
        content = self.body.get("content")
        return content if isinstance(content, str) else ""


def unpack_message(raw: bytes, identity: WalletIdentity, resolve: ResolveDID) -> OpenedMessage:
    """
    Decrypt all layers and authenticate the sender (reference 1.6 to 1.8).

    :raise UnreadableMessage: a check failed.
    """
    try:
        return _unpack_layers(raw, identity, resolve)
    except (MediatorError, LookupError, ValueError) as error:
        raise UnreadableMessage(type(error).__name__) from error


def open_problem_report(raw: bytes, resolve: ResolveDID) -> dict[str, Any]:
    """
    Read a problem report that is not encrypted: plaintext, or signed by its sender.

    :raise UnreadableMessage: it is neither.
    """
    try:
        value = encoding.loads_object(raw)
        if not json_web_signature.is_jws(value):
            return value
        signature = json_web_signature.parse_jws(value)
        message = parse_message(_verify_signature(signature, resolve))
        if message.sender is None or canonicalize_did(message.sender) != canonicalize_did(signature.kid):
            raise UnreadableMessage("from is not who signed it")
        return encoding.loads_object(message.source)
    except (MediatorError, LookupError, ValueError) as error:
        raise UnreadableMessage(type(error).__name__) from error


def _unpack_layers(raw: bytes, identity: WalletIdentity, resolve: ResolveDID) -> OpenedMessage:
    proven: set[str] = set()
    recipient_kid = ""
    for _ in range(_MAX_LAYERS):
        envelope = jwe.parse_envelope(raw)
        kid, raw = _open_layer(envelope, identity, resolve)
        recipient_kid = recipient_kid or kid
        if envelope.sender_kid is not None:
            proven.add(canonicalize_did(strip_did_url(envelope.sender_kid)))
        value = encoding.loads_object(raw)
        if "ciphertext" not in value:
            break
    else:
        raise DecryptionError
    if json_web_signature.is_jws(value):
        signature = json_web_signature.parse_jws(value)
        raw = _verify_signature(signature, resolve)
        value = encoding.loads_object(raw)
        proven.add(canonicalize_did(signature.kid))
    return _check_sender(parse_message_object(value, raw), proven, recipient_kid)


def _open_layer(envelope: jwe.Envelope, identity: WalletIdentity, resolve: ResolveDID) -> tuple[str, bytes]:
    found = [(kid, key) for kid in envelope.encrypted_keys if (key := identity.find_agreement_key(kid)) is not None]
    if not found:
        raise UnreadableMessage("not encrypted for us")
    sender = None
    if envelope.sender_kid is not None:
        method = resolve(strip_did_url(envelope.sender_kid)).key_agreement_key(envelope.sender_kid)
        if method is None:
            raise UnreadableMessage("the sender has no such key")
        sender = method.key
    return found[0][0], jwe.decrypt_envelope(envelope, *found[0], sender)


def _verify_signature(signature: json_web_signature.Signature, resolve: ResolveDID) -> bytes:
    method = resolve(strip_did_url(signature.kid)).authentication_key(signature.kid)
    if method is None:
        raise UnreadableMessage("the signer has no such key")
    return signature.verify(method.key)


def _check_sender(message: Message, proven: set[str], recipient_kid: str) -> OpenedMessage:
    claimed = message.sender
    if proven and (claimed is None or proven != {canonicalize_did(claimed)}):
        raise UnreadableMessage("from is not who encrypted or signed it")
    us = canonicalize_did(strip_did_url(recipient_kid))
    if message.to and us not in {canonicalize_did(did) for did in message.to}:
        raise UnreadableMessage("to is somebody else")
    return OpenedMessage(message, claimed if proven else None, recipient_kid, message.source)
