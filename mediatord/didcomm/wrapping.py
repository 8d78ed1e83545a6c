"""Putting a payload into further forwards: for a recipient's routing keys, or for its endpoint (reference 4.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediatorError
from mediatord.interfaces import IResolver
from mediatord.protocol.didcomm.did import DIDDocument, did_of
from mediatord.protocol.didcomm.did_document import MAX_ROUTING_KEYS
from mediatord.protocol.didcomm.envelope import seal_anoncrypt
from mediatord.protocol.didcomm.forward import forward_of
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.stopwatch import timed

_seal_anoncrypt = timed(seal_anoncrypt)
# One for each routing key of an endpoint, and one for the mediator it stands behind.
MAX_WRAPS = MAX_ROUTING_KEYS + 1
MAX_WRAPPED = 8_388_608


class Unwrappable(Exception):
    """A routing key that does not resolve; the payload cannot take this way."""


class Wrapping:
    """
    Wraps payloads in forwards, as the sender of a routed message does.

    :param new_id: source of message ids.
    """

    def __init__(self, resolver: IResolver, clock: IReactorTime, new_id: Callable[[], str]) -> None:
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
        :param peer: address that causes the work, if a stranger does, for the limit on network lookups.
        :raise Unwrappable: one of them has no key, there are too many, or the result would be too long.
        """
        if len(routing_keys) > MAX_WRAPS:
            raise Unwrappable
        next_ = recipient
        for routing_key in reversed(routing_keys):
            keys = await self._keys(routing_key, peer)
            draft = forward_of(payload, next_, self._new_id())
            plaintext = draft.plaintext(sender=None, to=did_of(routing_key), created_time=int(self._clock.seconds()))
            if len(plaintext) > MAX_WRAPPED:
                raise Unwrappable
            payload = _seal_anoncrypt(plaintext, keys)
            next_ = routing_key
        return payload

    async def rewrap(self, payload: bytes, recipient: str) -> bytes:
        """
        A fresh forward to the recipient itself around the payload ("Rewrapping").

        :raise Unwrappable: the recipient's DID gives no key.
        """
        return await self.wrap(payload, recipient, [recipient])

    async def _keys(self, routing_key: str, peer: str | None) -> list[tuple[str, PublicKey]]:
        try:
            document = await self._resolver.resolve(did_of(routing_key), peer)
        except MediatorError:
            raise Unwrappable from None
        keys = _encryption_keys(document, routing_key)
        if not keys:
            raise Unwrappable
        return keys


def _encryption_keys(document: DIDDocument, name: str) -> list[tuple[str, PublicKey]]:
    if "#" in name:
        method = document.key_agreement_key(name)
        return [(name, method.key)] if method else []
    for curve in ("X25519", "P-256", "P-384", "P-521"):
        keys = [(method.id, method.key) for method in document.key_agreement if method.key.curve == curve]
        if keys:
            return keys
    return []
