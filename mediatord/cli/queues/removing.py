"""Taking messages and events out of MongoDB, beside the nodes that work on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from mediatord.cli.queues.course import Course
from mediatord.cli.queues.values import Entry
from mediatord.errors import StoreUnavailable
from mediatord.interfaces import StoreRefused
from mediatord.service import StartupError
from mediatord.store.batches import unobserved
from mediatord.store.mongo.aftermath import Aftermath
from mediatord.store.mongo.decentrl_parties import asking_for, exchanging, of_party, party_among
from mediatord.store.mongo.decentrl_schema import PENDING
from mediatord.store.mongo.duplicates import retried
from mediatord.store.mongo.ledger import entering
from mediatord.store.mongo.names import NameBook
from mediatord.store.mongo.removals import Removal, Removing
from mediatord.store.mongo.server import Server, Transaction
from mediatord.store.mongo.uri import MongoAddress
from mediatord.store.sql_rows import pieces

# In one transaction, which is in the way of others for the same recipient.
_AT_A_TIME = 100


def remove_in_mongodb(address: MongoAddress, entries: Sequence[Entry], course: Course) -> None:
    """
    Take these out, in a reactor that runs meanwhile; so this can be done once in a process.

    :param course: told before each transaction what it is to take out, and then what it took out.
    :raise StartupError: it cannot be done, or not to the end.
    """
    from twisted.internet import reactor  # noqa: TID251  this is the program

    running: Any = reactor
    ends: list[Failure | None] = []

    def begin() -> None:
        done = Deferred.fromCoroutine(_remove(running, address, entries, course))
        done.addBoth(ends.append)
        done.addBoth(lambda _: running.stop())

    running.callWhenRunning(begin)
    running.run()
    if not ends:
        raise KeyboardInterrupt  # which the reactor has taken
    (end,) = ends
    if end is not None and end.check(StoreUnavailable, StoreRefused):
        raise StartupError(f"MongoDB at {address.hosts} cannot be used{_why(end)}")
    if end is not None:
        end.raiseException()


def _why(failure: Failure) -> str:
    reason = failure.getErrorMessage() if failure.check(StoreRefused) else ""
    return f": {reason}" if reason else ": it does not answer"


async def _remove(reactor: Any, address: MongoAddress, entries: Sequence[Entry], course: Course) -> None:
    server = Server(address, reactor, observe=unobserved, on_up=lambda up: None)
    # What is known late is found by looking what is missing.
    removing = Removing(NameBook(), Aftermath(lambda removed: None), "removed")
    try:
        await server.open()
        for some in pieces([one for one in entries if one.half == "didcomm"], _AT_A_TIME):
            course.begin(some)
            removal = Removal([one.id for one in some])
            (removed,) = await server.operate("purge", partial(_take, removing, removal))
            gone = {one.id for one in removed}
            course.end([one for one in some if one.id in gone])
        for did in dict.fromkeys(one.did for one in entries if one.half == "decentrl"):
            await _remove_events(
                server, [one for one in entries if one.half == "decentrl" and one.did == did], course
            )
    finally:
        await server.close()


async def _take(removing: Removing, removal: Removal, operations: Any, deadline: float) -> Sequence[Any]:
    return await removing(operations, [removal], deadline, None)


async def _remove_events(server: Server, entries: Sequence[Entry], course: Course) -> None:
    for some in pieces(entries, _AT_A_TIME):
        course.begin(some)
        gone = await retried(partial(server.transact, "purge", partial(_take_events, some)))
        course.end([one for one in some if one.id in gone])


async def _take_events(entries: Sequence[Entry], transaction: Transaction) -> set[str]:
    did = entries[0].did
    parties, found = await transaction.ask(asking_for(did), of_party(PENDING, did, [one.id for one in entries]))
    transaction.later(exchanging(PENDING, party_among(parties, did), gone=found))
    transaction.later(entering(transaction.page, "decentrl", removed=len(found)))
    return {one["_id"] for one in found}
