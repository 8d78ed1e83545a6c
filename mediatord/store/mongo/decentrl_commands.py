"""
Decentrl commands with their guards, each in one transaction.

All that a command needs is read in one round trip and all that it writes goes in another, so a rejected command has
written nothing but its nonce.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import (
    DuplicateNonce,
    MediatorError,
    RecipientNotRegistered,
    ReplayCacheFull,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import CommandGuard
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.mongo.decentrl_parties import (
    PartyRecord,
    build_party_changes,
    build_party_documents_query,
    build_party_query,
    find_party,
    make_party_key,
)
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.errors import CommitWithError
from mediatord.store.mongo.driver.operation import KeyedMutex, Operation
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.nonces import NonceCapacity, build_nonce_claim, build_nonce_query, build_nonce_release
from mediatord.store.mongo.schema import NONCES, PENDING_EVENTS, PartyCollection

T = TypeVar("T")

_TOKEN_BYTES = 12
# The latest commands that were reported as failed and may have to be undone.
_MAX_UNCERTAIN_TOKENS = 1_000


class CommandContext(NamedTuple):
    """
    What a command has read.

    :param party: the one that it may change.
    :param found: results of its queries.
    :param transaction: for further queries.
    """

    party: PartyRecord
    found: Sequence[list[Document]]
    transaction: Transaction


# What a command writes, all of it, and its answer; and what decides that, unless it raises a MediatorError.
Decision = tuple[Sequence[MongoCommand], T]
CommandWork = Callable[[CommandContext], Awaitable[Decision[T]]]


@dataclass(eq=False, slots=True)
class MongoGuardedCommand(Generic[T]):
    """
    A command with its guard, as the work of a transaction.

    :param did: of the party that it may change, if any.
    :param work: the command itself.
    :param queries: whose results it needs.
    :param creates: ids of the documents that it adds to the party.
    :param now: the store's time.
    :param token: identifies the claim of the nonce.
    :param on_late_answer: called with the answer if the command turns out to be done after it was reported as failed.
    :ivar has_room: whether one more nonce may be claimed.
    :ivar replaces: whether its nonce replaces an expired one.
    :ivar uncertain_tokens: of commands of this process that were reported as failed and are yet to be undone.
    """

    guard: CommandGuard
    did: str | None
    work: CommandWork[T]
    queries: Sequence[MongoCommand]
    creates: tuple[PartyCollection, Sequence[str]] | None
    now: float
    token: bytes
    on_late_answer: Callable[[T], None] | None = None
    has_room: bool = True
    replaces: bool = False
    uncertain_tokens: Collection[bytes] = ()
    _decision: Decision[T] | None = None
    _done: bool = False

    async def __call__(self, transaction: Transaction) -> T:
        guard, self._decision = self.guard, None
        dids = [did for did in (guard.sender, guard.recipient, self.did) if did is not None]
        held, parties, *found = await transaction.query_many(
            build_nonce_query(guard.nonce), build_party_query(*dids), *self.queries
        )
        claim = build_nonce_claim(held, guard.nonce, guard.until, self.now, self.token)
        if claim is None:
            if held[0]["token"] in self.uncertain_tokens:
                # Rejected as a duplicate it would never be repeated, although it will be undone soon.
                raise StoreUnavailable()
            raise DuplicateNonce()
        self.replaces = bool(held)
        if not held and not self.has_room:
            raise ReplayCacheFull()
        try:
            for did, refusal in ((guard.sender, UnauthorizedCommand), (guard.recipient, RecipientNotRegistered)):
                if did is not None and find_party(parties, did).registered_until <= self.now:
                    raise refusal()
            context = CommandContext(find_party(parties, self.did or ""), found, transaction)
            requests, answer = self._decision = await self.work(context)
        except StoreUnavailable:
            raise
        except MediatorError as refusal:
            transaction.write_at_end(claim)
            raise CommitWithError(refusal) from None
        transaction.write_at_end(claim, requests)
        return answer

    async def undo(self, transaction: Transaction) -> UndoCallback | None:
        """
        Delete what it added, and its claim, so that it can be repeated. What it removed stays removed, and so does a
        registration, which can be repeated without effect.
        """
        claim = NONCES.find({"_id": self.guard.nonce, "token": self.token}, hint="_id_")
        if await transaction.query(claim):
            self._done = True
            transaction.write_at_end(build_nonce_release(self.guard.nonce, self.token))
            if self.did is not None and self.creates is not None:
                await self._delete_created(transaction, self.did, *self.creates)
        if self._done and self._decision is not None and self.on_late_answer is not None:
            return partial(self.on_late_answer, self._decision[1])
        return None

    async def _delete_created(
        self, transaction: Transaction, did: str, table: PartyCollection, ids: Sequence[str]
    ) -> None:
        parties, added = await transaction.query_many(
            build_party_query(did), build_party_documents_query(table, did, ids)
        )
        transaction.write_at_end(build_party_changes(table, find_party(parties, did), gone=added))
        if table is PENDING_EVENTS:
            transaction.write_at_end(build_ledger_entries(transaction.slot, "decentrl", withdrawn=len(added)))


class DecentrlCommandRunner:
    """
    Runs commands, those of this process with the same nonce or for the same party one after another, since their
    transactions would conflict.

    :param clock: which registrations and contracts expire by.
    :param nonces: of the whole store.
    :param refuses: whether a write of this name is refused for want of space.
    """

    def __init__(
        self,
        client: ReplicaSetClient,
        clock: IReactorTime,
        nonces: NonceCapacity,
        clocks: ClockSkewMonitor,
        refuses: Callable[[str], bool],
    ) -> None:
        self._client = client
        self._clock = clock
        self._nonces = nonces
        self._clocks = clocks
        self._refuses = refuses
        # Of what is running or waiting.
        self._bounds = BatchLimits()
        self._commands = 0
        self._bytes = 0
        self._uncertain_tokens: OrderedDict[bytes, None] = OrderedDict()
        self._nonce_mutex = KeyedMutex(client.clock)
        self._party_mutex = KeyedMutex(client.clock)

    async def _run(
        self,
        name: str,
        guard: CommandGuard,
        did: str | None,
        work: CommandWork[T],
        *queries: MongoCommand,
        creates: tuple[PartyCollection, Sequence[str]] | None = None,
        size: int = 0,
        on_late_answer: Callable[[T], None] | None = None,
    ) -> T:
        """
        Run a command; parameters as those of :class:`MongoGuardedCommand`.

        :param name: of the operation, for the metric.
        :param size: bytes of its data.
        :raise StoreUnavailable: it failed, or too many commands are running.
        """
        bounds = self._bounds
        # With a skewed clock registrations would seem to have expired, and data would not be found by its recipient.
        if (
            self._clocks.is_skewed
            or self._refuses(name)
            or self._commands >= bounds.waiting
            or self._bytes + size > bounds.waiting_bytes
        ):
            raise StoreUnavailable()
        now, token = self._clock.seconds(), os.urandom(_TOKEN_BYTES)
        command = MongoGuardedCommand(guard, did, work, queries, creates, now, token, on_late_answer)
        self._commands += 1
        self._bytes += size
        try:
            with self._client.operate(name) as run:
                start = partial(self._transact, command, run)
                if did is not None:
                    start = partial(self._party_mutex.run_exclusive, make_party_key(did), start, run.deadline)
                return await self._nonce_mutex.run_exclusive(guard.nonce, start, run.deadline)
        finally:
            self._commands -= 1
            self._bytes -= size

    async def _transact(self, command: MongoGuardedCommand[T], run: Operation) -> T:
        share = command.guard.share
        await self._nonces.refresh_count(run, share)
        command.has_room, command.uncertain_tokens = self._nonces.has_room(share), self._uncertain_tokens
        try:
            answer = await run.transact(command, command.undo)
        except (StoreUnavailable, DuplicateNonce):
            raise
        except MediatorError:
            self._nonces.claimed(not command.replaces)
            raise
        except Exception:
            self._uncertain_tokens[command.token] = None
            if len(self._uncertain_tokens) > _MAX_UNCERTAIN_TOKENS:
                self._uncertain_tokens.popitem(last=False)
            raise
        self._nonces.claimed(not command.replaces)
        return answer
