"""What was received before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from bson import Timestamp

from mediatord.errors import ReplayMemoryFull, StoreUnavailable
from mediatord.interfaces import KEPT_BEYOND
from mediatord.store.mongo.collections import NONCES
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.duplicates import retried
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Refused, Unreachable
from mediatord.store.mongo.requests import Document, Request, deleting, inserting
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Settled

_AT_A_TIME = 5_000
# Of the capacity, how much may come until it is looked whether that is too much.
_SLACK = 64
# Below this part of it, a count that may be wrong after a crash of the server will do.
_LITTLE = 4
_TOKEN_BYTES = 12
# Claims that are remembered as ours, and releases that may be owed.
_OURS = 50_000
_OWED = 20_000
# Seconds that claims wait at most until it is seen how many there are, and until it is looked again where those are
# too many.
_COUNTING, _AGAIN = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class Claim:
    """
    A nonce to be claimed until a time, at a time.

    :param share: of the capacity, how much may be taken already.
    """

    key: bytes
    until: float
    now: float
    share: float = 1.0


# Whether it was new; or it would be, and there is no room.
Claimed = bool | ReplayMemoryFull


class Claiming:
    """Does claims; see :class:`~.gathering.Together`. Each is answered with what became of it."""

    def __init__(self, nonces: Nonces, releases: Releases) -> None:
        self._nonces = nonces
        self._releases = releases

    async def __call__(
        self, operations: Operations, works: Sequence[Claim], deadline: float, tries: int | None
    ) -> Sequence[Claimed]:
        await self._nonces.look(operations, deadline, min(work.share for work in works))
        keys = list({work.key for work in works})
        token = os.urandom(_TOKEN_BYTES)
        before: set[bytes] = set()

        async def claim(transaction: Transaction) -> list[Claimed]:
            nonlocal before
            found = await transaction.query(asking_for_nonce(*keys))
            before = {one["_id"] for one in found}
            held = {one["_id"]: 0.0 if self._releases.owes(one) else one["until"] for one in found}
            return _claim_all(transaction, works, token, held, self._nonces.has_room)

        async def undo(transaction: Transaction) -> None:
            transaction.later(deleting(NONCES, {"_id": {"$in": keys}, "token": token}))

        answers = await retried(lambda: operations.transact(claim, deadline, undo, tries=tries))
        new = [work.key for work, one in zip(works, answers, strict=True) if one is True]
        self._releases.claimed(new, token)
        self._nonces.claimed(len(set(new) - before))
        return answers


class Releases:
    """
    Releases of claims, of those alone that were meant: a late one does not touch what was claimed since. One that
    fails is done once the server answers, and who claims such a nonce here meanwhile gets it.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tokens: dict[bytes, bytes] = {}
        self._owed: dict[tuple[bytes, bytes], None] = {}

    def claimed(self, keys: Iterable[bytes], token: bytes) -> None:
        """These were new."""
        for key in keys:
            self._tokens.pop(key, None)
            self._tokens[key] = token
        while len(self._tokens) > _OURS:
            del self._tokens[next(iter(self._tokens))]

    def owes(self, document: Document) -> bool:
        """Whether a claim was to be released."""
        return (document["_id"], document.get("token")) in self._owed

    async def release(self, key: bytes) -> int:
        """
        :return: how many there were of it.
        :raise StoreUnavailable: not yet, then.
        """
        token = self._tokens.pop(key, None)
        if token is None:  # a command's, or not claimed at all
            (reply,) = await self._server.write("release", deleting(NONCES, {"_id": key}))
            return int(reply["n"])
        try:
            (reply,) = await self._server.write("release", releasing_own(key, token))
        except StoreUnavailable:
            self._owe(key, token)
            raise
        return int(reply["n"])

    def _owe(self, key: bytes, token: bytes) -> None:
        if len(self._owed) < _OWED:
            if not self._owed:
                self._server.owe(self._release_owed)
            self._owed[key, token] = None

    async def _release_owed(self, transaction: Transaction) -> Settled:
        some = list(islice(self._owed, _AT_A_TIME))
        transaction.later(deleting(NONCES, *[{"_id": key, "token": token} for key, token in some]))

        def released() -> None:
            for one in some:
                self._owed.pop(one, None)
            if self._owed:
                self._server.owe(self._release_owed)

        return released


