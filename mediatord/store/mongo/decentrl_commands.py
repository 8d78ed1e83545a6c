"""
Commands with their guards, each in one transaction: all that it has to know is asked in one flight, and all that it
writes goes in another, so that a refused one has written nothing but its nonce.

Commands in their turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from mediatord.errors import (
    DuplicateNonce,
    MediatorError,
    RecipientNotRegistered,
    ReplayCacheFull,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import CommandGuard
from mediatord.store.message_operations import BatchLimits
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
from mediatord.store.mongo.ledger_entries import build_ledger_entries
from mediatord.store.mongo.nonces import NonceCapacity, build_nonce_claim, build_nonce_query, build_nonce_release
from mediatord.store.mongo.schema import NONCES, PENDING_EVENTS, PartyCollection

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class CommandOutcome(Generic[T_co]):
    """What a command comes to: what is to be written, all of it, and the answer then."""

    requests: Sequence[MongoCommand]
    answer: T_co


@dataclass(frozen=True, slots=True)
class CommandContext:
    """
    What a command finds.

    :param party: whose holdings it may change.
    :param found: the answers to what it asked.
    :param transaction: for what else it has to ask.
    """

    party: PartyRecord
    found: Sequence[list[Document]]
    transaction: Transaction


class MongoStoreCommand(Protocol[T_co]):
    """What is done if nothing is against it."""

    @property
    def did(self) -> str | None:
        """Whose holdings it may change."""

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]] | None:
        """What it adds to these holdings, by id."""

    @property
    def size(self) -> int:
        """Bytes that it holds on to until it is done."""

    def build_queries(self) -> Sequence[MongoCommand]:
        """What it has to know."""

    async def decide(self, context: CommandContext) -> CommandOutcome[T_co]:
        """:raise MediatorError: it is refused."""


@dataclass(frozen=True, slots=True)
class MongoAdmitCommand:
    """Nothing but what the guard says."""

    @property
    def did(self) -> None:
        """Nobody's."""

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def build_queries(self) -> list[MongoCommand]:
        return []

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        return CommandOutcome((), None)


@dataclass(eq=False, slots=True)
class MongoGuardedCommand(Generic[T]):
    """
    A command with its guard, as the work of a transaction.

    :param now: the store's time when it was given.
    :param token: which says whose claim of the nonce it is.
    :param tell: told the answer if it was done although it was said to have failed.
    :ivar has_room: whether one more nonce may be claimed.
    :ivar replaces: whether its nonce takes the place of one that is over.
    :ivar doubtful: tokens of commands of this process that seemed to have failed; what they did is yet to be undone.
    """

    guard: CommandGuard
    command: MongoStoreCommand[T]
    now: float
    token: bytes
    tell: Callable[[T], None] | None = None
    has_room: bool = True
    replaces: bool = False
    uncertain_tokens: Collection[bytes] = ()
    _change: CommandOutcome[T] | None = None
    _done: bool = False

    async def __call__(self, transaction: Transaction) -> T:
        guard, command, self._change = self.guard, self.command, None
        dids = [did for did in (guard.sender, guard.recipient, command.did) if did is not None]
        held, parties, *found = await transaction.ask(
            build_nonce_query(guard.nonce), build_party_query(*dids), *command.build_queries()
        )
        claim = build_nonce_claim(held, guard.nonce, guard.until, self.now, self.token)
        if claim is None:
            if held[0]["token"] in self.uncertain_tokens:
                # Refused as done, it would never be sent again; and soon it will not have been done.
                raise StoreUnavailable()
            raise DuplicateNonce()
        self.replaces = bool(held)
        if not held and not self.has_room:
            raise ReplayCacheFull()
        try:
            self._check(parties)
            change = self._change = await command.decide(
                CommandContext(find_party(parties, command.did or ""), found, transaction)
            )
        except StoreUnavailable:
            raise
        except MediatorError as refusal:
            transaction.write_at_end(claim)
            raise CommitWithError(refusal) from None
        transaction.write_at_end([*claim, *change.requests])
        return change.answer

    async def undo(self, transaction: Transaction) -> UndoCallback | None:
        """
        Take back what it added, and its claim, so that it can be given again. What it has removed stays so, and a
        registration stays: the same makes no difference when it comes again.
        """
        if await transaction.find(NONCES, {"_id": self.guard.nonce, "token": self.token}, hint="_id_"):
            self._done = True
            await self._revert(transaction)
        if self._done and self._change is not None and self.tell is not None:
            return partial(self.tell, self._change.answer)
        return None

    async def _revert(self, transaction: Transaction) -> None:
        command = self.command
        transaction.write_at_end(build_nonce_release(self.guard.nonce, self.token))
        if command.did is not None and command.creates is not None:
            table, ids = command.creates
            parties, added = await transaction.ask(
                build_party_query(command.did), build_party_documents_query(table, command.did, ids)
            )
            transaction.write_at_end(build_party_changes(table, find_party(parties, command.did), gone=added))
            if table is PENDING_EVENTS:
                transaction.write_at_end(build_ledger_entries(transaction.page, "decentrl", withdrawn=len(added)))

    def _check(self, parties: Sequence[Document]) -> None:
        """:raise MediatorError: the guard has something against it."""
        for did, refusal in (
            (self.guard.sender, UnauthorizedCommand),
            (self.guard.recipient, RecipientNotRegistered),
        ):
            if did is not None and find_party(parties, did).registered_until <= self.now:
                raise refusal()


