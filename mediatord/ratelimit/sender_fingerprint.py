"""Keyed 63-bit fingerprint of a message's sender, specific to the recipient's queue (UC-021 AF-4)."""

from __future__ import annotations

import hmac
from hashlib import blake2b

from mediatord.protocol.canonical_did import make_did_comparison_key
from mediatord.protocol.probe_requests import PROBE_CLIENT

# Size of each half; 0 means unknown. The network half has one bit less, so that databases can store both as one
# integer.
_HALF_BYTES = 4
_HALF_BITS = 8 * _HALF_BYTES
# DID methods with several canonical forms.
_ALIASED_METHODS = ("did:peer:2", "did:peer:3")
_NETWORK_MASK = (1 << _HALF_BITS - 1) - 1


class SenderFingerprint:
    """
    Computes sender fingerprints (:class:`~mediatord.store.interfaces.messages.QueueLimits`), equal for all processes
    of a mediator and across restarts.

    Each half is a keyed hash of network or sender DID together with the recipient. So a sender has different
    fingerprints in different queues, and without the key they reveal nothing.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = hmac.digest(seed, b"mediatord origins of deposits", "sha256")

    def compute(self, recipient: str, peer: str, sender: str | None) -> int:
        """
        Fingerprint of a sender in a recipient's queue; 0 for the daemon's own probes.

        :param recipient: in any canonical form; all forms of a DID give the same result.
        :param peer: rate limit key of the client's network
            (:meth:`mediatord.http.client_address.ClientAddressResolver.rate_limit_key`); empty if unknown.
        :param sender: authenticated DID of the sender, if any, in any canonical form.
        """
        if peer == PROBE_CLIENT:
            return 0
        # On the fast path of every message: no call more than necessary.
        if recipient.startswith(_ALIASED_METHODS):
            recipient = make_did_comparison_key(recipient)
        data = f"{len(peer)} {peer}{recipient}".encode("utf-8", "surrogatepass")
        tag = blake2b(data, digest_size=_HALF_BYTES, key=self._key, person=b"network").digest()
        network = (int.from_bytes(tag) & _NETWORK_MASK or 1) << _HALF_BITS if peer else 0
        return network if sender is None else network | self._sender(recipient, sender)

    def _sender(self, recipient: str, sender: str) -> int:
        if sender.startswith(_ALIASED_METHODS):
            sender = make_did_comparison_key(sender)
        data = f"{len(sender)} {sender}{recipient}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(data, digest_size=_HALF_BYTES, key=self._key, person=b"sender").digest()) or 1
