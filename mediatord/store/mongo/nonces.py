"""Nonces that protect against replay: claim, release and capacity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from bson import Timestamp

from mediatord.errors import ReplayCacheFull, StoreUnavailable
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.operation import Operation, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.schema import NONCES

_DELETE_BATCH = 5_000
# The nonces are counted again after claims of this fraction of the capacity.
_UNCHECKED_FRACTION = 64
# Below this fraction, a count that may be wrong after a crash of the server suffices.
_ESTIMATE_FRACTION = 4
_TOKEN_BYTES = 12
_MAX_OWN_CLAIMS = 50_000
_MAX_PENDING_RELEASES = 20_000
# Seconds for a count, and between counts while there is no room.
_COUNT_TIMEOUT, _RECOUNT_INTERVAL = 1.0, 10.0


class NonceClaimRequest(NamedTuple):
    """
    A nonce to be claimed.

    :param share: of the capacity, how much may be taken already.
    """

    key: bytes
    until: float
    now: float
    share: float = 1.0


# Whether the nonce was new, or the error that there is no room for it.
NonceClaimResult = bool | ReplayCacheFull


class NonceClaims:
    """
    Claims and releases nonces.

    Claims of this process are identified by their token, so that a late release does not delete a newer claim. A
    release that fails is repeated once the server is reachable; meanwhile this process treats the nonce as free.
    """

    def __init__(self, client: ReplicaSetClient, capacity: NonceCapacity) -> None:
        self._client = client
        self._capacity = capacity
        self._tokens: dict[bytes, bytes] = {}
        self._pending_releases: dict[tuple[bytes, bytes], None] = {}

    async def claim(
        self, run: Operation, works: Sequence[NonceClaimRequest], tries: int | None
    ) -> Sequence[NonceClaimResult]:
        """Claim nonces; a BatchOperation on :class:`NonceClaimRequest`, answered with a NonceClaimResult each."""
        await self._capacity.refresh_count(run, min(work.share for work in works))
        keys = list({work.key for work in works})
        token = os.urandom(_TOKEN_BYTES)
        before: set[bytes] = set()

        async def claim(transaction: Transaction) -> list[NonceClaimResult]:
            nonlocal before
            found = await transaction.query(build_nonce_query(*keys))
            before = {one["_id"] for one in found}
            pending = self._pending_releases
            held = {one["_id"]: 0.0 if (one["_id"], one.get("token")) in pending else one["until"] for one in found}
            return self._decide_claims(transaction, works, token, held)

        async def undo(transaction: Transaction) -> None:
            transaction.write_at_end(NONCES.delete({"_id": {"$in": keys}, "token": token}))

        answers = await retry_on_duplicate_key(lambda: run.transact(claim, undo, tries=tries))
        new = {work.key for work, one in zip(works, answers, strict=True) if one is True}
        for key in new:
            self._tokens.pop(key, None)
            self._tokens[key] = token
        while len(self._tokens) > _MAX_OWN_CLAIMS:
            del self._tokens[next(iter(self._tokens))]
        self._capacity.claimed(len(new - before))
        return answers

    async def release(self, key: bytes) -> None:
        """:raise StoreUnavailable: the claim will be released later."""
        token = self._tokens.pop(key, None)
        # Without a token it is a command's claim, or none.
        release = NONCES.delete({"_id": key}) if token is None else build_nonce_release(key, token)
        try:
            (reply,) = await self._client.write("release", release)
        except StoreUnavailable:
            if token is not None and len(self._pending_releases) < _MAX_PENDING_RELEASES:
                if not self._pending_releases:
                    self._client.transactions.schedule_undo(self._release_pending)
                self._pending_releases[key, token] = None
            raise
        self._capacity.released(reply["n"])

    async def _release_pending(self, transaction: Transaction) -> UndoCallback:
        some = list(islice(self._pending_releases, _DELETE_BATCH))
        transaction.write_at_end(NONCES.delete(*[{"_id": key, "token": token} for key, token in some]))

        def on_released() -> None:
            for one in some:
                self._pending_releases.pop(one, None)
            if self._pending_releases:
                self._client.transactions.schedule_undo(self._release_pending)

        return on_released

    def _decide_claims(
        self,
        transaction: Transaction,
        works: Sequence[NonceClaimRequest],
        token: bytes,
        held: dict[bytes, float],
    ) -> list[NonceClaimResult]:
        """
        Decide the claims as if they had come one by one, and write them.

        :param held: expiry of the existing nonces by key.
        """
        existing = set(held)
        answers: list[NonceClaimResult] = []
        new: dict[bytes, Document] = {}
        for work in works:
            answer: NonceClaimResult = ReplayCacheFull()
            if work.key in held or self._capacity.has_room(work.share, len(new.keys() - existing)):
                answer = held.get(work.key, work.now) <= work.now
            if answer is True:
                held[work.key] = work.until
                new[work.key] = _build_nonce(work.key, work.until, token)
            answers.append(answer)
        replaced = list(existing & new.keys())
        transaction.write_at_end(
            NONCES.delete({"_id": {"$in": replaced}}) if replaced else (), NONCES.insert(new.values())
        )
        return answers


class NonceCapacity:
    """
    Bounds the number of nonces of the whole store, those of commands included.

    The number is known by counting them from time to time and by the changes of this process in between, so changes
    of other nodes are noticed a little late.
    """

    def __init__(self, client: ReplicaSetClient, capacity: int) -> None:
        self._client = client
        self._capacity = capacity
        self._count_known = 0
        self._changes_since_count: float = inf
        self._counted_at = -inf

    def has_room(self, share: float = 1.0, more: int = 0) -> bool:
        """
        Whether one more nonce may be claimed, as far as is known.

        :param more: claims that come before it.
        """
        return self._count_known + more < int(share * self._capacity)

    def released(self, number: int) -> None:
        """Count nonces off that were deleted; to count all again would cost more than a claim."""
        self._count_known = max(0, self._count_known - number)

    def claimed(self, number: int) -> None:
        self._count_known += number
        self._changes_since_count += number

    async def refresh_count(self, run: Operation, share: float = 1.0) -> None:
        """
        Count the nonces if there were many changes since the last count, or if there is no room.

        :param share: the least of those to be claimed.
        """
        now = self._client.clock.seconds()
        is_full = not self.has_room(share) and now - self._counted_at >= _RECOUNT_INTERVAL
        if self._changes_since_count <= self._capacity // _UNCHECKED_FRACTION and not is_full:
            return
        self._changes_since_count, self._counted_at = 0, now
        try:
            self._count_known = await self._count(run.until(min(run.deadline, now + _COUNT_TIMEOUT)))
        except (MongoCommandError, ServerUnreachable) as error:
            self._client.report_failure("count", error)

    async def prune(self, now: float) -> int:
        """Delete nonces that expired long enough ago; return their number."""
        expired = {"until": {"$lte": now - NONCE_GRACE_SECONDS}}
        pruned = await self._client.delete_in_batches("prune", NONCES, expired, batch=_DELETE_BATCH)
        self.released(pruned)
        return pruned

    async def _count(self, run: Operation) -> int:
        # The count in the metadata costs nothing, and may be wrong after a crash of the server.
        number = int((await run.command(NONCES.count()))["n"])
        if number >= self._capacity // _ESTIMATE_FRACTION:
            total = {"$group": {"_id": None, "n": {"$sum": 1}}}
            number = sum([one["n"] for one in await run.query(NONCES.aggregate([total], hint="nonce_order"))])
        return number


def build_nonce_query(*keys: bytes) -> MongoCommand:
    return NONCES.find({"_id": {"$in": list(keys)}}, hint="_id_")


def build_nonce_claim(
    held: Sequence[Document], key: bytes, until: float, now: float, token: bytes
) -> list[MongoCommand] | None:
    """
    Build the writes that claim a nonce; None if it is claimed already.

    :param held: result of :func:`build_nonce_query`.
    :param token: identifies the claim, for :func:`build_nonce_release`.
    """
    if held and held[0]["until"] > now:
        return None
    # Replaced instead of updated, so that its place in the index is that of its arrival.
    inserts = NONCES.insert([_build_nonce(key, until, token)])
    return [*NONCES.delete({"_id": key}), *inserts] if held else inserts


def build_nonce_release(key: bytes, token: bytes) -> list[MongoCommand]:
    """Build the write that deletes this claim, but not a newer one."""
    return NONCES.delete({"_id": key, "token": token})


def _build_nonce(key: bytes, until: float, token: bytes) -> Document:
    return {"_id": key, "seq": Timestamp(0, 0), "until": float(until), "token": token}
