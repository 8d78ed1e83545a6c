"""What was received before."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from bson import Timestamp

from mediatord.errors import StoreUnavailable
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
_TOKEN_BYTES = 12
# Claims that are remembered as ours, and releases that may be owed.
_OURS = 50_000
_OWED = 20_000
# Seconds that claims wait at most until it is seen whether there are too many.
_TRIMMING = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A nonce to be claimed until a time, at a time."""

    key: bytes
    until: float
    now: float


class Claiming:
    """Does claims; see :class:`~.gathering.Together`. Each is answered with whether it was new."""

    def __init__(self, nonces: Nonces, releases: Releases) -> None:
        self._nonces = nonces
        self._releases = releases

    async def __call__(
        self, operations: Operations, works: Sequence[Claim], deadline: float, tries: int | None
    ) -> Sequence[bool]:
        keys = list({work.key for work in works})
        token = os.urandom(_TOKEN_BYTES)

        async def claim(transaction: Transaction) -> list[bool]:
            found = await transaction.query(asking_for_nonce(*keys))
            held = {one["_id"]: 0.0 if self._releases.owes(one) else one["until"] for one in found}
            return _claim_all(transaction, works, token, held)

        async def undo(transaction: Transaction) -> None:
            transaction.later(deleting(NONCES, {"_id": {"$in": keys}, "token": token}))

        answers = await retried(lambda: operations.transact(claim, deadline, undo, tries=tries))
        self._releases.claimed([work.key for work, new in zip(works, answers, strict=True) if new], token)
        await self._nonces.claimed(operations, sum(answers), deadline)
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

    async def release(self, key: bytes) -> None:
        """:raise StoreUnavailable: not yet, then."""
        token = self._tokens.pop(key, None)
        if token is None:  # a command's, or not claimed at all
            await self._server.write("release", deleting(NONCES, {"_id": key}))
            return
        try:
            await self._server.write("release", releasing_own(key, token))
        except StoreUnavailable:
            self._owe(key, token)
            raise

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

    :param capacity: how many are kept; the oldest go first.
    """

    def __init__(self, server: Server, capacity: int) -> None:
        self._server = server
        self._capacity = capacity
        self._unchecked = 0

    async def claimed(self, operations: Operations, number: int, deadline: float) -> None:
        """
        So many more are there, whatever comes of it: once in a while, see whether that is too many. If it cannot be
        seen, it will be the next time.
        """
        self._unchecked += number
        if self._unchecked <= self._capacity // _SLACK:
            return
        self._unchecked = 0
        try:
            await self._check(operations, min(deadline, self._server.clock.seconds() + _TRIMMING))
        except (Refused, Unreachable) as error:
            self._server.failed("trim", error)

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

    async def _check(self, operations: Operations, deadline: float) -> None:
        # What is said first costs nothing, and may be wrong after a crash of the server.
        reply = await operations.command(Request({"count": NONCES}), deadline)
        if reply["n"] > self._capacity:
            await self._trim(operations, deadline)

    async def _trim(self, operations: Operations, deadline: float) -> None:
        counted = await operations.query(
            aggregating(NONCES, [{"$group": {"_id": None, "n": {"$sum": 1}}}], hint="nonce_order"), deadline
        )
        excess = counted[0]["n"] - self._capacity if counted else 0
        if excess > 0:
            oldest = finding(NONCES, {}, sort={"seq": 1}, limit=min(excess, _AT_A_TIME), projection={"seq": 1})
            found = await operations.query(oldest, deadline)
            if not found:
                return
            gone = {"_id": {"$in": [one["_id"] for one in found]}, "seq": {"$lte": found[-1]["seq"]}}
            await operations.write(deleting(NONCES, gone), deadline)


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
    transaction: Transaction, works: Sequence[Claim], token: bytes, held: dict[bytes, float]
) -> list[bool]:
    """
    Whether each is new, as if they had come one by one.

    :param held: until when, by key, those that are there.
    """
    there = set(held)
    answers: list[bool] = []
    fresh: dict[bytes, Document] = {}
    for work in works:
        new = held.get(work.key, work.now) <= work.now
        if new:
            held[work.key] = work.until
            fresh[work.key] = _document(work.key, work.until, token)
        answers.append(new)
    gone = list(there & fresh.keys())
    if gone:
        transaction.later(deleting(NONCES, {"_id": {"$in": gone}}))
    transaction.later(inserting(NONCES, fresh.values()))
    return answers
