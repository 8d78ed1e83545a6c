"""
Commands with their guards, each in one transaction: all that it has to know is asked in one flight, and all that it
writes goes in another, so that a refused one has written nothing but its nonce.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from mediatord.errors import (
    DuplicateNonce,
    MediatorError,
    RecipientNotRegistered,
    ReplayMemoryFull,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.interfaces.decentrl import Guard
from mediatord.store.mongo.collections import NONCES
from mediatord.store.mongo.decentrl_parties import Party, asking_for, exchanging, of_party, party_among
from mediatord.store.mongo.decentrl_schema import PENDING, Table
from mediatord.store.mongo.ledger import entering
from mediatord.store.mongo.nonces import asking_for_nonce, claiming, releasing_own
from mediatord.store.mongo.replies import Kept
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Settled

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Change(Generic[T_co]):
    """What a command comes to: what is to be written, all of it, and the answer then."""

    requests: Sequence[Request]
    answer: T_co


@dataclass(frozen=True, slots=True)
class Scene:
    """
    What a command finds.

    :param party: whose holdings it may change.
    :param found: the answers to what it asked.
    :param transaction: for what else it has to ask.
    """

    party: Party
    found: Sequence[list[Document]]
    transaction: Transaction


class Command(Protocol[T_co]):
    """What is done if nothing is against it."""

    @property
    def did(self) -> str | None:
        """Whose holdings it may change."""

    @property
    def creates(self) -> tuple[Table, Sequence[str]] | None:
        """What it adds to these holdings, by id."""

    @property
    def size(self) -> int:
        """Bytes that it holds on to until it is done."""

    def asks(self) -> Sequence[Request]:
        """What it has to know."""

    async def decide(self, scene: Scene) -> Change[T_co]:
        """:raise MediatorError: it is refused."""


@dataclass(frozen=True, slots=True)
class Admitting:
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

    def asks(self) -> list[Request]:
        return []

    async def decide(self, scene: Scene) -> Change[None]:
        return Change((), None)


@dataclass(eq=False, slots=True)
class Guarded(Generic[T]):
    """
    A command with its guard, as the work of a transaction.

    :param now: the store's time when it was given.
    :param token: which says whose claim of the nonce it is.
    :param tell: told the answer if it was done although it was said to have failed.
    :ivar has_room: whether one more nonce may be claimed.
    :ivar replaces: whether its nonce takes the place of one that is over.
    :ivar doubtful: tokens of commands of this process that seemed to have failed; what they did is yet to be undone.
    """

    guard: Guard
    command: Command[T]
    now: float
    token: bytes
    tell: Callable[[T], None] | None = None
    has_room: bool = True
    replaces: bool = False
    doubtful: Collection[bytes] = ()
    _change: Change[T] | None = None
    _done: bool = False

    async def __call__(self, transaction: Transaction) -> T:
        guard, command, self._change = self.guard, self.command, None
        dids = [did for did in (guard.sender, guard.recipient, command.did) if did is not None]
        held, parties, *found = await transaction.ask(
            asking_for_nonce(guard.nonce), asking_for(*dids), *command.asks()
        )
        claim = claiming(held, guard.nonce, guard.until, self.now, self.token)
        if claim is None:
            if held[0]["token"] in self.doubtful:
                # Refused as done, it would never be sent again; and soon it will not have been done.
                raise StoreUnavailable()
            raise DuplicateNonce()
        self.replaces = bool(held)
        if not held and not self.has_room:
            raise ReplayMemoryFull()
        try:
            self._check(parties)
            change = self._change = await command.decide(
                Scene(party_among(parties, command.did or ""), found, transaction)
            )
        except StoreUnavailable:
            raise
        except MediatorError as refusal:
            transaction.later(claim)
            raise Kept(refusal) from None
        transaction.later([*claim, *change.requests])
        return change.answer

    async def undo(self, transaction: Transaction) -> Settled | None:
        """
        Take back what it added, and its claim, so that it can be given again. What it has removed stays so, and a
        registration stays: the same makes no difference when it comes again.
        """
        if await transaction.find(NONCES, {"_id": self.guard.nonce, "token": self.token}, hint="_id_"):
            self._done = True
            await self._take_back(transaction)
        if self._done and self._change is not None and self.tell is not None:
            return partial(self.tell, self._change.answer)
        return None

    async def _take_back(self, transaction: Transaction) -> None:
        command = self.command
        transaction.later(releasing_own(self.guard.nonce, self.token))
        if command.did is not None and command.creates is not None:
            table, ids = command.creates
            parties, added = await transaction.ask(asking_for(command.did), of_party(table, command.did, ids))
            transaction.later(exchanging(table, party_among(parties, command.did), gone=added))
            if table is PENDING:
                transaction.later(entering(transaction.page, "decentrl", withdrawn=len(added)))

    def _check(self, parties: Sequence[Document]) -> None:
        """:raise MediatorError: the guard has something against it."""
        for did, refusal in (
            (self.guard.sender, UnauthorizedCommand),
            (self.guard.recipient, RecipientNotRegistered),
        ):
            if did is not None and party_among(parties, did).registered_until <= self.now:
                raise refusal()
