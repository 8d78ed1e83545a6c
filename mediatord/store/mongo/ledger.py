"""
What became of all messages, noted by the transactions that accept and remove them.

Each session has a page of its own, and a session has one transaction at a time: so no two transactions, of any nodes,
are in each other's way on a page. What is in all of them is the ledger. How many there are depends on the sessions
that processes have at a time; those of processes that are gone are carried forward, see :mod:`.books`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from mediatord.store.mongo.requests import Request, updating

LEDGER = "ledger"
# The page of all that has been carried forward.
CARRIED = "carried"

Half = Literal["didcomm", "decentrl"]
HALVES: tuple[Half, ...] = ("didcomm", "decentrl")


class Page(NamedTuple):
    """:param owner: of the session."""

    owner: str
    number: int

    @property
    def id(self) -> str:
        return f"{self.owner}:{self.number}"


def entering(page: Page, half: Half, **more: int) -> list[Request]:
    """
    Note what became of messages, in the transaction that does it.

    :param more: by entry, how many; see :class:`~mediatord.interfaces.Ledger`.
    """
    change = {f"{half}.{entry}": number for entry, number in more.items() if number}
    if not change:
        return []
    noted = {"$inc": change, "$setOnInsert": {"owner": page.owner}}
    return updating(LEDGER, [{"q": {"_id": page.id}, "u": noted, "upsert": True}])