# Commands that seemed to have failed, the last ones, which may have to be undone.
_MAX_UNCERTAIN_TOKENS = 1_000


class CommandSerializer:
    """
    Carries out commands of this process, those with the same nonce and those for the same party one after another, as
    they would only be in each other's way.

    :param nonces: those of the whole store.
    :param bounds: what may be under way before more is refused.
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
        :param name: of the operation, for the metric.
        :raise StoreUnavailable: it could not be done, or too much is under way.
        """
        size, bounds = guarded.command.size, self._bounds
        if self._commands >= bounds.waiting or self._bytes + size > bounds.waiting_bytes:
            raise StoreUnavailable()
        self._commands += 1
        self._bytes += size
        try:
            return await self._run_exclusive(name, guarded)
        finally:
            self._commands -= 1
            self._bytes -= size

    async def _run_exclusive(self, name: str, guarded: MongoGuardedCommand[T]) -> T:
        def in_turn(executor: OperationExecutor, deadline: float) -> Awaitable[T]:
            def transact() -> Awaitable[T]:
                return self._run_claimed(executor, guarded, deadline)

            def after_others() -> Awaitable[T]:
                did = guarded.command.did
                return (
                    transact()
                    if did is None
                    else self._party_mutex.run_exclusive(make_party_key(did), transact, deadline)
                )

            return self._nonce_mutex.run_exclusive(guarded.guard.nonce, after_others, deadline)

        try:
            return await self._client.operate(name, in_turn)
        except DuplicateKeyError:
            raise StoreUnavailable() from None

    async def _run_claimed(self, executor: OperationExecutor, guarded: MongoGuardedCommand[T], deadline: float) -> T:
        await self._nonces.refresh_count(executor, deadline, guarded.guard.share)
        guarded.has_room, guarded.uncertain_tokens = (
            self._nonces.has_room(guarded.guard.share),
            self._uncertain_tokens,
        )
        try:
            answer = await executor.transact(guarded, deadline, guarded.undo)
        except (StoreUnavailable, DuplicateNonce):
            raise
        except MediatorError:
            self._nonces.claimed(not guarded.replaces)
            raise
        except Exception:
            self._mark_uncertain(guarded.token)
            raise
        self._nonces.claimed(not guarded.replaces)
        return answer

    def _mark_uncertain(self, token: bytes) -> None:
        self._uncertain_tokens[token] = None
        if len(self._uncertain_tokens) > _MAX_UNCERTAIN_TOKENS:
            self._uncertain_tokens.popitem(last=False)
