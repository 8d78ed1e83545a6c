"""
DIDComm messages: unpacking with checks of the sender (reference 1.6 to 1.8, 2.3), packing of replies and problem
reports, and wrapping of payloads in forwards (4.6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Literal, NamedTuple

from twisted.internet.interfaces import IReactorTime

from mediatord.clock import measure_time
from mediatord.delivery.connections import WebSocketSession
from mediatord.errors import (
    DecryptionError,
    InvalidEnvelope,
    InvalidPlaintext,
    MediatorError,
    SenderMismatch,
    UnresolvableDID,
)
from mediatord.identity.key_file import NamedKey
from mediatord.net.did_resolver import IDIDResolver
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm import json_web_signature, jwe
from mediatord.protocol.didcomm.did_document import MAX_ROUTING_KEYS, DIDDocument, strip_did_url
from mediatord.protocol.didcomm.forward import make_forward
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE, Envelope, encrypt_anoncrypt, encrypt_authcrypt
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.didcomm.message import (
    PLAINTEXT_MEDIA_TYPE,
    PROBLEM_REPORT,
    Message,
    OutgoingMessage,
    parse_message_object,
)
from mediatord.protocol.error_codes import IDENTUS_PROBLEM_CODES, DIDCommErrorCode, get_didcomm_error_code


@dataclass(frozen=True, slots=True)
class MessageOrigin:
    """
    Origin of a message.

    :param peer: rate limit key of the client.
    :param session: its socket; None for an HTTP request.
    :param has_foreign_content_type: whether an HTTP request declared a Content-Type that is not tolerated for
        envelopes.
    """

    peer: str
    session: WebSocketSession | None = None
    has_foreign_content_type: bool = False


@dataclass(frozen=True, slots=True)
class AuthcryptSender:
    """
    An authenticated sender, with names as it spells them: replies mirror that (decision D9).

    :param did: the DID that the encryption proves, did:peer:4 in its short form.
    :param name: the same DID as its messages spell it.
    :param kid: its key, as its messages spell it.
    :param own_kid: the mediator's key, as its messages address it.
    :param draft03: it can only read anoncrypt (reference 1.10).
    """

    did: str
    name: str
    kid: str
    key: PublicKey
    own_kid: str
    own_key: PrivateKey = field(repr=False)
    document: DIDDocument = field(repr=False)
    draft03: bool = False


class RecipientKeys:
    """
    What is needed to pack messages to a subscriber, in little memory, as thousands of sockets have one.

    The attributes are those of :class:`AuthcryptSender`. Its document is not among them, and what has the DID in it
    is kept without it, or once for all.
    """

    __slots__ = ("_key_name", "draft03", "key", "name", "own_key", "own_kid")

    def __init__(self, of: AuthcryptSender) -> None:
        self.name = intern(of.name)
        self.key = of.key
        self.own_kid = intern(of.own_kid)
        self.own_key = of.own_key
        self.draft03 = of.draft03
        self._key_name = of.kid.removeprefix(of.name) if of.kid.startswith(f"{of.name}#") else of.kid

    @property
    def kid(self) -> str:
        """Its key, as its messages spell it."""
        return self.name + self._key_name if self._key_name.startswith("#") else self._key_name


@dataclass(frozen=True, slots=True)
class UnpackedMessage:
    """
    An opened message and what its envelope proves.

    :param own_kid: the mediator's key that opened the outermost layer, as the sender spelled it.
    :param layer: the innermost layer with an authenticated sender, else the innermost.
    :param signer: DID of the verified signature inside, if there was one.
    """

    message: Message
    own_kid: str
    layer: Envelope = field(repr=False)
    authcrypt_sender: AuthcryptSender | None = None
    signer: str | None = None

    @property
    def digest(self) -> bytes:
        """
        Digest for replay protection, the same however the envelope is written or wrapped (reference section 11, row
        24).
        """
        return self.layer.fingerprint()

    @property
    def sender(self) -> str | None:
        """The authenticated DID of the sender, if any."""
        return self.authcrypt_sender.did if self.authcrypt_sender else self.signer


@dataclass(frozen=True, slots=True)
class DIDCommReply:
    """
    The reply on the connection of a message.

    :param status: for HTTP; a socket sends the body as a frame, or nothing if it is empty.
    :param retry_after: seconds.
    :param fault: class of the error for which the message was refused, if it was; an instance would keep the whole
        message alive by its traceback.
    :param code: of its problem report, where it is not the default.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    media_type: str = ""
    retry_after: int | None = None
    fault: type[MediatorError] | None = None
    code: str | None = None


