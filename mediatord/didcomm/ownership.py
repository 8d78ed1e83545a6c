"""Opens what proves that recipient DIDs belong to the holder of an account."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twisted.internet.interfaces import IReactorTime

from mediatord.admission import Admission
from mediatord.didcomm.exchange import Origin, Received
from mediatord.didcomm.unpacking import Unpacking
from mediatord.errors import MediatorError, RateLimited, StoreUnavailable
from mediatord.interfaces import Account, IStore
from mediatord.protocol.canonical_did import did_digest
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm.forward import read_payloads
from mediatord.protocol.didcomm.ownership import FRESH, proven_by

# Seconds by which a claim outlives the last moment at which its proof is taken.
_MARGIN = 1.0


class Ownership:
    """
    Looks at the attachments of updates.

    Each costs its account as much as a request, whatever comes of it, and counts once.

    :param owns: whether a DID is one of ours.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        admission: Admission,
        unpacking: Unpacking,
        owns: Callable[[str], bool],
    ) -> None:
        self._clock = clock
        self._store = store
        self._admission = admission
        self._unpacking = unpacking
        self._owns = owns

    async def proven(self, received: Received, account: Account, origin: Origin) -> dict[bytes, bytes]:
        """
        The recipient DIDs of which the update carries a proof that holds, by their digests (:func:`did_digest`); with
        each what its proof is known by.

        :raise BadAttachment: an attachment is no envelope; likewise LinkedAttachment.
        :raise RateLimited: the account is over its limit.
        """
        found: dict[bytes, bytes] = {}
        if not received.message.attachments:
            return found
        try:
            for raw, _ in read_payloads(received.message):
                found.update(await self._proven(raw, account, origin))
        except (StoreUnavailable, RateLimited):
            await self.forget(found)
            raise
        return found

    async def forget(self, proven: Mapping[bytes, bytes]) -> None:
        """Let proofs come again, as nothing was done about them."""
        for digest in proven.values():
            await self._store.release(digest)

    async def _proven(self, raw: bytes, account: Account, origin: Origin) -> dict[bytes, bytes]:
        await self._admission.account(account.did, origin.peer)
        try:
            proof = await self._unpacking.open(jwe.parse(raw), origin.peer)
        except (StoreUnavailable, RateLimited):
            raise
        except MediatorError:
            return {}
        now = self._clock.seconds()
        if proof.sender is None:
            return {}
        did = proven_by(proof.message, proof.sender, account.did, now, self._owns)
        # Who has gone over to another DID may have lost the keys of this one to somebody else.
        if did is None or await self._store.is_retired(proof.sender) or not await self._is_new(proof, now):
            return {}
        return {did_digest(did): proof.digest}

    async def _is_new(self, proof: Received, now: float) -> bool:
        """Whoever has moved a DID elsewhere meanwhile does not have it moved back by what was recorded."""
        made = proof.message.created_time or now
        return bool(await self._store.claim(proof.digest, max(now, made) + FRESH + _MARGIN))
