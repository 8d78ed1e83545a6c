"""What was received before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from bson import Timestamp

from mediatord.errors import ReplayCacheFull, StoreUnavailable
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_aggregate,
    build_deletes,
    build_find,
    build_inserts,
)
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.executor import OperationExecutor, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.schema import NONCES

_DELETE_BATCH = 5_000
# Of the capacity, how much may come until it is looked whether that is too much.
_UNCHECKED_FRACTION = 64
# Below this part of it, a count that may be wrong after a crash of the server will do.
_ESTIMATE_FRACTION = 4
_TOKEN_BYTES = 12
# Claims that are remembered as ours, and releases that may be owed.
_MAX_OWN_CLAIMS = 50_000
_MAX_PENDING_RELEASES = 20_000
# Seconds that claims wait at most until it is seen how many there are, and until it is looked again where those are
# too many.
_COUNT_TIMEOUT, _RECOUNT_INTERVAL = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class NonceClaimRequest:
    """
    A nonce to be claimed until a time, at a time.

    :param share: of the capacity, how much may be taken already.
    """

    key: bytes
    until: float
    now: float
    share: float = 1.0


# Whether it was new; or it would be, and there is no room.
NonceClaimResult = bool | ReplayCacheFull


class NonceClaimBatchOperation:
    """Does claims; see :class:`~.gathering.Together`. Each is answered with what became of it."""

    def __init__(self, nonces: NonceCapacity, release_queue: NonceReleaseQueue) -> None:
        self._nonces = nonces
        self._release_queue = release_queue

    async def __call__(
        self, executor: OperationExecutor, works: Sequence[NonceClaimRequest], deadline: float, tries: int | None
    ) -> Sequence[NonceClaimResult]:
        await self._nonces.refresh_count(executor, deadline, min(work.share for work in works))
        keys = list({work.key for work in works})
        token = os.urandom(_TOKEN_BYTES)
        before: set[bytes] = set()

        async def claim(transaction: Transaction) -> list[NonceClaimResult]:
            nonlocal before
            found = await transaction.query(build_nonce_query(*keys))
            before = {one["_id"] for one in found}
            held = {one["_id"]: 0.0 if self._release_queue.is_release_pending(one) else one["until"] for one in found}
            return _decide_claims(transaction, works, token, held, self._nonces.has_room)

        async def undo(transaction: Transaction) -> None:
            transaction.write_at_end(build_deletes(NONCES, {"_id": {"$in": keys}, "token": token}))

        answers = await retry_on_duplicate_key(lambda: executor.transact(claim, deadline, undo, tries=tries))
        new = [work.key for work, one in zip(works, answers, strict=True) if one is True]
        self._release_queue.claimed(new, token)
        self._nonces.claimed(len(set(new) - before))
        return answers


class NonceReleaseQueue:
    """
    Releases of claims, of those alone that were meant: a late one does not touch what was claimed since. One that
    fails is done once the server answers, and who claims such a nonce here meanwhile gets it.
    """

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._tokens: dict[bytes, bytes] = {}
        self._pending_releases: dict[tuple[bytes, bytes], None] = {}

    def claimed(self, keys: Iterable[bytes], token: bytes) -> None:
        """These were new."""
        for key in keys:
            self._tokens.pop(key, None)
            self._tokens[key] = token
        while len(self._tokens) > _MAX_OWN_CLAIMS:
            del self._tokens[next(iter(self._tokens))]

    def is_release_pending(self, document: Document) -> bool:
        """Whether a claim was to be released."""
        return (document["_id"], document.get("token")) in self._pending_releases

    async def release(self, key: bytes) -> int:
        """
        :return: how many there were of it.
        :raise StoreUnavailable: not yet, then.
        """
        token = self._tokens.pop(key, None)
        if token is None:  # a command's, or not claimed at all
            (reply,) = await self._client.write("release", build_deletes(NONCES, {"_id": key}))
            return int(reply["n"])
        try:
            (reply,) = await self._client.write("release", build_nonce_release(key, token))
        except StoreUnavailable:
            self._schedule_release(key, token)
            raise
        return int(reply["n"])

    def _schedule_release(self, key: bytes, token: bytes) -> None:
        if len(self._pending_releases) < _MAX_PENDING_RELEASES:
            if not self._pending_releases:
                self._client.schedule_undo(self._release_pending)
            self._pending_releases[key, token] = None

    async def _release_pending(self, transaction: Transaction) -> UndoCallback:
        some = list(islice(self._pending_releases, _DELETE_BATCH))
        transaction.write_at_end(build_deletes(NONCES, *[{"_id": key, "token": token} for key, token in some]))

        def released() -> None:
            for one in some:
                self._pending_releases.pop(one, None)
            if self._pending_releases:
                self._client.schedule_undo(self._release_pending)

        return released


class NonceCapacity:
    """
    All nonces there are, with those of commands.

    How many those are is known by counting them from time to time, and by what this process does in between: what
    others do is noticed a little late.

    :param capacity: how many are kept.
    """

    def __init__(self, client: ReplicaSetClient, capacity: int) -> None:
        self._client = client
        self._capacity = capacity
        self._count_known = 0
        self._changes_since_count: float = inf
        self._counted_at = -inf

    def has_room(self, share: float = 1.0, more: int = 0) -> bool:
        """
        Whether one more may be claimed, as far as that is known.

        :param more: that will have been claimed by then.
        """
        return self._count_known + more < int(share * self._capacity)

    def released(self, number: int) -> None:
        """So many are not there any more; to count them each time would cost more than it has cost to claim one."""
        self._count_known = max(0, self._count_known - number)

    def claimed(self, number: int) -> None:
        """So many more are there."""
        self._count_known += number
        self._changes_since_count += number

    async def refresh_count(self, executor: OperationExecutor, deadline: float, share: float = 1.0) -> None:
        """
        Count them, if many have come since that was done, or if there is no room any more. If they cannot be counted,
        they will be the next time.

        :param share: the least that somebody asks who is to claim one.
        """
        now = self._client.clock.seconds()
        is_over = not self.has_room(share) and now - self._counted_at >= _RECOUNT_INTERVAL
        if self._changes_since_count <= self._capacity // _UNCHECKED_FRACTION and not is_over:
            return
        self._changes_since_count, self._counted_at = 0, now
        try:
            self._count_known = await self._count(executor, min(deadline, now + _COUNT_TIMEOUT))
        except (MongoCommandError, ServerUnreachable) as error:
            self._client.failed("count", error)

    async def prune(self, now: float) -> int:
        """Forget those that have been over for long enough; how many those were."""
        pruned = 0
        while True:
            over = {"until": {"$lte": now - NONCE_GRACE_SECONDS}}
            found = await self._client.find("prune", NONCES, over, limit=_DELETE_BATCH, projection={"_id": 1})
            if not found:
                return pruned
            gone = build_deletes(NONCES, {"_id": {"$in": [one["_id"] for one in found]}, **over})
            (reply,) = await self._client.write("prune", gone)
            pruned += reply["n"]
            self._count_known = max(0, self._count_known - reply["n"])

    async def _count(self, executor: OperationExecutor, deadline: float) -> int:
        # What is said first costs nothing, and may be wrong after a crash of the server.
        reply = await executor.command(MongoCommand({"count": NONCES}), deadline)
        if reply["n"] < self._capacity // _ESTIMATE_FRACTION:
            return int(reply["n"])
        counted = await executor.query(
            build_aggregate(NONCES, [{"$group": {"_id": None, "n": {"$sum": 1}}}], hint="nonce_order"), deadline
        )
        return int(counted[0]["n"]) if counted else 0


def build_nonce_query(*keys: bytes) -> MongoCommand:
    """For those that are claimed already: documents with `_id` and `until`."""
    return build_find(NONCES, {"_id": {"$in": list(keys)}}, hint="_id_")


def build_nonce_claim(
    held: Sequence[Document], key: bytes, until: float, now: float, token: bytes
) -> list[MongoCommand] | None:
    """
    What claims a nonce; None when somebody has it.

    :param held: what :func:`build_nonce_query` found.
    :param token: whose claim it is, for :func:`build_nonce_release`.
    """
    if held and held[0]["until"] > now:
        return None
    # Not updated but written anew, so that it has its place by when it came.
    fresh = build_inserts(NONCES, [_build_nonce(key, until, token)])
    return [*build_deletes(NONCES, {"_id": key}), *fresh] if held else fresh


def build_nonce_release(key: bytes, token: bytes) -> list[MongoCommand]:
    """Undo a claim, if it was this one that was made."""
    return build_deletes(NONCES, {"_id": key, "token": token})


def _build_nonce(key: bytes, until: float, token: bytes) -> Document:
    return {"_id": key, "seq": Timestamp(0, 0), "until": float(until), "token": token}


def _decide_claims(
    transaction: Transaction,
    works: Sequence[NonceClaimRequest],
    token: bytes,
    held: dict[bytes, float],
    has_room: Callable[[float, int], bool],
) -> list[NonceClaimResult]:
    """
    What becomes of each, as if they had come one by one.

    :param held: until when, by key, those that are there.
    :param has_room: for one more of a share, with so many that come with it.
    """
    there = set(held)
    answers: list[NonceClaimResult] = []
    fresh: dict[bytes, Document] = {}
    for work in works:
        answer: NonceClaimResult = held.get(work.key, work.now) <= work.now
        if answer and work.key not in held and not has_room(work.share, len(fresh.keys() - there)):
            answer = ReplayCacheFull()
        if answer is True:
            held[work.key] = work.until
            fresh[work.key] = _build_nonce(work.key, work.until, token)
        answers.append(answer)
    gone = list(there & fresh.keys())
    if gone:
        transaction.write_at_end(build_deletes(NONCES, {"_id": {"$in": gone}}))
    if fresh:
        transaction.write_at_end(build_inserts(NONCES, fresh.values()))
    return answers