ACCEPTED = DIDCommReply(202)


@dataclass(frozen=True, slots=True)
class ResponseContent:
    """Type, body and attachments of a reply."""

    type: str
    body: Mapping[str, Any]
    attachments: tuple[Mapping[str, Any], ...] = ()


MAX_ENVELOPE_LAYERS = 3

_open_envelope = measure_time(jwe.decrypt_envelope)
_verify, _verify_from_prior = (
    measure_time(json_web_signature.verify),
    measure_time(json_web_signature.verify_from_prior),
)

PrivateKeyLookup = Callable[[str], Sequence[PrivateKey]]


class _SenderClaim(NamedTuple):
    """The claimed sender of an authcrypt layer."""

    kid: str
    key: PublicKey
    document: DIDDocument
    draft03: bool


class _LayerSender(NamedTuple):
    """The proven sender of an authcrypt layer, not yet compared with `from`, and the key that opened it."""

    claim: _SenderClaim
    own_kid: str
    own_key: PrivateKey


class MessageUnpacker:
    """
    Opens envelopes addressed to the mediator.

    :param find_agreement_keys: the mediator's private keys that a kid may denote, the likeliest first.
    :param draft03: whether ECDH-1PU draft 03 is accepted (reference 1.10).
    """

    def __init__(
        self, resolver: IDIDResolver, find_agreement_keys: PrivateKeyLookup, *, draft03: bool = False
    ) -> None:
        self._resolver = resolver
        self._keys_for = find_agreement_keys
        self._draft03 = draft03

    async def open(self, envelope: jwe.Envelope, peer: str) -> UnpackedMessage:
        """
        Open an envelope and all its layers.

        :param peer: address that caused the work, for the limit on network lookups.
        :raise DecryptionError: any failure that depends on keys or ciphertext.
        :raise UnresolvableDID: no key of the sender could be had; likewise UnsupportedDIDMethod.
        :raise SenderMismatch: `from`, encryption and signature do not agree.
        :raise InvalidPlaintext: there is no DIDComm message inside.
        """
        sender: _LayerSender | None = None
        own_kid, layer = "", envelope
        for _ in range(MAX_ENVELOPE_LAYERS):
            kid, keys = self._choose(envelope)
            own_kid = own_kid or kid
            claim = await self._claim_of(envelope, peer)
            if claim and sender and strip_did_url(claim.kid) != strip_did_url(sender.claim.kid):
                raise SenderMismatch
            inner, key = _open_with_any_key(envelope, kid, keys, claim)
            sender = _LayerSender(claim, kid, key) if claim else sender
            layer = envelope if claim or sender is None else layer
            value = _parse_plaintext(inner)
            if "ciphertext" not in value:
                break
            envelope = jwe.parse_envelope_object(value)
        else:
            raise DecryptionError
        signer = None
        if json_web_signature.is_jws(value):
            inner, signer = await self._verify(value, sender, peer)
            value = _parse_plaintext(inner)
        message = parse_message_object(value, inner)
        authcrypt_sender = _check_sender(message, sender, signer)
        return UnpackedMessage(
            message=message,
            own_kid=own_kid,
            layer=layer,
            authcrypt_sender=authcrypt_sender,
            signer=signer,
        )

    def _choose(self, envelope: jwe.Envelope) -> tuple[str, list[PrivateKey]]:
        curve = envelope.curve
        for kid in envelope.encrypted_keys:
            keys = [key for key in self._keys_for(kid) if key.curve == curve]
            if keys:
                return kid, keys
        raise DecryptionError

    async def _claim_of(self, envelope: jwe.Envelope, peer: str) -> _SenderClaim | None:
        kid = envelope.sender_kid
        if kid is None:
            return None
        document = await self._resolver.resolve(strip_did_url(kid), peer)
        method = document.key_agreement_key(kid)
        if method is None or method.key.curve != envelope.curve:
            raise UnresolvableDID
        return _SenderClaim(kid, method.key, document, self._draft03 and envelope.lacks_apv)

    async def _verify(self, value: dict[str, Any], sender: _LayerSender | None, peer: str) -> tuple[bytes, str]:
        """The signed content, and the signer."""
        kid = json_web_signature.get_signer_kid(value)
        # The kid is not authenticated yet, and must not cause the resolution of any other DID.
        if sender is not None and canonicalize_did(kid) != canonicalize_did(sender.claim.kid):
            raise SenderMismatch
        document = await self._resolver.resolve(strip_did_url(kid), peer)
        method = document.authentication_key(kid)
        if method is None:
            raise UnresolvableDID
        return _verify(value, kid, method.key), canonicalize_did(kid)

    async def keep(self, authcrypt_sender: AuthcryptSender) -> None:
        """Store the long form of an account's DID, so that the short form can be resolved (reference 8.4)."""
        await self._resolver.remember_long_form(authcrypt_sender.document.did)

    async def rotation(self, message: Message, peer: str) -> str | None:
        """
        The DID that `from_prior` proves the sender to have used before (reference 2.3).

        :raise SenderMismatch: the token proves nothing of the kind.
        """
        if message.from_prior is None or message.sender is None:
            return None
        try:
            claim = json_web_signature.parse_from_prior(message.from_prior)
            if claim.sub is None or canonicalize_did(claim.sub) != canonicalize_did(message.sender):
                raise SenderMismatch
            if canonicalize_did(claim.kid) != canonicalize_did(claim.iss):
                raise SenderMismatch
            document = await self._resolver.resolve(claim.iss, peer)
            method = document.authentication_key(claim.kid)
            if method is None:
                raise SenderMismatch
            _verify_from_prior(message.from_prior, method.key)
        except (DecryptionError, InvalidPlaintext, ValueError):
            raise SenderMismatch from None
        return canonicalize_did(claim.iss)


