"""The accounts of the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mediatord.errors import NotEnrolled
from mediatord.interfaces import FIRST_DAY, Account, AccountUsage, Action, ExpiredAccount, ExpiryReason, UpdateResult
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.memory_queues import Mailbox
from mediatord.store.recipient_names import MAX_NAMES, RecipientNames, page


@dataclass(eq=False, slots=True)
class Holder:
    """
    An account with its mailbox.

    :param recipients: the DIDs that it has registered, by digest.
    :param names: under how many spellings; :param places: how many it ever had.
    """

    account: Account
    mailbox: Mailbox
    recipients: dict[bytes, Recipient] = field(default_factory=dict)
    names: int = 0
    places: int = 0
    fresh: bool = True


@dataclass(eq=False, slots=True)
class Recipient:
    """
    A registered DID.

    :param did: in its canonical form.
    """

    did: str
    holder: Holder
    names: RecipientNames


class Accounts:
    """Accounts by DID and by recipient DID."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self._recipients: dict[bytes, Recipient] = {}
        self._by_text: dict[str, Recipient] = {}
        self._retired: set[str] = set()

    def holder(self, did: str) -> Holder | None:
        """Who has this account DID."""
        return self._holders.get(did)

    def recipient(self, recipient_did: str) -> Recipient | None:
        """A DID that somebody has registered, by any of its forms."""
        return self._by_text.get(recipient_did) or self._recipients.get(did_digest(recipient_did))

    def grant(self, did: str, now: float) -> Account:
        """:raise NotEnrolled: the DID was rotated away from."""
        if did in self._retired:
            raise NotEnrolled()
        holder = self._holders.get(did)
        if holder is None:
            holder = self._holders[did] = Holder(Account(did, now, seen_at=now), Mailbox(did))
        return holder.account

    def touch(self, did: str, now: float) -> None:
        holder = self._holders.get(did)
        if holder is not None:
            holder.account = replace(holder.account, seen_at=now)
            holder.fresh = holder.fresh and now - holder.account.created_at < FIRST_DAY

    def mark_used(self, did: str) -> None:
        """A message is accepted for it."""
        self._holders[did].fresh = False

    def expire(self, limit: int, unused_before: float | None, idle_before: float | None) -> list[ExpiredAccount]:
        expired: list[ExpiredAccount] = []
        for did, holder in self._holders.items():
            reason = _reason(holder, unused_before, idle_before)
            if reason is not None and len(expired) < limit:
                expired.append(ExpiredAccount(did, holder.names, reason))
        for one in expired:
            self.remove(one.did)
        return expired

    def remove(self, did: str) -> None:
        """Forget an account with all that it has registered."""
        holder = self._holders.pop(did)
        for digest, recipient in holder.recipients.items():
            del self._recipients[digest], self._by_text[recipient.did]

    def usage(self) -> AccountUsage:
        size = sum(len(did) for did in (*self._holders, *self._retired))
        names = [name for one in self._recipients.values() for _, name in one.names.spellings]
        return AccountUsage(len(self._holders), size + sum(map(len, names)))

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
        return page([one.names for one in holder.recipients.values()], offset, limit), holder.names

    def spellings(self, recipient_did: str) -> list[str]:
        recipient = self.recipient(recipient_did)
        return [] if recipient is None else [name for _, name in recipient.names.spellings]

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

    def _add(self, holder: Holder, name: str, max_recipients: int) -> UpdateResult:
        digest = did_digest(name)
        recipient = self._recipients.get(digest)
        if recipient is not None and recipient.holder is not holder:
            return "client_error"
        if recipient is not None and name in recipient.names:
            return "no_change"
        if holder.names >= max_recipients or (recipient is not None and len(recipient.names) >= MAX_NAMES):
            return "client_error"
        if recipient is None:
            did = canonical_did(name)
            recipient = Recipient(did, holder, RecipientNames(did, None))
            self._recipients[digest] = self._by_text[did] = holder.recipients[digest] = recipient
            holder.mailbox.registered.add(did)
        holder.names += 1
        holder.places += 1
        recipient.names.add(name, holder.places)
        return "success"

    def _remove(self, holder: Holder, name: str) -> UpdateResult:
        digest = did_digest(name)
        recipient = holder.recipients.get(digest)
        if recipient is None or name not in recipient.names:
            return "no_change"
        recipient.names.remove(name)
        holder.names -= 1
        if not recipient.names:
            del self._recipients[digest], self._by_text[recipient.did], holder.recipients[digest]
            holder.mailbox.registered.discard(recipient.did)
            holder.mailbox.tidy(recipient.did)
        return "success"


def _reason(holder: Holder, unused_before: float | None, idle_before: float | None) -> ExpiryReason | None:
    if holder.mailbox.lane.entries:
        return None
    if unused_before is not None and holder.fresh and holder.account.created_at <= unused_before:
        return "unused"
    return "idle" if idle_before is not None and holder.account.seen_at <= idle_before else None
