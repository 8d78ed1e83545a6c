"""What becomes known late: of writes of which nobody knew whether they were done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from twisted.logger import Logger

from mediatord.interfaces import Removed
from mediatord.store.mongo.collections import MESSAGES
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Settled

Tell = Callable[[Sequence[Removed]], None]

_log = Logger(namespace="mediatord.store")


def log_removed(removed: Sequence[Removed]) -> None:
    """Say how many messages have gone, and why."""
    reasons = Counter(one.reason or "acknowledged" for one in removed)
    _log.warn(
        "messages were removed by operations that seemed to have failed: {reasons}",
        reasons=", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items())),
    )


class Aftermath:
    """
    Tells of messages that a write has removed although it was said to have failed.

    It goes by whether they are still there: one that the write did not remove, and that somebody else has removed
    before this was looked at, is told twice. None is not told at all, unless this process ends before.

    :param tell: what it tells.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    async def look(self, transaction: Transaction, removed: Sequence[Removed]) -> Settled | None:
        """Part of an undo: see what is not there any more, to be told when the undo is durable."""
        if not removed:
            return None
        ids = [one.id for one in removed]
        found = await transaction.find(MESSAGES, {"_id": {"$in": ids}}, projection={"_id": 1}, hint="_id_")
        left = {one["_id"] for one in found}
        gone = [one for one in removed if one.id not in left]
        return partial(self.tell, gone) if gone else None

    def tell(self, gone: Sequence[Removed]) -> None:
        """These are gone after all."""
        if gone:
            log_removed(gone)
            self._tell(gone)