def _open_with_any_key(
    envelope: jwe.Envelope, kid: str, keys: Sequence[PrivateKey], claim: _SenderClaim | None
) -> tuple[bytes, PrivateKey]:
    """
    The content, and the key that opened it.

    :raise DecryptionError: none does.
    """
    for key in keys:
        try:
            draft03 = claim is not None and claim.draft03
            return _open_envelope(envelope, kid, key, claim.key if claim else None, draft03=draft03), key
        except DecryptionError:
            continue
    raise DecryptionError


def _parse_plaintext(plaintext: bytes) -> dict[str, Any]:
    try:
        return encoding.loads_object(plaintext)
    except ValueError:
        raise InvalidPlaintext from None


def _check_sender(message: Message, sender: _LayerSender | None, signer: str | None) -> AuthcryptSender | None:
    """
    Agreement of `from`, encryption key and signing key (reference 1.8); no client library checks this.

    :raise SenderMismatch: they differ.
    """
    claimed = canonicalize_did(message.sender) if message.sender else None
    if signer is not None and claimed != signer:
        raise SenderMismatch
    if sender is None:
        return None
    claim = sender.claim
    did = canonicalize_did(claim.kid)
    if claimed != did or message.sender is None:
        raise SenderMismatch
    return AuthcryptSender(
        did=did,
        name=strip_did_url(message.sender),
        kid=claim.kid,
        key=claim.key,
        own_kid=sender.own_kid,
        own_key=sender.own_key,
        document=claim.document,
        draft03=claim.draft03,
    )


_seal_anoncrypt, _seal_authcrypt = measure_time(encrypt_anoncrypt), measure_time(encrypt_authcrypt)
_sign = measure_time(json_web_signature.sign)


