"""
Decentrl commands with their guards, each in one transaction.

All that a command needs is read in one round trip and all that it writes goes in another, so a rejected command has
written nothing but its nonce.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

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
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, MongoCommand
from mediatord.store.mongo.driver.errors import CommitWithError, DuplicateKeyError
from mediatord.store.mongo.driver.executor import KeyedMutex, OperationExecutor
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.nonces import NonceCapacity, build_nonce_claim, build_nonce_query, build_nonce_release
from mediatord.store.mongo.schema import NONCES, PENDING_EVENTS, PartyCollection

T = TypeVar("T")

# The latest commands that were reported as failed and may have to be undone.
_MAX_UNCERTAIN_TOKENS = 1_000


@dataclass(frozen=True, slots=True)
class CommandOutcome(Generic[T]):
    """What a command writes, all of it, and returns."""

    requests: Sequence[MongoCommand]
    answer: T


@dataclass(frozen=True, slots=True)
class CommandContext:
    """
    What a command has read.

    :param party: the one that it may change.
    :param found: results of its queries.
    :param transaction: for further queries.
    """

    party: PartyRecord
    found: Sequence[list[Document]]
    transaction: Transaction


@dataclass(frozen=True, slots=True)
class MongoStoreCommand(Generic[T]):
    """
    A command without its guard.

    :param did: of the party that it may change, if any.
    """

    did: str | None

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]] | None:
        """Ids of the documents that it adds to the party."""
        return None

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return 0

    def build_queries(self) -> Sequence[MongoCommand]:
        return ()

    async def decide(self, context: CommandContext) -> CommandOutcome[T]:
        """:raise MediatorError: the command is rejected."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class MongoCheckGuardCommand(MongoStoreCommand[None]):
    """A command that consists of its guard only."""

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        return CommandOutcome((), None)


@dataclass(eq=False, slots=True)
class MongoGuardedCommand(Generic[T]):
    """
    A command with its guard, as the work of a transaction.

    :param now: the store's time.
    :param token: identifies the claim of the nonce.
    :param on_late_answer: called with the answer if the command turns out to be done after it was reported as failed.
    :ivar has_room: whether one more nonce may be claimed.
    :ivar replaces: whether its nonce replaces an expired one.
    :ivar uncertain_tokens: of commands of this process that were reported as failed and are yet to be undone.
    """

    guard: CommandGuard
    command: MongoStoreCommand[T]
    now: float
    token: bytes
    on_late_answer: Callable[[T], None] | None = None
    has_room: bool = True
    replaces: bool = False
    uncertain_tokens: Collection[bytes] = ()
    _outcome: CommandOutcome[T] | None = None
    _done: bool = False

    async def __call__(self, transaction: Transaction) -> T:
        guard, command, self._outcome = self.guard, self.command, None
        dids = [did for did in (guard.sender, guard.recipient, command.did) if did is not None]
        held, parties, *found = await transaction.query_many(
            build_nonce_query(guard.nonce), build_party_query(*dids), *command.build_queries()
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
            outcome = self._outcome = await command.decide(
                CommandContext(find_party(parties, command.did or ""), found, transaction)
            )
        except StoreUnavailable:
            raise
        except MediatorError as refusal:
            transaction.write_at_end(claim)
            raise CommitWithError(refusal) from None
        transaction.write_at_end([*claim, *outcome.requests])
        return outcome.answer

    async def undo(self, transaction: Transaction) -> UndoCallback | None:
        """
        Delete what it added, and its claim, so that it can be repeated. What it removed stays removed, and so does a
        registration, which can be repeated without effect.
        """
        if await transaction.find(NONCES, {"_id": self.guard.nonce, "token": self.token}, hint="_id_"):
            self._done = True
            await self._revert(transaction)
        if self._done and self._outcome is not None and self.on_late_answer is not None:
            return partial(self.on_late_answer, self._outcome.answer)
        return None

    async def _revert(self, transaction: Transaction) -> None:
        command = self.command
        transaction.write_at_end(build_nonce_release(self.guard.nonce, self.token))
        if command.did is not None and command.creates is not None:
            table, ids = command.creates
            parties, added = await transaction.query_many(
                build_party_query(command.did), build_party_documents_query(table, command.did, ids)
            )
            transaction.write_at_end(build_party_changes(table, find_party(parties, command.did), gone=added))
            if table is PENDING_EVENTS:
                transaction.write_at_end(build_ledger_entries(transaction.slot, "decentrl", withdrawn=len(added)))


class CommandSerializer:
    """
    Runs commands, those of this process with the same nonce or for the same party one after another, since their
    transactions would conflict.

    :param nonces: of the whole store.
    :param bounds: of what is running or waiting.
    """

    def __init__(self, client: ReplicaSetClient, nonces: NonceCapacity, bounds: BatchLimits) -> None:
        self._client = client
        self._nonces = nonces
        self._bounds = bounds
        self._commands = 0
        self._bytes = 0
        self._uncertain_tokens: OrderedDict[bytes, None] = OrderedDict()
        self._nonce_mutex = KeyedMutex(client.clock)
        self._party_mutex = KeyedMutex(client.clock)

    async def run_command(self, name: str, guarded: MongoGuardedCommand[T]) -> T:
        """
        Run a command.

        :param name: of the operation, for the metric.
        :raise StoreUnavailable: it failed, or too many commands are running.
        """
        size, bounds = guarded.command.size, self._bounds
        if self._commands >= bounds.waiting or self._bytes + size > bounds.waiting_bytes:
            raise StoreUnavailable()
        self._commands += 1
        self._bytes += size
        try:
            return await self._client.operate(name, partial(self._run_exclusive, guarded))
        except DuplicateKeyError:
            raise StoreUnavailable() from None
        finally:
            self._commands -= 1
            self._bytes -= size

    def _run_exclusive(
        self, guarded: MongoGuardedCommand[T], executor: OperationExecutor, deadline: float
    ) -> Awaitable[T]:
        run = partial(self._run, executor, guarded, deadline)
        did = guarded.command.did
        if did is not None:
            run = partial(self._party_mutex.run_exclusive, make_party_key(did), run, deadline)
        return self._nonce_mutex.run_exclusive(guarded.guard.nonce, run, deadline)

    async def _run(self, executor: OperationExecutor, guarded: MongoGuardedCommand[T], deadline: float) -> T:
        share = guarded.guard.share
        await self._nonces.refresh_count(executor, deadline, share)
        guarded.has_room, guarded.uncertain_tokens = self._nonces.has_room(share), self._uncertain_tokens
        try:
            answer = await executor.transact(guarded, deadline, guarded.undo)
        except (StoreUnavailable, DuplicateNonce):
            raise
        except MediatorError:
            self._nonces.claimed(not guarded.replaces)
            raise
        except Exception:
            self._uncertain_tokens[guarded.token] = None
            if len(self._uncertain_tokens) > _MAX_UNCERTAIN_TOKENS:
                self._uncertain_tokens.popitem(last=False)
            raise
        self._nonces.claimed(not guarded.replaces)
        return answer
