"""Delivery ledger: what senders were promised and recipients received, and whether they agree."""

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
    Result of reconciling a ledger. The numbers of the second group must be zero.

    Every attempt to send a message has its own payload: a message belongs to one attempt, and does not make up for
    the loss of another.

    A refused attempt may have been stored if the store lost its primary meanwhile; the node undoes that as soon as
    there is another primary. A recipient that fetches before gets the message twice.

    :param message_count: messages that were to be sent.
    :param posts: attempts to send one.
    :param accepted: attempts answered 202.
    :param refused: attempts answered 503.
    :param cut: attempts whose connection broke, which may have been stored.
    :param received: messages received, by id.
    :param repeated: broken attempts that were delivered; their messages were sent again.
    :param slowest: longest response time in seconds.
    :param doubtful: refused attempts that were delivered.

    :param unsent: messages that were never accepted.
    :param lost: accepted attempts that were not delivered.
    :param doubled: unexpected deliveries: a second one of an attempt, or one that was never sent.
    :param returned: messages delivered again after their acknowledgement was answered.
    :param vanished: messages delivered, never acknowledged, and no longer stored.
    :param left: messages still stored when all were acknowledged.
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
    def discrepancy(self) -> int:
        """Sum of the numbers that must be zero."""
        return self.unsent + self.lost + self.doubled + self.returned + self.vanished + self.left

    def __str__(self) -> str:
        return (
            f"{self.message_count} messages in {self.posts} posts: {self.accepted} accepted, {self.refused} refused, "
            f"{self.cut} cut off; {self.received} messages, {self.repeated} of them from posts that were cut off, "
            f"{self.doubtful} doubtful; slowest response {self.slowest:.1f} s; unsent {self.unsent}, "
            f"lost {self.lost}, doubled {self.doubled}, returned {self.returned}, vanished {self.vanished}, "
            f"left {self.left}"
        )


class Acknowledger(Protocol):
    """A wallet, or one of its sockets."""

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> object: ...


class DeliveryLedger:
    """
    Record of attempts, made by sender threads, and of deliveries, made by recipients.

    :ivar accepted_messages: messages accepted at least once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._messages: set[str] = set()
        self._attempts: Counter[str] = Counter()
        self._posts: list[SendAttempt] = []
        self._ids: dict[str, set[str]] = {}
        self._acknowledgements_sent: set[str] = set()
        self._acknowledged: set[str] = set()
        self._returned: set[str] = set()
        self.accepted_messages: set[str] = set()

    def expect(self, messages: Iterable[str]) -> None:
        """Record messages that are to be sent."""
        self._messages.update(messages)

    def begin_attempt(self, message: str) -> str:
        """Begin an attempt to send a message; return the marker of its payload."""
        with self._lock:
            self._attempts[message] += 1
            return f"{message}/{self._attempts[message]}"

    def record_attempt(self, post: SendAttempt) -> None:
        """Record a finished attempt."""
        with self._lock:
            self._posts.append(post)
            if post.status == 202:
                self.accepted_messages.add(message_of_attempt(post.marker))

    def record_deliveries(self, wallet: DIDCommWallet, batch: Iterable[DeliveredMessage]) -> None:
        """Record messages that were pushed or fetched."""
        for delivered in batch:
            self.record_delivery(read_marker(wallet, delivered), delivered.id)

    def record_unread_push(self, wallet: DIDCommWallet, delivered: DeliveredMessage) -> None:
        """Record a push that the wallet has not read; when the message arrives, it has the same id."""
        self._ids.setdefault(read_marker(wallet, delivered), set()).add(delivered.id)

    def record_delivery(self, marker: str, id_: str) -> None:
        """Record one delivery."""
        self._ids.setdefault(marker, set()).add(id_)
        if id_ in self._acknowledged:
            self._returned.add(id_)

    async def acknowledge(self, client: Acknowledger, batch: Iterable[DeliveredMessage]) -> None:
        """Acknowledge, and record the response if there is one."""
        ids = {delivered.id for delivered in batch}
        self._acknowledgements_sent |= ids
        await client.acknowledge(sorted(ids))
        self._acknowledged |= ids

    def undelivered(self) -> set[str]:
        """Markers of accepted attempts that have not been delivered yet."""
        with self._lock:
            return {post.marker for post in self._posts if post.status == 202} - self._ids.keys()

    def balance(self, left: int) -> LedgerBalance:
        """
        Reconcile the ledger.

        :param left: messages that are still in the store.
        """
        accepted, refused, cut = (
            {post.marker for post in self._posts if post.status == status} for status in (202, 503, None)
        )
        delivered = self._ids.keys()
        received = sum(len(ids) for ids in self._ids.values())
        return LedgerBalance(
            message_count=len(self._messages),
            posts=len(self._posts),
            accepted=len(accepted),
            refused=len(refused),
            cut=len(cut),
            received=received,
            repeated=len(cut & delivered),
            slowest=max((post.duration for post in self._posts if post.status is not None), default=0.0),
            unsent=len(self._messages - self.accepted_messages),
            lost=len(accepted - delivered),
            doubtful=len(refused & delivered),
            doubled=received - len((accepted | refused | cut) & delivered),
            returned=len(self._returned),
            vanished=len(set[str]().union(*self._ids.values()) - self._acknowledgements_sent),
            left=left,
        )


def message_of_attempt(marker: str) -> str:
    """The message that this attempt was to send."""
    return marker.rpartition("/")[0]
