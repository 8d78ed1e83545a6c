"""
Authentication of Decentrl commands: by their time window, signature and nonce (DCTRL-0004 5.4, 6.2, reference 6.1),
with the signing keys of DIDs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import InvalidSignature, SenderNotFound, SenderSigningKeyNotFound, TimestampOutOfRange
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol.decentrl.crypto import verify_bytes
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.runtime.request_time import measure_time
from mediatord.store.interfaces.decentrl import CommandGuard

_verify = measure_time(verify_bytes)
# Seconds that a nonce is kept after its command has left the time window.
_NONCE_EXPIRY_MARGIN = 1.0

SigningKeyLookup = Callable[[str, str], bytes | None]


@dataclass(frozen=True, slots=True)
class KeyDirectory:
    """
    Resolves `did:decentrl`, which contains its keys, and the mediator's own DIDs; nothing else, and never over the
    network (reference 2.2).

    :param own_dids: the mediator's DIDs; kept up to date by its owner.
    :param get_own_keys: returns the mediator's current Ed25519 public key and the former ones.
    """

    own_dids: Collection[str]
    get_own_keys: Callable[[], Sequence[bytes]]

    def owns(self, did: str) -> bool:
        """Whether it is a DID of the mediator."""
        return did in self.own_dids

    def resolves(self, did: str) -> bool:
        """Whether this DID has a document."""
        if did in self.own_dids:
            return True
        try:
            parse_did(did)
        except ValueError:
            return False
        return True

    def signing_key(self, did: str, key_id: str, number: int = 0) -> bytes | None:
        """
        The Ed25519 public key with exactly this id in the document of this DID, or None.

        :param number: of the mediator's key: 0 is the current one.
        """
        if key_id != f"{did}#signing":
            return None
        if did in self.own_dids:
            return self.get_own_keys()[number]
        try:
            return parse_did(did).signing_key
        except ValueError:
            return None

    def signing_key_lookups(self, dids: Collection[str]) -> Iterator[SigningKeyLookup]:
        """
        Key lookups to verify signatures with: :meth:`signing_key`, and for signatures of the mediator the same with
        each former key.

        :param dids: of the signers.
        """
        is_own = any(map(self.owns, dids))
        for number in range(len(self.get_own_keys()) if is_own else 1):
            yield partial(self.signing_key, number=number)


@dataclass(frozen=True, slots=True)
class CommandAuthenticator:
    """
    Authenticates the senders of commands and the peers of sockets.

    By the protocol the nonce is claimed before the signature is checked. Only the order of refusals shows outside, so
    the signature is checked first, without waiting, and the nonce is claimed in the transaction that carries out the
    command.

    :param window: seconds that a timestamp may be off, either way.
    """

    clock: IReactorTime
    key_directory: KeyDirectory
    recorder: EventRecorder
    window: float

    def make_guard(self, purpose: bytes, did: str, nonce: str, timestamp_ms: float) -> CommandGuard:
        """
        A guard that claims the nonce for as long as it can be used: a timestamp ahead stays within the window for
        longer (reference 6.1).

        :param purpose: nonces of different purposes are distinct.
        :raise TimestampOutOfRange: the timestamp is off by more than the window.
        """
        now = self.clock.seconds()
        if abs(now * 1000 - timestamp_ms) > self.window * 1000:
            # The sender is not authenticated, so it is not logged.
            self.recorder.record_replay("decentrl", None, TimestampOutOfRange(), age_ms=now * 1000 - timestamp_ms)
            raise TimestampOutOfRange
        digest = blake2b(b"%d:" % len(did), digest_size=16, person=purpose)
        digest.update(f"{did}{nonce}".encode())
        until = max(now, timestamp_ms / 1000) + self.window + _NONCE_EXPIRY_MARGIN
        return CommandGuard(digest.digest(), until)

    def verify_signature(self, did: str, key_id: str, signed: bytes, signature: str) -> bytes:
        """
        The key that a message is signed with.

        :raise SenderNotFound: the DID does not resolve.
        :raise SenderSigningKeyNotFound: it has no such key.
        :raise InvalidSignature: the signature does not verify.
        """
        key = self.key_directory.signing_key(did, key_id)
        if key is None:
            raise SenderSigningKeyNotFound if self.key_directory.resolves(did) else SenderNotFound
        if not _verify(signed, signature, key):
            raise InvalidSignature
        return key