@dataclass(frozen=True, slots=True)
class ProblemReportSettings:
    """
    How problem reports are written.

    :param codes: `uc021`, or `identus` for the code that the public conformance suite expects of unknown recipients.
    :param ack: whether `ack` names the message; `pthid` does so for its thread, and some libraries take an array in
        `ack` for an error.
    """

    codes: Literal["uc021", "identus"] = "uc021"
    ack: bool = False


class MessagePacker:
    """
    Packs replies and problem reports.

    :param new_id: source of message ids, lower-case UUIDs.
    :param find_signing_key: the key, with its id, that signs for the DID of a key that a message was encrypted to.
    """

    def __init__(
        self,
        clock: IReactorTime,
        new_id: Callable[[], str],
        find_signing_key: Callable[[str], NamedKey | None],
        reports: ProblemReportSettings,
    ) -> None:
        self._clock = clock
        self.new_id = new_id
        self._signing_key_for = find_signing_key
        self._ack = reports.ack
        self._codes = IDENTUS_PROBLEM_CODES if reports.codes == "identus" else {}

    def pack(self, draft: OutgoingMessage, to: AuthcryptSender | RecipientKeys) -> bytes:
        """The message encrypted to `to`, authenticated unless `to` cannot read that (reference 1.10)."""
        plaintext = draft.plaintext(sender=strip_did_url(to.own_kid), to=to.name, created_time=self._now())
        if to.draft03:
            return _seal_anoncrypt(plaintext, [(to.kid, to.key)])
        return _seal_authcrypt(plaintext, (to.own_kid, to.own_key), [(to.kid, to.key)])

    def plain(self, draft: OutgoingMessage) -> bytes:
        """The message in the clear, for a peer without a known key."""
        return draft.plaintext(sender=None, to=None, created_time=self._now())

    def answer(self, to: Message, type_: str, body: dict[str, object]) -> OutgoingMessage:
        """A message in the thread of the one that it answers."""
        return OutgoingMessage(id=self.new_id(), type=type_, body=body, thid=to.thread)

    def refuse(self, error: MediatorError, received: UnpackedMessage | None) -> DIDCommReply:
        """
        The problem report for an error (reference section 11): by the error, encrypted to an authenticated sender,
        signed for an anonymous one, or in the clear.
        """
        if received is None:
            return self.refuse_unopened(error)
        wire, message = get_didcomm_error_code(error), received.message
        if received.authcrypt_sender is None:
            return self.refuse_anonymous(error, message.id, message.thread, received.own_kid)
        report = self._report(error, message.id, message.thread)
        if wire.encrypted_status is None:
            return self._reply(error, wire.status, self.plain(report), PLAINTEXT_MEDIA_TYPE)
        return self._reply(
            error, wire.encrypted_status, self.pack(report, received.authcrypt_sender), ENCRYPTED_MEDIA_TYPE
        )

    def refuse_anonymous(self, error: MediatorError, id_: str, thread: str, kid: str) -> DIDCommReply:
        """
        The problem report to an anonymous sender: signed, to prove that this mediator opened and refused the message.

        Temporary errors, as an exceeded limit, an unavailable store or a full queue, are reported in the clear, so
        that they cost no signature.

        :param id_: of the message; `thread` is its thread.
        :param kid: the mediator's key that it was encrypted to.
        """
        wire, report = get_didcomm_error_code(error), self._report(error, id_, thread)
        named_key = self._signing_key_for(kid) if wire.is_signed else None
        if named_key is None:
            return self._reply(error, wire.status, self.plain(report), PLAINTEXT_MEDIA_TYPE)
        plaintext = report.plaintext(sender=strip_did_url(kid), to=None, created_time=self._now())
        return self._reply(error, wire.status, _sign(plaintext, *named_key), json_web_signature.SIGNED_MEDIA_TYPE)

    def refuse_unopened(self, error: MediatorError) -> DIDCommReply:
        """The problem report for a message that was not opened: in the clear, naming no message."""
        return self._reply(
            error, get_didcomm_error_code(error).status, self.plain(self._report(error)), PLAINTEXT_MEDIA_TYPE
        )

    def _reply(self, error: MediatorError, status: int, body: bytes, media_type: str) -> DIDCommReply:
        situation = type(error)
        return DIDCommReply(
            status,
            body,
            media_type,
            _retry_after_seconds(error, get_didcomm_error_code(error)),
            situation,
            self._codes.get(situation),
        )

    def _report(self, error: MediatorError, id_: str | None = None, thread: str | None = None) -> OutgoingMessage:
        wire = get_didcomm_error_code(error)
        return OutgoingMessage(
            id=self.new_id(),
            type=PROBLEM_REPORT,
            body={"code": self._codes.get(type(error), wire.code), "comment": wire.comment},
            pthid=thread,
            ack=[id_] if id_ is not None and self._ack else (),
        )

    def _now(self) -> int:
        return int(self._clock.seconds())


