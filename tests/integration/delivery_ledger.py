"""What was promised to senders, what came to recipients, and whether the two agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet
from tests.integration.message_load import SendAttempt, read_marker


@dataclass(frozen=True, slots=True)
class LedgerBalance:
    """
    What a ledger comes to. All numbers of the last part have to be zero.

    Every attempt to send a letter has a payload of its own: each message is due to one attempt, and none makes up for
    the loss of another.

    A refused attempt may have been stored all the same, when the store lost its primary in the middle of it; the node
    takes that back as soon as there is another. A recipient that fetches it before that gets the letter twice.

    :param letters: what was to be sent.
    :param posts: attempts to send one.
    :param accepted: those answered 202.
    :param refused: those answered 503.
    :param cut: those that lost their connection: whether the payload was stored is anybody's guess.
    :param received: messages by id.
    :param repeated: attempts that were cut off and came: their letters were sent again.
    :param slowest: seconds that an answer took.
    :param doubtful: attempts that were refused and came.

    :param unsent: letters that were never accepted.
    :param lost: attempts that were accepted and did not come.
    :param doubled: messages that nothing accounts for: a second one of an attempt, or one that was never sent.
    :param returned: messages that came again after their acknowledgement had been answered.
    :param vanished: messages that came, were never acknowledged, and were gone nevertheless.
    :param left: messages that are still there when everything was acknowledged.
    """

    message_count: int
    posts: int
    accepted: int
    refused: int
    cut: int
    received: int
    repeated: int
    slowest: float
    doubtful: int

    unsent: int
    lost: int
    doubled: int
    returned: int
    vanished: int
    left: int

    @property
    def owed(self) -> int:
        """What has to be zero."""
        return self.unsent + self.lost + self.doubled + self.returned + self.vanished + self.left

    def __str__(self) -> str:
        return (
            f"{self.message_count} letters in {self.posts} posts: {self.accepted} accepted, {self.refused} refused, "
            f"{self.cut} cut off; {self.received} messages, {self.repeated} of them from posts that were cut off, "
            f"{self.doubtful} doubtful; slowest answer {self.slowest:.1f} s; unsent {self.unsent}, lost {self.lost}, "
            f"doubled {self.doubled}, returned {self.returned}, vanished {self.vanished}, left {self.left}"
        )


class Acknowledger(Protocol):
    """A wallet, or a socket of it."""

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> object: ...


class DeliveryLedger:
    """
    Entries are made by senders from their threads and by recipients. Markers are those of attempts.

    :ivar answered: letters that were accepted at least once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._letters: set[str] = set()
        self._attempts: Counter[str] = Counter()
        self._posts: list[SendAttempt] = []
        self._ids: dict[str, set[str]] = {}
        self._asked: set[str] = set()
        self._acknowledged: set[str] = set()
        self._returned: set[str] = set()
        self.answered: set[str] = set()

    def due(self, message_count: Iterable[str]) -> None:
        """These are to be sent."""
        self._letters.update(message_count)

    def attempt(self, letter: str) -> str:
        """Begin another attempt to send a letter; the marker to be found in this one."""
        with self._lock:
            self._attempts[letter] += 1
            return f"{letter}/{self._attempts[letter]}"

    def posted(self, post: SendAttempt) -> None:
        """Enter an attempt that is over."""
        with self._lock:
            self._posts.append(post)
            if post.status == 202:
                self.answered.add(message_of_attempt(post.marker))

    def delivered(self, wallet: DIDCommWallet, batch: Iterable[DeliveredMessage]) -> None:
        """Enter what came, pushed or fetched."""
        for one in batch:
            self.came(read_marker(wallet, one), one.id)

    def delivered_unseen(self, wallet: DIDCommWallet, delivered: DeliveredMessage) -> None:
        """Enter what was sent to a wallet that has not got it: when it comes, it has the same id."""
        self._ids.setdefault(read_marker(wallet, delivered), set()).add(delivered.id)

    def came(self, marker: str, id_: str) -> None:
        """Enter one of them."""
        self._ids.setdefault(marker, set()).add(id_)
        if id_ in self._acknowledged:
            self._returned.add(id_)

    async def acknowledge(self, way: Acknowledger, batch: Iterable[DeliveredMessage]) -> None:
        """Acknowledge, and enter the answer if there is one."""
        ids = {one.id for one in batch}
        self._asked |= ids
        await way.acknowledge(sorted(ids))
        self._acknowledged |= ids

    def awaited(self) -> set[str]:
        """The markers of what was accepted and has not come yet."""
        with self._lock:
            return {post.marker for post in self._posts if post.status == 202} - self._ids.keys()

    def balance(self, left: int) -> LedgerBalance:
        """
        Close the books.

        :param left: messages that are still in the store.
        """
        accepted, refused, cut = (
            {post.marker for post in self._posts if post.status == status} for status in (202, 503, None)
        )
        came = self._ids.keys()
        received = sum(len(ids) for ids in self._ids.values())
        return LedgerBalance(
            message_count=len(self._letters),
            posts=len(self._posts),
            accepted=len(accepted),
            refused=len(refused),
            cut=len(cut),
            received=received,
            repeated=len(cut & came),
            slowest=max((post.took for post in self._posts if post.status is not None), default=0.0),
            unsent=len(self._letters - self.answered),
            lost=len(accepted - came),
            doubtful=len(refused & came),
            doubled=received - len((accepted | refused | cut) & came),
            returned=len(self._returned),
            vanished=len(set[str]().union(*self._ids.values()) - self._asked),
            left=left,
        )


def message_of_attempt(marker: str) -> str:
    """The letter that was to be sent by this attempt."""
    return marker.rpartition("/")[0]
