"""Simple model of queued messages: a list and what was removed from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mediatord.store.interfaces.messages import QueueLimits

# Seconds between two rounds of expiry.
EXPIRY_INTERVAL = 15.0


@dataclass(eq=False, slots=True)
class ExpectedMessage:
    """
    An accepted message.

    :param account: account whose recipient DID it was for when it came.

    :param due_at: time before which it is hidden; None once it was taken as due, or if it is not delayed.
    """

    payload: bytes
    did: str
    account: str
    received_at: float
    expires_at: float
    due_at: float | None

    def is_visible(self, now: float) -> bool:
        """Whether its recipient can see it."""
        return now < self.expires_at and (self.due_at is None or self.due_at <= now)


@dataclass(frozen=True, slots=True)
class ForwardedPayloads:
    """Payloads of one forward for one recipient DID."""

    did: str
    payloads: Sequence[bytes]
    expires_at: float
    due_at: float | None = None


class ReferenceModel:
    """
    Accounts with their recipient DIDs, and all queued messages in order of arrival.

    :ivar recipients: recipients of each account, in order of registration.

    :ivar gone: number of messages by ledger entry; `accepted` is the number of all.
    """

    def __init__(self, limits: QueueLimits, now: float) -> None:
        self.recipients: dict[str, list[str]] = {}
        self.messages: list[ExpectedMessage] = []
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._swept = now
        self.now = now

    def find_owner(self, did: str) -> str | None:
        """The account that has registered a recipient DID."""
        return next((account for account, dids in self.recipients.items() if did in dids), None)

    def update(self, account: str, did: str, action: str) -> str:
        """One recipient update, and its result."""
        owner = self.find_owner(did)
        if (owner == account) == (action == "add"):
            return "no_change"
        if action == "add" and owner is not None:
            return "client_error"
        if action == "add":
            self.recipients[account].append(did)
        else:
            self.recipients[account].remove(did)
        return "success"

    def accept(self, forwarded_payloads: Sequence[ForwardedPayloads]) -> list[ExpectedMessage]:
        """Accept payloads in order; the recipients have them at once."""
        return [message for forwarded in forwarded_payloads for message in self._accept_one(forwarded)]

    def list_waiting(self, account: str, did: str | None = None) -> list[ExpectedMessage]:
        """Messages visible to an account, oldest first."""
        return [
            message
            for message in self.messages
            if message.account == account and did in (None, message.did) and message.is_visible(self.now)
        ]

    def acknowledge(self, account: str, messages: Iterable[ExpectedMessage]) -> None:
        """Remove those messages that are queued for the account."""
        for one in dict.fromkeys(messages):
            if one in self.messages and one.account == account:
                self._remove(one, "acknowledged")

    def pass_time(self, seconds: float) -> list[ExpectedMessage]:
        """Take delayed messages as due, in order, and remove expired ones if a round of expiry is due."""
        self.now += seconds
        due = [message for message in self.messages if message.due_at is not None and message.is_visible(self.now)]
        due.sort(key=lambda one: one.due_at or 0.0)
        for message in due:
            message.due_at = None
        if self.now - self._swept >= EXPIRY_INTERVAL:
            self._swept += EXPIRY_INTERVAL * ((self.now - self._swept) // EXPIRY_INTERVAL)
            for one in [message for message in self.messages if message.expires_at <= self.now]:
                self._remove(one, "expired")
        return due

    def restart(self) -> None:
        """Restart the rounds of expiry."""
        self._swept = self.now

    @property
    def read_difference(self) -> int:
        """Difference of the ledger."""
        removed = sum(number for reason, number in self.counts.items() if reason != "accepted")
        return self.counts["accepted"] - removed - len(self.messages)

    def _accept_one(self, forwarded: ForwardedPayloads) -> list[ExpectedMessage]:
        account = self.find_owner(forwarded.did)
        assert account is not None
        times = self.now, forwarded.expires_at, forwarded.due_at
        new = [ExpectedMessage(payload, forwarded.did, account, *times) for payload in forwarded.payloads]
        queue = [message for message in self.messages if (message.account, message.did) == (account, forwarded.did)]
        while queue and not self._fits(queue + new):
            self._remove(queue.pop(0), "evicted")
        self.messages += new
        self.counts["accepted"] += len(new)
        return new

    def _fits(self, messages: Sequence[ExpectedMessage]) -> bool:
        size = sum(len(message.payload) for message in messages)
        return len(messages) <= self._limits.max_messages and size <= self._limits.max_bytes

    def _remove(self, message: ExpectedMessage, reason: str) -> None:
        self.messages.remove(message)
        self.counts[reason] += 1