class Nonces:
    """
    All nonces there are, with those of commands.

    How many those are is known by counting them from time to time, and by what this process does in between: what
    others do is noticed a little late.

    :param capacity: how many are kept.
    """

    def __init__(self, server: Server, capacity: int) -> None:
        self._server = server
        self._capacity = capacity
        self._present = 0
        self._unchecked: float = inf
        self._looked = -inf

    def has_room(self, share: float = 1.0, more: int = 0) -> bool:
        """
        Whether one more may be claimed, as far as that is known.

        :param more: that will have been claimed by then.
        """
        return self._present + more < int(share * self._capacity)

    def released(self, number: int) -> None:
        """So many are not there any more; to count them each time would cost more than it has cost to claim one."""
        self._present = max(0, self._present - number)

    def claimed(self, number: int) -> None:
        """So many more are there."""
        self._present += number
        self._unchecked += number

    async def look(self, operations: Operations, deadline: float, share: float = 1.0) -> None:
        """
        Count them, if many have come since that was done, or if there is no room any more. If they cannot be counted,
        they will be the next time.

        :param share: the least that somebody asks who is to claim one.
        """
        now = self._server.clock.seconds()
        is_over = not self.has_room(share) and now - self._looked >= _AGAIN
        if self._unchecked <= self._capacity // _SLACK and not is_over:
            return
        self._unchecked, self._looked = 0, now
        try:
            self._present = await self._count(operations, min(deadline, now + _COUNTING))
        except (Refused, Unreachable) as error:
            self._server.failed("count", error)

    async def prune(self, now: float) -> int:
        """Forget those that have been over for long enough; how many those were."""
        pruned = 0
        while True:
            over = {"until": {"$lte": now - KEPT_BEYOND}}
            found = await self._server.find("prune", NONCES, over, limit=_AT_A_TIME, projection={"_id": 1})
            if not found:
                return pruned
            gone = deleting(NONCES, {"_id": {"$in": [one["_id"] for one in found]}, **over})
            (reply,) = await self._server.write("prune", gone)
            pruned += reply["n"]
            self._present = max(0, self._present - reply["n"])

    async def _count(self, operations: Operations, deadline: float) -> int:
        # What is said first costs nothing, and may be wrong after a crash of the server.
        reply = await operations.command(Request({"count": NONCES}), deadline)
        if reply["n"] < self._capacity // _LITTLE:
            return int(reply["n"])
        counted = await operations.query(
            aggregating(NONCES, [{"$group": {"_id": None, "n": {"$sum": 1}}}], hint="nonce_order"), deadline
        )
        return int(counted[0]["n"]) if counted else 0


def asking_for_nonce(*keys: bytes) -> Request:
    """For those that are claimed already: documents with `_id` and `until`."""
    return finding(NONCES, {"_id": {"$in": list(keys)}}, hint="_id_")


def claiming(held: Sequence[Document], key: bytes, until: float, now: float, token: bytes) -> list[Request] | None:
    """
    What claims a nonce; None when somebody has it.

    :param held: what :func:`asking_for_nonce` found.
    :param token: whose claim it is, for :func:`releasing_own`.
    """
    if held and held[0]["until"] > now:
        return None
    # Not updated but written anew, so that it has its place by when it came.
    fresh = inserting(NONCES, [_document(key, until, token)])
    return [*deleting(NONCES, {"_id": key}), *fresh] if held else fresh


def releasing_own(key: bytes, token: bytes) -> list[Request]:
    """Undo a claim, if it was this one that was made."""
    return deleting(NONCES, {"_id": key, "token": token})


def _document(key: bytes, until: float, token: bytes) -> Document:
    return {"_id": key, "seq": Timestamp(0, 0), "until": float(until), "token": token}


def _claim_all(
    transaction: Transaction,
    works: Sequence[Claim],
    token: bytes,
    held: dict[bytes, float],
    has_room: Callable[[float, int], bool],
) -> list[Claimed]:
    """
    What becomes of each, as if they had come one by one.

    :param held: until when, by key, those that are there.
    :param has_room: for one more of a share, with so many that come with it.
    """
    there = set(held)
    answers: list[Claimed] = []
    fresh: dict[bytes, Document] = {}
    for work in works:
        answer: Claimed = held.get(work.key, work.now) <= work.now
        if answer and work.key not in held and not has_room(work.share, len(fresh.keys() - there)):
            answer = ReplayMemoryFull()
        if answer is True:
            held[work.key] = work.until
            fresh[work.key] = _document(work.key, work.until, token)
        answers.append(answer)
    gone = list(there & fresh.keys())
    if gone:
        transaction.later(deleting(NONCES, {"_id": {"$in": gone}}))
    if fresh:
        transaction.later(inserting(NONCES, fresh.values()))
    return answers
