"""
DIDComm messages: unpacking with checks of the sender (reference 1.6 to 1.8, 2.3), packing of replies and problem
reports, and wrapping of payloads in forwards (4.6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from sys import intern
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

from twisted.internet.interfaces import IReactorTime

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
from mediatord.net.did_resolver import DIDResolver
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm import json_web_signature, jwe
from mediatord.protocol.didcomm.did_document import MAX_ROUTING_KEYS, DIDDocument, strip_did_url
from mediatord.protocol.didcomm.forward import make_forward
from mediatord.protocol.didcomm.json_web_signature import Signature
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE, open_plain_envelope
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.didcomm.message import (
    PLAINTEXT_MEDIA_TYPE,
    PROBLEM_REPORT,
    Message,
    OutgoingMessage,
    parse_message_object,
)
from mediatord.protocol.error_codes import IDENTUS_PROBLEM_CODES, get_didcomm_error_code
from mediatord.ratelimit.admission import RequestReply
from mediatord.runtime.request_time import measure_time
from mediatord.store.interfaces.messages import StoredMessage


@dataclass(frozen=True, slots=True)
class MessageOrigin:
    """
    Origin of a message.

    :param peer: rate limit key of the client.
    :param session: its socket; None for an HTTP request.
    :param has_foreign_content_type: whether an HTTP request declared a Content-Type that is not tolerated for
        envelopes.
    :param content_type: the Content-Type header of an HTTP request as sent; empty without one.
    """

    peer: str
    session: WebSocketSession | None = None
    has_foreign_content_type: bool = False
    content_type: bytes = b""


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
    own_kid: str
    own_key: PrivateKey = field(repr=False)
    kid: str
    key: PublicKey
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


class PushWriter(Protocol):
    """
    A subscriber that writes its frames itself: a wallet of DIDComm v1.

    :ivar reads_queue: whether it takes what it leaves now from the store later, in order of arrival.
    """

    reads_queue: bool

    def push(self, session: WebSocketSession, messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
        """Write messages to its socket; those that the socket took. Never fails."""


# Whom messages are pushed to on a socket.
PushRecipient: TypeAlias = RecipientKeys | PushWriter


@dataclass(frozen=True, slots=True)
class UnpackedMessage:
    """
    An opened message and what its envelope proves.

    :param own_kid: the mediator's key that opened the outermost layer, as the sender spelled it.
    :param digest: for replay protection, the same however the envelope is written or wrapped (reference section 11,
        row 24): of the innermost layer with an authenticated sender, else of the innermost.
    :param signer: DID of the verified signature inside, if there was one.
    :param sender: the authenticated DID of the sender, if any.
    :param seconds: that opening took, where :func:`measure_time` did not count them.
    """

    message: Message
    own_kid: str
    digest: bytes = field(repr=False)
    authcrypt_sender: AuthcryptSender | None = None
    signer: str | None = None
    sender: str | None = None
    seconds: float = 0.0


ACCEPTED = RequestReply(202, media_type="")


MAX_ENVELOPE_LAYERS = 3

_open_envelope = measure_time(jwe.decrypt_envelope)
_verify = measure_time(Signature.verify)


class _ClaimedSender(NamedTuple):
    """The claimed sender of an authcrypt layer; proven once the layer is opened, but not yet compared with `from`."""

    kid: str
    key: PublicKey
    document: DIDDocument
    draft03: bool


class MessageUnpacker:
    """
    Opens envelopes addressed to the mediator.

    :param agreement_keys: the mediator's private keys by the kids that may denote them, the likeliest first.
    :param draft03: whether ECDH-1PU draft 03 is accepted (reference 1.10).
    """

    def __init__(
        self, resolver: DIDResolver, agreement_keys: Mapping[str, Sequence[PrivateKey]], *, draft03: bool = False
    ) -> None:
        self._resolver = resolver
        self._agreement_keys = agreement_keys
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
        sender: _ClaimedSender | None = None
        own: tuple[str, PrivateKey] | None = None
        own_kid, layer = "", envelope
        for _ in range(MAX_ENVELOPE_LAYERS):
            inner, kid, key, claim = await self._open_layer(envelope, sender, peer)
            own_kid = own_kid or kid
            if claim:
                sender, own = claim, (kid, key)
            layer = envelope if claim or sender is None else layer
            value = _parse_plaintext(inner)
            if "ciphertext" not in value:
                break
            envelope = jwe.parse_envelope_object(value)
        else:
            raise DecryptionError
        signer = None
        if "payload" in value:
            inner, signer = await self._verify(value, sender, peer)
            value = _parse_plaintext(inner)
        message = parse_message_object(value, inner)
        authcrypt_sender = _check_sender(message, sender, own, signer)
        did = authcrypt_sender.did if authcrypt_sender else signer
        return UnpackedMessage(message, own_kid, layer.compute_digest(), authcrypt_sender, signer, did)

    def open_at_once(self, raw: bytes) -> UnpackedMessage | None:
        """
        As :meth:`open`, for an authcrypt that :func:`~mediatord.protocol.didcomm.jwe.open_plain_envelope` opens, with
        one layer, by a sender whose document is cached; None for any other message.
        """
        began, claim = perf_counter(), cast(_ClaimedSender | None, None)

        def find_sender_key(kid: str) -> PublicKey | None:
            nonlocal claim
            document = self._resolver.get_cached(strip_did_url(kid))
            method = None if document is None else document.key_agreement_key(kid)
            if document is None or method is None:
                return None
            claim = _ClaimedSender(kid, method.key, document, False)
            return method.key

        opened = open_plain_envelope(raw, self._agreement_keys, find_sender_key)
        if opened is None or claim is None:
            return None
        try:
            value = _parse_plaintext(opened.plaintext)
            if "ciphertext" in value or "payload" in value:
                return None
            message = parse_message_object(value, opened.plaintext)
            sender = _check_sender(message, claim, (opened.kid, opened.key), None)
        except MediatorError:
            return None
        did, seconds = sender.did if sender else None, perf_counter() - began
        return UnpackedMessage(message, opened.kid, opened.digest, sender, None, did, seconds)

    async def _open_layer(
        self, envelope: jwe.Envelope, sender: _ClaimedSender | None, peer: str
    ) -> tuple[bytes, str, PrivateKey, _ClaimedSender | None]:
        """
        The content, the mediator's key that opened it, and the sender if it is an authcrypt.

        :param sender: of the layers around it.
        """
        kid, keys = jwe.find_recipient_key(envelope, self._agreement_keys)
        claim, sender_key, sender_kid = None, None, envelope.sender_kid
        if sender_kid is not None:
            document = await self._resolver.resolve(strip_did_url(sender_kid), peer)
            method = document.key_agreement_key(sender_kid)
            if method is None or method.key.curve != envelope.curve:
                raise UnresolvableDID
            sender_key = method.key
            claim = _ClaimedSender(sender_kid, sender_key, document, self._draft03 and envelope.lacks_apv)
            if sender and strip_did_url(sender_kid) != strip_did_url(sender.kid):
                raise SenderMismatch
        for key in keys:
            with suppress(DecryptionError):
                return _open_envelope(envelope, kid, key, sender_key, draft03=self._draft03), kid, key, claim
        raise DecryptionError

    async def _verify(self, value: dict[str, Any], sender: _ClaimedSender | None, peer: str) -> tuple[bytes, str]:
        """The signed content, and the signer."""
        signature = json_web_signature.parse_jws(value)
        kid = signature.kid
        # The kid is not authenticated yet, and must not cause the resolution of any other DID.
        if sender is not None and canonicalize_did(kid) != canonicalize_did(sender.kid):
            raise SenderMismatch
        method = (await self._resolver.resolve(strip_did_url(kid), peer)).authentication_key(kid)
        if method is None:
            raise UnresolvableDID
        return _verify(signature, method.key), canonicalize_did(kid)

    def is_kept(self, authcrypt_sender: AuthcryptSender) -> bool:
        """Whether :meth:`keep` would do nothing."""
        return self._resolver.is_remembered(authcrypt_sender.document.did)

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
            if canonicalize_did(claim.signature.kid) != canonicalize_did(claim.iss):
                raise SenderMismatch
            document = await self._resolver.resolve(claim.iss, peer)
            method = document.authentication_key(claim.signature.kid)
            if method is None:
                raise SenderMismatch
            _verify(claim.signature, method.key)
        except (DecryptionError, InvalidPlaintext, ValueError):
            raise SenderMismatch from None
        return canonicalize_did(claim.iss)


def _parse_plaintext(plaintext: bytes) -> dict[str, Any]:
    try:
        return encoding.loads_object(plaintext)
    except ValueError:
        raise InvalidPlaintext from None


def _check_sender(
    message: Message, sender: _ClaimedSender | None, own: tuple[str, PrivateKey] | None, signer: str | None
) -> AuthcryptSender | None:
    """
    Agreement of `from`, encryption key and signing key (reference 1.8); no client library checks this.

    :param own: the mediator's key, by which `sender` is proven.
    :raise SenderMismatch: they differ.
    """
    claimed = canonicalize_did(message.sender) if message.sender else None
    if signer is not None and claimed != signer:
        raise SenderMismatch
    if sender is None or own is None:
        return None
    is_own_key = sender.kid.startswith(f"{message.sender}#") or canonicalize_did(sender.kid) == claimed
    if claimed is None or message.sender is None or not is_own_key:
        raise SenderMismatch
    kid, key, document, draft03 = sender
    name = claimed if message.sender == claimed else strip_did_url(message.sender)
    return AuthcryptSender(claimed, name, *own, kid, key, document, draft03)


_encrypt, _sign = measure_time(jwe.encrypt), measure_time(json_web_signature.sign)


class MessagePacker:
    """
    Packs replies and problem reports.

    :param new_id: source of message ids, lower-case UUIDs.
    :param find_signing_key: the key, with its id, that signs for the DID of a key that a message was encrypted to.
    :param codes: `uc021`, or `identus` for the code that the public conformance suite expects of unknown recipients.
    :param ack: whether `ack` of problem reports names the message; `pthid` does so for its thread, and some libraries
        take an array in `ack` for an error.
    """

    def __init__(
        self,
        clock: IReactorTime,
        new_id: Callable[[], str],
        find_signing_key: Callable[[str], NamedKey | None],
        *,
        codes: Literal["uc021", "identus"],
        ack: bool,
    ) -> None:
        self._clock = clock
        self.new_id = new_id
        self._signing_key_for = find_signing_key
        self._ack = ack
        self._codes = IDENTUS_PROBLEM_CODES if codes == "identus" else {}

    def answer(
        self, to: Message, type_: str, body: Mapping[str, object], attachments: Sequence[Mapping[str, Any]] = ()
    ) -> OutgoingMessage:
        """A message in the thread of the one that it answers."""
        return OutgoingMessage(self.new_id(), type_, body, thid=to.thid or to.id, attachments=attachments)

    def pack(self, draft: OutgoingMessage, to: AuthcryptSender | RecipientKeys) -> bytes:
        """The message encrypted to `to`, authenticated unless `to` cannot read that (reference 1.10)."""
        now, kid = int(self._clock.seconds()), to.kid
        plaintext = draft.plaintext(sender=to.own_kid.partition("#")[0], to=to.name, created_time=now)
        sender = None if to.draft03 else (to.own_kid, to.own_key)
        return _encrypt(plaintext, [(kid, to.key)], sender)

    def refuse(self, error: MediatorError, received: UnpackedMessage | None) -> RequestReply:
        """
        The problem report for an error (reference section 11): by the error, encrypted to an authenticated sender,
        signed for an anonymous one, or in the clear; in the clear and naming no message if none was opened.
        """
        if received is None:
            return self._reply(error, self._report(error))
        wire, message = get_didcomm_error_code(error), received.message
        if received.authcrypt_sender is None:
            return self.refuse_anonymous(error, message.id, message.thread, received.own_kid)
        report = self._report(error, message.id, message.thread)
        if wire.encrypted_status is None:
            return self._reply(error, report)
        packed = self.pack(report, received.authcrypt_sender), ENCRYPTED_MEDIA_TYPE
        return self._reply(error, packed, wire.encrypted_status)

    def refuse_anonymous(self, error: MediatorError, id_: str, thread: str, kid: str) -> RequestReply:
        """
        The problem report to an anonymous sender: signed, to prove that this mediator opened and refused the message.

        Temporary errors, as an exceeded limit, an unavailable store or a full queue, are reported in the clear, so
        that they cost no signature.

        :param id_: of the message; `thread` is its thread.
        :param kid: the mediator's key that it was encrypted to.
        """
        report = self._report(error, id_, thread)
        named_key = self._signing_key_for(kid) if get_didcomm_error_code(error).is_signed else None
        if named_key is None:
            return self._reply(error, report)
        plaintext = report.plaintext(sender=strip_did_url(kid), to=None, created_time=int(self._clock.seconds()))
        return self._reply(error, (_sign(plaintext, *named_key), json_web_signature.SIGNED_MEDIA_TYPE))

    def _reply(
        self, error: MediatorError, report: OutgoingMessage | tuple[bytes, str], status: int | None = None
    ) -> RequestReply:
        """:param report: in the clear, or as bytes with their media type."""
        wire, situation = get_didcomm_error_code(error), type(error)
        if isinstance(report, OutgoingMessage):
            now = int(self._clock.seconds())
            report = report.plaintext(sender=None, to=None, created_time=now), PLAINTEXT_MEDIA_TYPE
        retry_after = wire.retry_after if error.retry_after is None else int(error.retry_after)
        return RequestReply(status or wire.status, *report, retry_after, situation, self._codes.get(situation))

    def _report(self, error: MediatorError, id_: str | None = None, thread: str | None = None) -> OutgoingMessage:
        wire = get_didcomm_error_code(error)
        return OutgoingMessage(
            id=self.new_id(),
            type=PROBLEM_REPORT,
            body={"code": self._codes.get(type(error), wire.code), "comment": wire.comment},
            pthid=thread,
            ack=[id_] if id_ is not None and self._ack else (),
        )


def is_unreadable(fault: type[MediatorError]) -> bool:
    """Whether a message could not be parsed or decrypted; a socket tolerates few of those (reference 3.2)."""
    return issubclass(fault, (DecryptionError, InvalidEnvelope))


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

    def __init__(self, resolver: DIDResolver, clock: IReactorTime, new_id: Callable[[], str]) -> None:
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
            payload = _encrypt(plaintext, keys, None)
            next_ = routing_key
        return payload

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
