"""The accounts of the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from mediatord.errors import NotEnrolled
from mediatord.interfaces import Account, Action, UpdateResult
from mediatord.store.memory_queues import Mailbox


@dataclass(eq=False, slots=True)
class Holder:
    """An account with its mailbox and its recipient DIDs in order of registration."""

    account: Account
    mailbox: Mailbox
    recipients: dict[str, None] = field(default_factory=dict)


class Accounts:
    """Accounts by DID and by recipient DID."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self._owners: dict[str, Holder] = {}
        self._retired: set[str] = set()

    def holder(self, did: str) -> Holder | None:
        """Who has this account DID."""
        return self._holders.get(did)

    def owner(self, recipient_did: str) -> Holder | None:
        """Who has registered this recipient DID."""
        return self._owners.get(recipient_did)

    def grant(self, did: str, now: float) -> Account:
        """:raise NotEnrolled: the DID was rotated away from."""
        if did in self._retired:
            raise NotEnrolled()
        holder = self._holders.get(did)
        if holder is None:
            holder = self._holders[did] = Holder(Account(did, now), Mailbox(did))
        return holder.account

    def mark_draft03(self, did: str) -> None:
        holder = self._holders.get(did)
        if holder is not None:
            holder.account = replace(holder.account, draft03=True)

    def update(self, did: str, updates: Sequence[tuple[str, Action]], max_recipients: int) -> list[UpdateResult]:
        """:raise NotEnrolled: there is no such account."""
        holder = self._holders.get(did)
        if holder is None:
            raise NotEnrolled()
        return [
            self._add(holder, recipient_did, max_recipients)
            if action == "add"
            else self._remove(holder, recipient_did)
            for recipient_did, action in updates
        ]

    def recipients(self, did: str, offset: int, limit: int) -> tuple[list[str], int]:
        holder = self._holders.get(did)
        if holder is None:
            return [], 0
        return list(islice(holder.recipients, offset, offset + limit)), len(holder.recipients)

    def move(self, prior: str, new: str) -> bool:
        if prior not in self._holders or new in self._holders or new in self._retired:
            return False
        holder = self._holders[new] = self._holders.pop(prior)
        holder.account = replace(holder.account, did=new)
        holder.mailbox.did = new
        self._retired.add(prior)
        return True

    def is_retired(self, did: str) -> bool:
        """Whether it was rotated away from."""
        return did in self._retired

    def _add(self, holder: Holder, did: str, max_recipients: int) -> UpdateResult:
        owner = self._owners.get(did)
        if owner is holder:
            return "no_change"
        if owner is not None or len(holder.recipients) >= max_recipients:
            return "client_error"
        self._owners[did] = holder
        holder.recipients[did] = None
        holder.mailbox.registered.add(did)
        return "success"

    def _remove(self, holder: Holder, did: str) -> UpdateResult:
        if self._owners.get(did) is not holder:
            return "no_change"
        del self._owners[did]
        del holder.recipients[did]
        holder.mailbox.registered.discard(did)
        holder.mailbox.tidy(did)
        return "success"
