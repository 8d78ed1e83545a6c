"""
What became of all messages, noted by the transactions that accept and remove them.

Each session has a page of its own, and a session has one transaction at a time: so no two transactions, of any nodes,
are in each other's way on a page. What is in all of them is the ledger. How many there are depends on the sessions
that processes have at a time; those of processes that are gone are carried forward, see :mod:`.books`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from mediatord.store.mongo.driver.commands import MongoCommand, build_updates

LEDGER = "ledger"
# The page of all that has been carried forward.
CARRIED_FORWARD_ID = "carried"

LedgerHalf = Literal["didcomm", "decentrl"]
LEDGER_HALVES: tuple[LedgerHalf, ...] = ("didcomm", "decentrl")


class LedgerPage(NamedTuple):
    """:param owner: of the session."""

    owner: str
    number: int

    @property
    def id(self) -> str:
        return f"{self.owner}:{self.number}"


def build_ledger_entries(page: LedgerPage, half: LedgerHalf, **more: int) -> list[MongoCommand]:
    """
    Note what became of messages, in the transaction that does it.

    :param more: by entry, how many; see :class:`~mediatord.store.interfaces.messages.MessageLedger`.
    """
    change = {f"{half}.{entry}": number for entry, number in more.items() if number}
    if not change:
        return []
    noted = {"$inc": change, "$setOnInsert": {"owner": page.owner}}
    return build_updates(LEDGER, [{"q": {"_id": page.id}, "u": noted, "upsert": True}])
