"""Where a deposit comes from, in 63 bits that mean something to one queue only (UC-021 AF-4)."""

from __future__ import annotations

import hmac
from hashlib import blake2b

from mediatord.protocol.canonical_did import make_did_comparison_key
from mediatord.protocol.probe_requests import PROBE_CLIENT

# Of either half, of which 0 is not known; the network has one bit less, so that databases can keep both as a number.
_HALF_BYTES = 4
_HALF_BITS = 8 * _HALF_BYTES
# DIDs of which more than one form is canonical.
_ALIASED_METHODS = ("did:peer:2", "did:peer:3")
_NETWORK_MASK = (1 << _HALF_BITS - 1) - 1


class SenderFingerprint:
    """
    Makes the origins of deposits (:class:`~mediatord.store.interfaces.messages.QueueLimits`): the same for all processes of a
    mediator, and after a restart.

    A half is a keyed hash of a network or a DID together with the recipient. So the same sender has another one in
    each queue, and without the key an origin tells neither who it was nor whether it is that of another queue.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = hmac.digest(seed, b"mediatord origins of deposits", "sha256")

    def compute(self, recipient: str, peer: str, sender: str | None) -> int:
        """
        Of what comes for a recipient; 0 if the daemon has sent it to itself.

        :param recipient: in any canonical form; all forms of one give the same.
        :param peer: the network, as it is charged (:meth:`mediatord.http.client_address.ClientAddressResolver.payer`); empty if not known.
        :param sender: the DID that is proven to have sent it, if any, in any canonical form.
        """
        if peer == PROBE_CLIENT:
            return 0
        # The short way comes here for every message: no function more than it takes.
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
