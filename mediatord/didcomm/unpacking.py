"""Opening what arrives, layer by layer, and checking who is behind it (reference 1.6 to 1.8, 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mediatord.didcomm.exchange import Correspondent, Received
from mediatord.errors import (
    NotAMessage,
    SenderMismatch,
    SenderUnresolvable,
    Undecryptable,
)
from mediatord.interfaces import IResolver
from mediatord.protocol import jsontext
from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm import signed
from mediatord.protocol.didcomm.did import DIDDocument, did_of
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.didcomm.message import Message, read_message
from mediatord.stopwatch import timed

MAX_LAYERS = 3

_open_envelope = timed(jwe.open_envelope)
_verify, _verify_from_prior = timed(signed.verify), timed(signed.verify_from_prior)

KeyFinder = Callable[[str], Sequence[PrivateKey]]


class _Claim(NamedTuple):
    """Whom an authcrypt layer says it was encrypted by."""

    kid: str
    key: PublicKey
    document: DIDDocument
    draft03: bool


class _Sender(NamedTuple):
    """Whom an authcrypt layer was encrypted by, not yet compared with `from`, and our key that opened it."""

    claim: _Claim
    own_kid: str
    own_key: PrivateKey


class Unpacking:
    """
    Opens envelopes addressed to us.

    :param keys_for: our private keys that a kid may denote, in any spelling, the likeliest first.
    :param draft03: whether ECDH-1PU draft 03 is accepted (reference 1.10).
    """

    def __init__(self, resolver: IResolver, keys_for: KeyFinder, *, draft03: bool = False) -> None:
        self._resolver = resolver
        self._keys_for = keys_for
        self._draft03 = draft03

    async def open(self, envelope: jwe.Envelope, peer: str) -> Received:
        """
        Open an envelope and all layers in it.

        :param peer: address that caused the work, for the limit on network lookups.
        :raise Undecryptable: any failure that depends on keys or ciphertext.
        :raise SenderUnresolvable: no key of the sender could be had; likewise SenderUnsupported.
        :raise SenderMismatch: `from`, encryption and signature do not agree.
        :raise NotAMessage: there is no DIDComm message inside.
        """
        sender: _Sender | None = None
        own_kid, layer = "", envelope
        for _ in range(MAX_LAYERS):
            kid, keys = self._choose(envelope)
            own_kid = own_kid or kid
            claim = await self._claim_of(envelope, peer)
            if claim and sender and did_of(claim.kid) != did_of(sender.claim.kid):
                raise SenderMismatch
            inner, key = _opened(envelope, kid, keys, claim)
            sender = _Sender(claim, kid, key) if claim else sender
            layer = envelope if claim or sender is None else layer
            value = _object(inner)
            if "ciphertext" not in value:
                break
            envelope = jwe.parse_object(value)
        else:
            raise Undecryptable
        signer = None
        if signed.is_signed(value):
            inner, signer = await self._verify(value, sender, peer)
            value = _object(inner)
        message = read_message(value, inner)
        correspondent = _check_sender(message, sender, signer)
        return Received(
            message=message,
            own_kid=own_kid,
            layer=layer,
            correspondent=correspondent,
            signer=signer,
        )

    def _choose(self, envelope: jwe.Envelope) -> tuple[str, list[PrivateKey]]:
        for kid in envelope.kids:
            keys = [key for key in self._keys_for(kid) if key.curve == envelope.curve]
            if keys:
                return kid, keys
        raise Undecryptable

    async def _claim_of(self, envelope: jwe.Envelope, peer: str) -> _Claim | None:
        if not envelope.authenticated:
            return None
        kid = envelope.sender_kid
        if kid is None:
            raise Undecryptable
        document = await self._resolver.resolve(did_of(kid), peer)
        method = document.key_agreement_key(kid)
        if method is None or method.key.curve != envelope.curve:
            raise SenderUnresolvable
        return _Claim(kid, method.key, document, self._draft03 and envelope.without_apv)

    async def _verify(self, value: dict[str, Any], sender: _Sender | None, peer: str) -> tuple[bytes, str]:
        """What a signature covers, and who made it."""
        kid = signed.signer_kid(value)
        # The kid is not authenticated yet: nobody shall make us resolve a stranger's DID by writing it there.
        if sender is not None and canonical_did(kid) != canonical_did(sender.claim.kid):
            raise SenderMismatch
        document = await self._resolver.resolve(did_of(kid), peer)
        method = document.authentication_key(kid)
        if method is None:
            raise SenderUnresolvable
        return _verify(value, kid, method.key), canonical_did(kid)

    async def keep(self, correspondent: Correspondent) -> None:
        """Remember the DID of an account, so that its short form will do from now on (reference 8.4)."""
        await self._resolver.keep(correspondent.document.did)

    async def rotation(self, message: Message, peer: str) -> str | None:
        """
        The DID that `from_prior` proves the sender to have used before (reference 2.3).

        :raise SenderMismatch: the token is there and does not say so.
        """
        if message.from_prior is None or message.sender is None:
            return None
        try:
            claim = signed.read_from_prior(message.from_prior)
            if claim.sub is None or canonical_did(claim.sub) != canonical_did(message.sender):
                raise SenderMismatch
            if canonical_did(claim.kid) != canonical_did(claim.iss):
                raise SenderMismatch
            document = await self._resolver.resolve(claim.iss, peer)
            method = document.authentication_key(claim.kid)
            if method is None:
                raise SenderMismatch
            _verify_from_prior(message.from_prior, method.key)
        except (Undecryptable, NotAMessage, ValueError):
            raise SenderMismatch from None
        return canonical_did(claim.iss)


def _opened(
    envelope: jwe.Envelope, kid: str, keys: Sequence[PrivateKey], claim: _Claim | None
) -> tuple[bytes, PrivateKey]:
    """
    What is in it, and which of our keys has opened it.

    :raise Undecryptable: none does.
    """
    for key in keys:
        try:
            draft03 = claim is not None and claim.draft03
            return _open_envelope(envelope, kid, key, claim.key if claim else None, draft03=draft03), key
        except Undecryptable:
            continue
    raise Undecryptable


def _object(plaintext: bytes) -> dict[str, Any]:
    try:
        return jsontext.loads_object(plaintext)
    except ValueError:
        raise NotAMessage from None


def _check_sender(message: Message, sender: _Sender | None, signer: str | None) -> Correspondent | None:
    """
    Agreement of `from`, encryption key and signing key (reference 1.8); no client library checks this.

    :raise SenderMismatch: they differ.
    """
    claimed = canonical_did(message.sender) if message.sender else None
    if signer is not None and claimed != signer:
        raise SenderMismatch
    if sender is None:
        return None
    claim = sender.claim
    did = canonical_did(claim.kid)
    if claimed != did or message.sender is None:
        raise SenderMismatch
    return Correspondent(
        did=did,
        name=did_of(message.sender),
        kid=claim.kid,
        key=claim.key,
        own_kid=sender.own_kid,
        own_key=sender.own_key,
        document=claim.document,
        draft03=claim.draft03,
    )
