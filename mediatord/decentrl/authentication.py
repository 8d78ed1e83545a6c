"""Whose a command is, and whether it is of now (DCTRL-0004 5.4, 6.2, reference 6.1)."""

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
# Seconds by which a nonce outlives the last moment at which its command is within the window.
_NONCE_EXPIRY_MARGIN = 1.0
# Of the room for nonces, how much may be taken for one of a command that anybody can have made up.
_FORGED_NONCE_SHARE = 0.5


class CommandAuthenticator:
    """
    Proves senders.

    A command's nonce is claimed before its signature is looked at. What that looks like from outside depends only on
    the order in which refusals are given, so the signature, which needs no waiting, is checked first here, and the
    nonce is claimed in the transaction that carries the command out.

    :param window: seconds that a clock may be off, either way.
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

    async def authenticate(self, command: DecentrlCommand, request: str, peer: str = "") -> CommandRequest:
        """
        The order that a command is, to be carried out under its guard.

        :param request: id of the request that it came with.
        :raise TimestampOutOfRange: it was made too long ago, or will be made too long from now.
        :raise DuplicateNonce: it is forged, and came before.
        :raise SenderNotFound: its sender does not resolve.
        :raise SenderSigningKeyNotFound: its sender has no such key.
        :raise InvalidSignature: it is not what the sender signed.
        """
        self.check_time(command.header.timestamp)
        nonce = hash_nonce(b"command", command.header.sender_did, command.header.nonce)
        until = self.until(command.header.timestamp)
        try:
            key = self.check_signature(
                command.header.sender_did, command.header.sender_signing_key_id, command.signed, command.signature
            )
        except MediatorError:
            # Where there is no room for it, it may come again: it is forged then, too.
            with contextlib.suppress(ReplayCacheFull):
                await self._store.check_guard(CommandGuard(nonce, until, share=_FORGED_NONCE_SHARE))
            raise
        return CommandRequest(command, request, key, nonce, until, peer)

    def check_time(self, timestamp_ms: float) -> None:
        """:raise TimestampOutOfRange: off by more than the window; off by exactly that is fine."""
        now_ms = self._clock.seconds() * 1000
        if abs(now_ms - timestamp_ms) > self._window * 1000:
            # Nobody has proven to be the sender, so none is named.
            self._recorder.record_replay("decentrl", None, TimestampOutOfRange(), age_ms=now_ms - timestamp_ms)
            raise TimestampOutOfRange

    def check_signature(self, did: str, key_id: str, signed: bytes, signature: str) -> bytes:
        """
        The key that verifies it.

        :raise SenderNotFound: the DID does not resolve.
        :raise SenderSigningKeyNotFound: it has no such key.
        :raise InvalidSignature: it does not verify.
        """
        if not self._key_directory.resolves(did):
            raise SenderNotFound
        key = self._key_directory.signing_key(did, key_id)
        if key is None:
            raise SenderSigningKeyNotFound
        if not _verify(signed, signature, key):
            raise InvalidSignature
        return key

    def until(self, timestamp_ms: float) -> float:
        """How long a nonce is kept: what is dated ahead stays within the window for longer (reference 6.1)."""
        return max(self._clock.seconds(), timestamp_ms / 1000) + self._window + _NONCE_EXPIRY_MARGIN


def hash_nonce(purpose: bytes, did: str, nonce: str) -> bytes:
    """What a nonce is remembered as: the same nonce of another sender, or for another purpose, is another one."""
    digest = blake2b(digest_size=16, person=purpose)
    digest.update(b"%d:" % len(did))
    digest.update(f"{did}{nonce}".encode())
    return digest.digest()
