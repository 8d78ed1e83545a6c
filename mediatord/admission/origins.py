"""Where a deposit comes from, in 63 bits that mean something to one queue only (UC-021 AF-4)."""

from __future__ import annotations

import hmac
from hashlib import blake2b

from mediatord.protocol.canonical_did import common_form
from mediatord.synthetic import ITSELF

# Of either half, of which 0 is not known; the network has one bit less, so that databases can keep both as a number.
_BYTES = 4
_BITS = 8 * _BYTES
# DIDs of which more than one form is canonical.
_OF_MANY_FORMS = ("did:peer:2", "did:peer:3")
_NETWORK = (1 << _BITS - 1) - 1


class Origins:
    """
    Makes the origins of deposits (:class:`~mediatord.interfaces.QueueLimits`): the same for all processes of a
    mediator, and after a restart.

    A half is a keyed hash of a network or a DID together with the recipient. So the same sender has another one in
    each queue, and without the key an origin tells neither who it was nor whether it is that of another queue.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = hmac.digest(seed, b"mediatord origins of deposits", "sha256")

    def of(self, recipient: str, peer: str, sender: str | None) -> int:
        """
        Of what comes for a recipient; 0 if the daemon has sent it to itself.

        :param recipient: in any canonical form; all forms of one give the same.
        :param peer: the network, as it is charged (:meth:`mediatord.web.peers.Peers.payer`); empty if not known.
        :param sender: the DID that is proven to have sent it, if any, in any canonical form.
        """
        if peer == ITSELF:
            return 0
        # The short way comes here for every message: no function more than it takes.
        if recipient.startswith(_OF_MANY_FORMS):
            recipient = common_form(recipient)
        data = f"{len(peer)} {peer}{recipient}".encode("utf-8", "surrogatepass")
        tag = blake2b(data, digest_size=_BYTES, key=self._key, person=b"network").digest()
        network = (int.from_bytes(tag) & _NETWORK or 1) << _BITS if peer else 0
        return network if sender is None else network | self._sender(recipient, sender)

    def _sender(self, recipient: str, sender: str) -> int:
        if sender.startswith(_OF_MANY_FORMS):
            sender = common_form(sender)
        data = f"{len(sender)} {sender}{recipient}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(data, digest_size=_BYTES, key=self._key, person=b"sender").digest()) or 1
