"""
Authentication of Decentrl commands: by their time window, signature and nonce (DCTRL-0004 5.4, 6.2, reference 6.1),
with the signing keys of DIDs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from twisted.internet.interfaces import IReactorTime

from mediatord.clock import measure_time
from mediatord.errors import (
    InvalidSignature,
    MediatorError,
    ReplayCacheFull,
    SenderNotFound,
    SenderSigningKeyNotFound,
    TimestampOutOfRange,
)
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol.decentrl.commands import DecentrlCommand
from mediatord.protocol.decentrl.crypto import verify_bytes
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.store.interfaces.decentrl import CommandGuard, IDecentrlStore

_verify = measure_time(verify_bytes)
# Seconds that a nonce is kept after its command has left the time window.
_NONCE_EXPIRY_MARGIN = 1.0
# Share of the nonce capacity that may be in use for the nonce of a forged command to be stored.
_FORGED_NONCE_SHARE = 0.5

SigningKeyLookup = Callable[[str, str], bytes | None]


class KeyDirectory:
    """
    Resolves `did:decentrl`, which contains its keys, and the mediator's own DIDs; nothing else, and never over the
    network (reference 2.2).

    :param own_dids: the mediator's DIDs; kept up to date by its owner.
    :param get_own_keys: returns the mediator's current Ed25519 public key and the former ones.
    """

    def __init__(self, own_dids: Collection[str], get_own_keys: Callable[[], Sequence[bytes]]) -> None:
        self._own_dids = own_dids
        self._get_own_keys = get_own_keys

    def owns(self, did: str) -> bool:
        """Whether it is a DID of the mediator."""
        return did in self._own_dids

    def resolves(self, did: str) -> bool:
        """Whether this DID has a document."""
        if did in self._own_dids:
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
        if did in self._own_dids:
            return self._get_own_keys()[number]
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
        for number in range(len(self._get_own_keys()) if is_own else 1):
            yield partial(self.signing_key, number=number)


@dataclass(slots=True)
class CommandRequest:
    """
    A command whose sender is authenticated.

    :param sender: its DID.
    :param request_id: of the request in the log.
    :param key: Ed25519 public key that the command is signed with.
    :param nonce: digest of nonce and sender.
    :param expires_at: when the nonce may be forgotten, Unix seconds.
    :param peer: rate limit key.
    :param guard: conditions under which the store carries out the command; by default only that it is no replay.
    """

    command: DecentrlCommand
    sender: str
    request_id: str
    key: bytes = field(repr=False)
    nonce: bytes
    expires_at: float
    peer: str
    guard: CommandGuard

    @property
    def recipient(self) -> str:
        """The DID that the command is addressed to."""
        return self.command.header.recipient_did

    def make_guard(self, recipient: str | None) -> CommandGuard:
        """As `guard`. :param recipient: DID that has to be registered as well."""
        return CommandGuard(self.nonce, self.expires_at, recipient=recipient)


class CommandAuthenticator:
    """
    Authenticates senders.

    By the protocol the nonce is claimed before the signature is checked. Only the order of refusals shows outside, so
    the signature is checked first, without waiting, and the nonce is claimed in the transaction that carries out the
    command.

    :param window: seconds that a timestamp may be off, either way.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IDecentrlStore,
        key_directory: KeyDirectory,
        recorder: EventRecorder,
        window: float,
    ) -> None:
        self._clock = clock
        self._store = store
        self._key_directory = key_directory
        self._recorder = recorder
        self._window = window

    async def authenticate(self, command: DecentrlCommand, request_id: str, peer: str) -> CommandRequest:
        """
        A command with its proven sender, to be carried out under its guard.

        :param request_id: of the request in the log.
        :param peer: rate limit key.
        :raise TimestampOutOfRange: its timestamp is outside the window.
        :raise DuplicateNonce: it is forged, and was received before.
        :raise SenderNotFound: its sender does not resolve.
        :raise SenderSigningKeyNotFound: its sender has no such key.
        :raise InvalidSignature: it is not what the sender signed.
        """
        header = command.header
        sender = header.sender_did
        expires_at = self.check_time(header.timestamp)
        nonce = hash_nonce(b"command", sender, header.nonce)
        try:
            key = self.check_signature(sender, header.sender_signing_key_id, command.signed, command.signature)
        except MediatorError:
            # Without room for the nonce it may be sent again, and is then found to be forged again.
            with suppress(ReplayCacheFull):
                await self._store.check_guard(CommandGuard(nonce, expires_at, share=_FORGED_NONCE_SHARE))
            raise
        guard = CommandGuard(nonce, expires_at)
        return CommandRequest(command, sender, request_id, key, nonce, expires_at, peer, guard)

    def check_time(self, timestamp_ms: float) -> float:
        """
        Until when the nonce is kept: a timestamp ahead stays within the window for longer (reference 6.1).

        :raise TimestampOutOfRange: the timestamp is off by more than the window.
        """
        now = self._clock.seconds()
        if abs(now * 1000 - timestamp_ms) > self._window * 1000:
            # The sender is not authenticated, so it is not logged.
            self._recorder.record_replay("decentrl", None, TimestampOutOfRange(), age_ms=now * 1000 - timestamp_ms)
            raise TimestampOutOfRange
        return max(now, timestamp_ms / 1000) + self._window + _NONCE_EXPIRY_MARGIN

    def check_signature(self, did: str, key_id: str, signed: bytes, signature: str) -> bytes:
        """
        The key that a message is signed with.

        :raise SenderNotFound: the DID does not resolve.
        :raise SenderSigningKeyNotFound: it has no such key.
        :raise InvalidSignature: the signature does not verify.
        """
        key = self._key_directory.signing_key(did, key_id)
        if key is None:
            raise SenderSigningKeyNotFound if self._key_directory.resolves(did) else SenderNotFound
        if not _verify(signed, signature, key):
            raise InvalidSignature
        return key


def hash_nonce(purpose: bytes, did: str, nonce: str) -> bytes:
    """Digest that a nonce is stored by, distinct by sender and purpose."""
    digest = blake2b(digest_size=16, person=purpose)
    digest.update(b"%d:" % len(did))
    digest.update(f"{did}{nonce}".encode())
    return digest.digest()
