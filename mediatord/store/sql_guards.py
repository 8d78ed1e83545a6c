"""
Commands with their guards.

A guard and its command are one operation, and commands that stand next to each other in a batch share the statements
that claim their nonces and look up who is registered. Then those of each lane are carried out in their order, so that
there are more neighbours of a kind: commands of different lanes never see what the other has done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from mediatord.errors import DuplicateNonce, MediatorError, RecipientNotRegistered, UnauthorizedCommand
from mediatord.interfaces.decentrl import Guard
from mediatord.store.group_commit import Outcome, Work, attempt_all
from mediatord.store.sql_contracts import registered
from mediatord.store.sql_nonces import Claim, Claimed, claim_all

Command = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class Guarded:
    """
    A command with its guard, as an operation of a batch.

    :param command: refuses, if it does, before its first write.
    :param now: when it was given.
    :param capacity: how many nonces are kept.
    :param lane: name of what it reads and changes, which commands of no other lane do.
    """

    guard: Guard
    command: Command
    now: float
    capacity: int
    lane: str

    def __call__(self, connection: Connection) -> Outcome:
        """By itself; a refusal is an outcome, so that the nonce is kept."""
        return self.together(connection, [self])[0]

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the commands after it, in their order."""
        commands = [work for work in works if isinstance(work, Guarded)]
        claims = [Claim(one.guard.nonce, one.guard.until, one.now, one.guard.share) for one in commands]
        pairs = zip(commands, claim_all(connection, claims, self.capacity), strict=True)
        return [outcome for run in _runs(pairs) for outcome in _carry_out(connection, run)]

    def refusal(self, new: Claimed, present: set[str | None]) -> MediatorError | None:
        """
        The first reason not to carry it out.

        :param new: what became of its nonce.
        :param present: those who are registered, and nobody.
        """
        if new is not True:
            return new or DuplicateNonce()
        if self.guard.sender not in present:
            return UnauthorizedCommand()
        if self.guard.recipient not in present:
            return RecipientNotRegistered()
        return None


# Of what changes who is registered.
REGISTRATION = "registration"

_Run = list[tuple[Guarded, Claimed]]


def _runs(pairs: Iterator[tuple[Guarded, Claimed]]) -> Iterator[_Run]:
    """Commands during which the same DIDs stay registered: one that may change that ends a run."""
    run: _Run = []
    for one, new in pairs:
        run.append((one, new))
        if one.lane == REGISTRATION:
            yield run
            run = []
    if run:
        yield run


def _carry_out(connection: Connection, run: _Run) -> list[Outcome]:
    guards = [one.guard for one, new in run if new is True]
    dids = {did for guard in guards for did in (guard.sender, guard.recipient) if did is not None}
    # What a batch waits for is short, so one time will do for all: that of the last.
    now = max([one.now for one, _ in run])
    present = {None, *registered(connection, list(dids), now)}
    outcomes = {
        place: Outcome(error=refusal)
        for place, (one, new) in enumerate(run)
        if (refusal := one.refusal(new, present)) is not None
    }
    passing = [place for place in range(len(run)) if place not in outcomes]
    passing.sort(key=lambda place: run[place][0].lane)
    done = attempt_all(connection, [run[place][0].command for place in passing])
    outcomes |= zip(passing, done, strict=True)
    return [outcomes[place] for place in range(len(run))]
