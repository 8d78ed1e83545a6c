"""Authentication of commands: time window, signature, nonce (DCTRL-0004 5.4, 6.2, reference 6.1)."""

from __future__ import annotations

import contextlib
from hashlib import blake2b

from twisted.internet.interfaces import IReactorTime

from mediatord.clock import measure_time
from mediatord.decentrl.context import CommandRequest, KeyDirectory
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
from mediatord.store.interfaces.decentrl import CommandGuard, IDecentrlStore

_verify = measure_time(verify_bytes)
# Seconds that a nonce is kept after its command has left the time window.
_NONCE_EXPIRY_MARGIN = 1.0
# Share of the nonce capacity that may be in use for the nonce of a forged command to be stored.
_FORGED_NONCE_SHARE = 0.5


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
        sender, timestamp_ms = header.sender_did, header.timestamp
        self.check_time(timestamp_ms)
        nonce = hash_nonce(b"command", sender, header.nonce)
        expires_at = self.compute_nonce_expiry(timestamp_ms)
        try:
            key = self.check_signature(sender, header.sender_signing_key_id, command.signed, command.signature)
        except MediatorError:
            # Without room for the nonce it may be sent again, and is then found to be forged again.
            with contextlib.suppress(ReplayCacheFull):
                await self._store.check_guard(CommandGuard(nonce, expires_at, share=_FORGED_NONCE_SHARE))
            raise
        return CommandRequest(command, sender, request_id, key, nonce, expires_at, peer)

    def check_time(self, timestamp_ms: float) -> None:
        """:raise TimestampOutOfRange: the timestamp is off by more than the window."""
        now_ms = self._clock.seconds() * 1000
        if abs(now_ms - timestamp_ms) > self._window * 1000:
            # The sender is not authenticated, so it is not logged.
            self._recorder.record_replay("decentrl", None, TimestampOutOfRange(), age_ms=now_ms - timestamp_ms)
            raise TimestampOutOfRange

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

    def compute_nonce_expiry(self, timestamp_ms: float) -> float:
        """Until when a nonce is kept: a timestamp ahead stays within the window for longer (reference 6.1)."""
        return max(self._clock.seconds(), timestamp_ms / 1000) + self._window + _NONCE_EXPIRY_MARGIN


def hash_nonce(purpose: bytes, did: str, nonce: str) -> bytes:
    """Digest that a nonce is stored by, distinct by sender and purpose."""
    digest = blake2b(digest_size=16, person=purpose)
    digest.update(b"%d:" % len(did))
    digest.update(f"{did}{nonce}".encode())
    return digest.digest()
