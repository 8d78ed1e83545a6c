"""
Writing and reading messages as a wallet does (reference 1, 2 and 4.8): pure, no connection in sight.

Resolution is local. What cannot be resolved without a network, the did:web of a mediator say, is first taught to the
:class:`AddressBook` by whoever fetched it.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mediatord.errors import MediatorError, Undecryptable
from mediatord.protocol import jsontext
from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm import signed
from mediatord.protocol.didcomm.did import DIDDocument, did_of
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, PLAIN_TYPE, Message, parse_message
from mediatord.protocol.didcomm.ownership import PROOF, proof_body
from mediatord.wallet.identity import Identity

BASIC_MESSAGE = "https://didcomm.org/basicmessage/2.0/message"

Resolve = Callable[[str], DIDDocument]
Form = Literal["json", "base64"]

_MAX_LAYERS = 3
# Enough hops for any honest document.
_MAX_HOPS = 10


class Unreadable(Exception):
    """What arrived is not for us, not intact, or not from who it says; the text names the first check that failed."""


class AddressBook:
    """Documents learnt from elsewhere, and everything that resolves by itself."""

    def __init__(self) -> None:
        self._documents: dict[str, DIDDocument] = {}

    def learn(self, document: DIDDocument) -> None:
        """Use this document for its DID from now on; a did:peer:4 is known by both its forms."""
        self._documents[canonical_did(document.did)] = document

    def resolve(self, did: str) -> DIDDocument:
        """
        :raise LookupError: an unknown did:web, or the short form of an unknown did:peer:4.
        :raise MediatorError: it does not resolve at all.
        """
        known = self._documents.get(canonical_did(did))
        if known is not None:
            return known
        document = resolve_local(did)
        if canonical_did(did) != did:
            self.learn(document)
        return document


def compose(type_: str, body: Mapping[str, Any] | None = None, **headers: Any) -> dict[str, Any]:
    """
    A plaintext message with a fresh `id`.

    :param headers: whatever else it shall have, `id` and `typ` included; None removes a header. `from` is a word of
        Python's, so it is given as `**{"from": did}`.
    """
    message = {"id": str(uuid.uuid4()), "type": type_, "typ": PLAIN_TYPE, "body": dict(body or {}), **headers}
    return {name: value for name, value in message.items() if value is not None}


def attach(payload: bytes, form: Form = "json", id_: str | None = None) -> dict[str, Any]:
    """An encrypted message as an attachment."""
    data = {"json": jsontext.loads_object(payload)} if form == "json" else {"base64": jsontext.b64url_encode(payload)}
    return {"id": id_ or secrets.token_hex(8), "media_type": ENCRYPTED_TYPE, "data": data}


def forward(next_: str, payloads: Sequence[bytes], *, form: Form = "json", **headers: Any) -> dict[str, Any]:
    """A forward of one or more encrypted messages to `next_`; `headers` as in :func:`compose` (reference 4)."""
    attachments = [attach(payload, form) for payload in payloads]
    return compose(FORWARD, {"next": next_}, attachments=attachments, **headers)


def prove_ownership(owner: Identity, recipient_did: str, account: str, mediator: DIDDocument, *, now: float) -> bytes:
    """
    A proof for the mediator that `account` may register a recipient DID, made by its owner; good for five minutes.

    :param now: in Unix seconds.
    """
    headers = {"from": owner.did, "to": [mediator.did], "created_time": int(now)}
    return authcrypt(compose(PROOF, proof_body(account, recipient_did), **headers), owner, mediator)


def authcrypt(message: Mapping[str, Any], sender: Identity, recipient: DIDDocument) -> bytes:
    """
    Encrypted for all keys of `recipient` on the sender's curve, and proof of who sent it.

    :raise ValueError: the recipient has no key on that curve.
    """
    key = sender.agreement
    keys = _keys(recipient, key.private.curve)
    return jwe.seal_authcrypt(jsontext.dumps(message), (key.kid, key.private), keys)


def anoncrypt(message: Mapping[str, Any], recipient: DIDDocument, *, enc: jwe.Enc = "A256CBC-HS512") -> bytes:
    """
    Encrypted for all keys of `recipient` on the curve of its first one; says nothing about the sender.

    :raise ValueError: the recipient has no key for encryption.
    """
    return jwe.seal_anoncrypt(jsontext.dumps(message), _keys(recipient, None), enc=enc)


def _keys(recipient: DIDDocument, curve: str | None) -> list[tuple[str, PublicKey]]:
    curve = curve or next((method.key.curve for method in recipient.key_agreement), None)
    return [(method.id, method.key) for method in recipient.key_agreement if method.key.curve == curve]


@dataclass(frozen=True, slots=True)
class Route:
    """
    The way to a recipient.

    :param uri: where to POST.
    :param hops: DIDs to wrap for, outermost first; empty when the recipient takes messages itself.
    """

    uri: str
    hops: tuple[str, ...]


def route_to(recipient: DIDDocument, resolve: Resolve) -> Route:
    """
    Follow the first service of a document to the first HTTP endpoint behind it (reference 4.8).

    :raise Unreadable: there is none.
    """
    endpoint = next((one for service in recipient.services for one in service.endpoints), None)
    if endpoint is None or len(endpoint.routing_keys) > _MAX_HOPS:
        raise Unreadable("no service to send to")
    hops = tuple(did_of(key) for key in endpoint.routing_keys)
    if not endpoint.uri.startswith("did:"):
        return Route(endpoint.uri, hops)
    mediator = resolve(did_of(endpoint.uri))
    # One step only: an endpoint that is a DID must not lead to another one.
    uris = [one.uri for one in mediator.http_endpoints()]
    if not uris:
        raise Unreadable("the mediator has no HTTP endpoint")
    return Route(uris[0], (mediator.did, *hops))


def wrap(payload: bytes, recipient_did: str, hops: Sequence[str], resolve: Resolve) -> bytes:
    """`payload` in one anoncrypted forward per hop, the innermost one to `recipient_did` (reference 4.6)."""
    next_ = recipient_did
    for hop in reversed(hops):
        payload = anoncrypt(forward(next_, [payload], to=[hop]), resolve(hop))
        next_ = hop
    return payload


@dataclass(frozen=True, slots=True)
class Opened:
    """
    A message that passed every check.

    :param sender: DID that its encryption or signature proves; None for an anonymous one.
    :param recipient_kid: of the key it was opened with.
    """

    message: Message
    sender: str | None
    recipient_kid: str
    plaintext: bytes = field(repr=False)

    @property
    def body(self) -> dict[str, Any]:
        """The body; empty when it is no object."""
        return self.message.body or {}

    @property
    def text(self) -> str:
        """The content of a basic message, or nothing."""
        content = self.body.get("content")
        return content if isinstance(content, str) else ""


def unpack(raw: bytes, identity: Identity, resolve: Resolve) -> Opened:
    """
    Open all layers and check who is behind them (reference 1.6 to 1.8).

    :raise Unreadable: a check failed.
    """
    try:
        return _unpack(raw, identity, resolve)
    except (MediatorError, LookupError, ValueError) as error:
        raise Unreadable(type(error).__name__) from error


def open_report(raw: bytes, resolve: Resolve) -> dict[str, Any]:
    """
    A message for nobody in particular, which is not encrypted: in the clear, or signed by who it says it is from.

    :raise Unreadable: neither.
    """
    try:
        value = jsontext.loads_object(raw)
        if not signed.is_signed(value):
            return value
        kid = signed.signer_kid(value)
        message = parse_message(_verified(value, kid, resolve))
        if message.sender is None or canonical_did(message.sender) != canonical_did(kid):
            raise Unreadable("from is not who signed it")
        return jsontext.loads_object(message.source)
    except (MediatorError, LookupError, ValueError) as error:
        raise Unreadable(type(error).__name__) from error


def _unpack(raw: bytes, identity: Identity, resolve: Resolve) -> Opened:
    proven: set[str] = set()
    recipient_kid = ""
    for _ in range(_MAX_LAYERS):
        envelope = jwe.parse(raw)
        kid, raw = _open_layer(envelope, identity, resolve)
        recipient_kid = recipient_kid or kid
        if envelope.sender_kid is not None:
            proven.add(canonical_did(envelope.sender_kid))
        value = jsontext.loads_object(raw)
        if "ciphertext" not in value:
            break
    else:
        raise Undecryptable
    if signed.is_signed(value):
        kid = signed.signer_kid(value)
        raw = _verified(value, kid, resolve)
        proven.add(canonical_did(kid))
    return _checked(raw, proven, recipient_kid)


def _open_layer(envelope: jwe.Envelope, identity: Identity, resolve: Resolve) -> tuple[str, bytes]:
    found = [(kid, key) for kid in envelope.kids if (key := identity.key_for(kid)) is not None]
    if not found:
        raise Unreadable("not encrypted for us")
    sender = None
    if envelope.sender_kid is not None:
        method = resolve(did_of(envelope.sender_kid)).key_agreement_key(envelope.sender_kid)
        if method is None:
            raise Unreadable("the sender has no such key")
        sender = method.key
    return found[0][0], jwe.open_envelope(envelope, *found[0], sender)


def _verified(value: dict[str, Any], kid: str, resolve: Resolve) -> bytes:
    method = resolve(did_of(kid)).authentication_key(kid)
    if method is None:
        raise Unreadable("the signer has no such key")
    return signed.verify(value, kid, method.key)


def _checked(raw: bytes, proven: set[str], recipient_kid: str) -> Opened:
    message = parse_message(raw)
    claimed = message.sender
    if proven and (claimed is None or proven != {canonical_did(claimed)}):
        raise Unreadable("from is not who encrypted or signed it")
    us = canonical_did(recipient_kid)
    if message.to and us not in {canonical_did(did) for did in message.to}:
        raise Unreadable("to is somebody else")
    return Opened(message, claimed if proven else None, recipient_kid, raw)