def _retry_after_seconds(error: MediatorError, wire: DIDCommErrorCode) -> int | None:
    """Seconds after which the request may be repeated, if known."""
    return wire.retry_after if error.retry_after is None else int(error.retry_after)


def is_unreadable(reply: DIDCommReply) -> bool:
    """Whether the message could not be parsed or decrypted; a socket tolerates few of those (reference 3.2)."""
    return reply.fault is not None and issubclass(reply.fault, (DecryptionError, InvalidEnvelope))


_seal_forward = measure_time(encrypt_anoncrypt)
# One for each routing key of an endpoint, and one for the mediator it stands behind.
MAX_WRAPS = MAX_ROUTING_KEYS + 1
MAX_WRAPPED_BYTES = 8_388_608


class WrapError(Exception):
    """The payload cannot be wrapped: a routing key does not resolve, or the result is too long."""


class ForwardWrapper:
    """
    Wraps payloads in forwards, as the sender of a routed message does.

    :param new_id: source of message ids.
    """

    def __init__(self, resolver: IDIDResolver, clock: IReactorTime, new_id: Callable[[], str]) -> None:
        self._resolver = resolver
        self._clock = clock
        self._new_id = new_id

    async def wrap(
        self, payload: bytes, recipient: str, routing_keys: Sequence[str], peer: str | None = None
    ) -> bytes:
        """
        One more forward for each routing key, the last one innermost (Routing 2.0, sender process step 4).

        :param recipient: `next` of the innermost forward; each further one names the routing key before.
        :param routing_keys: DIDs or DID URLs; a DID stands for all its keys of the most usual curve.
        :param peer: rate limit key for network lookups, if a client causes them.
        :raise WrapError: one of them has no key, there are too many, or the result is too long.
        """
        if len(routing_keys) > MAX_WRAPS:
            raise WrapError
        next_ = recipient
        for routing_key in reversed(routing_keys):
            keys = await self._keys(routing_key, peer)
            draft = make_forward(payload, next_, self._new_id())
            plaintext = draft.plaintext(
                sender=None, to=strip_did_url(routing_key), created_time=int(self._clock.seconds())
            )
            if len(plaintext) > MAX_WRAPPED_BYTES:
                raise WrapError
            payload = _seal_forward(plaintext, keys)
            next_ = routing_key
        return payload

    async def rewrap(self, payload: bytes, recipient: str) -> bytes:
        """
        A fresh forward to the recipient itself around the payload ("Rewrapping").

        :raise WrapError: the recipient's DID has no key.
        """
        return await self.wrap(payload, recipient, [recipient])

    async def _keys(self, routing_key: str, peer: str | None) -> list[tuple[str, PublicKey]]:
        try:
            document = await self._resolver.resolve(strip_did_url(routing_key), peer)
        except MediatorError:
            raise WrapError from None
        keys = _find_encryption_keys(document, routing_key)
        if not keys:
            raise WrapError
        return keys


def _find_encryption_keys(document: DIDDocument, name: str) -> list[tuple[str, PublicKey]]:
    if "#" in name:
        method = document.key_agreement_key(name)
        return [(name, method.key)] if method else []
    for curve in ("X25519", "P-256", "P-384", "P-521"):
        keys = [(method.id, method.key) for method in document.key_agreement if method.key.curve == curve]
        if keys:
            return keys
    return []
