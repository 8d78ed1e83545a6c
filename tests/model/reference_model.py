"""What must come of messages, in as few words as possible: a list, and what was taken out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mediatord.store.interfaces.messages import QueueLimits

# Seconds between two rounds of expiry.
SWEEP = 15.0


@dataclass(eq=False, slots=True)
class ExpectedMessage:
    """
    A message that was accepted.

    :param account: whose recipient DID it was for when it came.
    :param due_at: before this time nobody sees it; None once it was handed out, or if it is not delayed.
    """

    payload: bytes
    did: str
    account: str
    received_at: float
    expires_at: float
    due_at: float | None

    def shown(self, now: float) -> bool:
        """Whether its recipient can see it."""
        return now < self.expires_at and (self.due_at is None or self.due_at <= now)


@dataclass(frozen=True, slots=True)
class ForwardedPayloads:
    """What one forward has for one recipient DID."""

    did: str
    payloads: Sequence[bytes]
    expires_at: float
    due_at: float | None = None


class ReferenceModel:
    """
    Accounts with their recipient DIDs, and all that waits, in order of arrival.

    :ivar recipients: of each account, in order of registration.
    :ivar gone: how many have left, by how; `accepted` is how many came.
    """

    def __init__(self, limits: QueueLimits, now: float) -> None:
        self.recipients: dict[str, list[str]] = {}
        self.letters: list[ExpectedMessage] = []
        self.gone: Counter[str] = Counter()
        self._limits = limits
        self._swept = now
        self.now = now

    def owner(self, did: str) -> str | None:
        """The account that has registered a recipient DID."""
        return next((account for account, dids in self.recipients.items() if did in dids), None)

    def update(self, account: str, did: str, action: str) -> str:
        """One entry of a recipient-update, and its result."""
        owner = self.owner(did)
        if (owner == account) == (action == "add"):
            return "no_change"
        if action == "add" and owner is not None:
            return "client_error"
        if action == "add":
            self.recipients[account].append(did)
        else:
            self.recipients[account].remove(did)
        return "success"

    def accept(self, parcels: Sequence[ForwardedPayloads]) -> list[ExpectedMessage]:
        """Take all of them, each after the one before; who has them has them at once, in this order."""
        return [letter for parcel in parcels for letter in self._accept(parcel)]

    def waiting(self, account: str, did: str | None = None) -> list[ExpectedMessage]:
        """What an account can see, oldest first."""
        return [
            one for one in self.letters if one.account == account and did in (None, one.did) and one.shown(self.now)
        ]

    def acknowledge(self, account: str, letters: Iterable[ExpectedMessage]) -> None:
        """Those that are its own, and there, are gone."""
        for one in dict.fromkeys(letters):
            if one in self.letters and one.account == account:
                self._take(one, "acknowledged")

    def pass_time(self, seconds: float) -> list[ExpectedMessage]:
        """Delayed ones that are handed out now, in that order; what has expired is gone if it is looked for."""
        self.now += seconds
        due = [one for one in self.letters if one.due_at is not None and one.shown(self.now)]
        due.sort(key=lambda one: one.due_at or 0.0)
        for one in due:
            one.due_at = None
        if self.now - self._swept >= SWEEP:
            self._swept += SWEEP * ((self.now - self._swept) // SWEEP)
            for one in [one for one in self.letters if one.expires_at <= self.now]:
                self._take(one, "expired")
        return due

    def restart(self) -> None:
        """The rounds begin anew."""
        self._swept = self.now

    @property
    def difference(self) -> int:
        """What is accounted for nowhere, or twice."""
        left = sum(number for reason, number in self.gone.items() if reason != "accepted")
        return self.gone["accepted"] - left - len(self.letters)

    def _accept(self, parcel: ForwardedPayloads) -> list[ExpectedMessage]:
        account = self.owner(parcel.did)
        assert account is not None
        times = self.now, parcel.expires_at, parcel.due_at
        new = [ExpectedMessage(payload, parcel.did, account, *times) for payload in parcel.payloads]
        queue = [one for one in self.letters if (one.account, one.did) == (account, parcel.did)]
        while queue and not self._fits(queue + new):
            self._take(queue.pop(0), "evicted")
        self.letters += new
        self.gone["accepted"] += len(new)
        return new

    def _fits(self, letters: Sequence[ExpectedMessage]) -> bool:
        size = sum(len(one.payload) for one in letters)
        return len(letters) <= self._limits.max_messages and size <= self._limits.max_bytes

    def _take(self, letter: ExpectedMessage, reason: str) -> None:
        self.letters.remove(letter)
        self.gone[reason] += 1
