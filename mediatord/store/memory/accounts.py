"""Accounts and recipient DIDs of the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mediatord.errors import MediationNotGranted
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.store import (
    FIRST_DAY_SECONDS,
    Account,
    AccountUsage,
    ExpiredAccount,
    ExpiryReason,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.memory.messages import AccountMailbox
from mediatord.store.recipient_names import MAX_RECIPIENT_NAMES, RecipientNames, slice_names


@dataclass(eq=False, slots=True)
class AccountEntry:
    """
    An account with its mailbox.

    :param recipients: the DIDs that it has registered, by digest.
    :param names: number of registered names.
    :param places: last place given in the order of registration.
    """

    account: Account
    mailbox: AccountMailbox
    recipients: dict[bytes, RecipientEntry] = field(default_factory=dict)
    names: int = 0
    places: int = 0
    fresh: bool = True


@dataclass(eq=False, slots=True)
class RecipientEntry:
    """
    A registered DID.

    :param did: in its canonical form.
    """

    did: str
    account_entry: AccountEntry
    names: RecipientNames


class MemoryAccounts:
    """Accounts by DID and by recipient DID."""

    def __init__(self) -> None:
        self._accounts_by_did: dict[str, AccountEntry] = {}
        self._recipients: dict[bytes, RecipientEntry] = {}
        self._by_text: dict[str, RecipientEntry] = {}
        self._retired: set[str] = set()

    def account_entry(self, did: str) -> AccountEntry | None:
        """The account with this DID."""
        return self._accounts_by_did.get(did)

    def recipient(self, recipient_did: str) -> RecipientEntry | None:
        """A registered DID, by any of its forms."""
        return self._by_text.get(recipient_did) or self._recipients.get(compute_did_digest(recipient_did))

    def grant(self, did: str, now: float) -> Account:
        """
        The account of a DID, created if there is none.

        :raise MediationNotGranted: the DID is retired.
        """
        if did in self._retired:
            raise MediationNotGranted()
        account_entry = self._accounts_by_did.get(did)
        if account_entry is None:
            account_entry = self._accounts_by_did[did] = AccountEntry(
                Account(did, now, seen_at=now), AccountMailbox(did)
            )
        return account_entry.account

    def touch(self, did: str, now: float) -> None:
        account_entry = self._accounts_by_did.get(did)
        if account_entry is not None:
            account_entry.account = replace(account_entry.account, seen_at=now)
            account_entry.fresh = account_entry.fresh and now - account_entry.account.created_at < FIRST_DAY_SECONDS

    def mark_used(self, did: str) -> None:
        """Record that a message was accepted for an account."""
        self._accounts_by_did[did].fresh = False

    def expire(self, limit: int, unused_before: float | None, idle_before: float | None) -> list[ExpiredAccount]:
        expired: list[ExpiredAccount] = []
        for did, account_entry in self._accounts_by_did.items():
            reason = _get_expiry_reason(account_entry, unused_before, idle_before)
            if reason is not None and len(expired) < limit:
                expired.append(ExpiredAccount(did, account_entry.names, reason))
        for one in expired:
            self.remove(one.did)
        return expired

    def newest(self) -> list[AccountEntry]:
        """All accounts, newest first."""
        found = reversed(self._accounts_by_did.values())
        return sorted(found, key=lambda one: one.account.created_at, reverse=True)

    def dids(self) -> list[str]:
        """DIDs of accounts, and registered ones."""
        return [*self._accounts_by_did, *self._by_text]

    def unregister(self, did: str) -> None:
        """Remove all registrations of an account; queued messages stay."""
        account_entry = self._accounts_by_did.get(did)
        for recipient in list(account_entry.recipients.values()) if account_entry else []:
            for _, name in list(recipient.names.spellings):
                self._remove(recipient.account_entry, name)

    def remove(self, did: str) -> None:
        """Remove an account and its registrations."""
        account_entry = self._accounts_by_did.pop(did)
        for digest, recipient in account_entry.recipients.items():
            del self._recipients[digest], self._by_text[recipient.did]

    def usage(self) -> AccountUsage:
        size = sum(len(did) for did in (*self._accounts_by_did, *self._retired))
        names = [name for one in self._recipients.values() for _, name in one.names.spellings]
        return AccountUsage(len(self._accounts_by_did), size + sum(map(len, names)))

    def mark_draft03(self, did: str) -> None:
        account_entry = self._accounts_by_did.get(did)
        if account_entry is not None:
            account_entry.account = replace(account_entry.account, draft03=True)

    def update(
        self, did: str, updates: Sequence[tuple[str, RecipientUpdateAction]], max_recipients: int
    ) -> list[RecipientUpdateResult]:
        """
        Apply updates in order, with one result each.

        :raise MediationNotGranted: there is no such account.
        """
        account_entry = self._accounts_by_did.get(did)
        if account_entry is None:
            raise MediationNotGranted()
        return [
            self._add(account_entry, recipient_did, max_recipients)
            if action == "add"
            else self._remove(account_entry, recipient_did)
            for recipient_did, action in updates
        ]

    def recipients(self, did: str, offset: int, limit: int) -> tuple[list[str], int]:
        account_entry = self._accounts_by_did.get(did)
        if account_entry is None:
            return [], 0
        return slice_names(
            [one.names for one in account_entry.recipients.values()], offset, limit
        ), account_entry.names

    def spellings(self, recipient_did: str) -> list[str]:
        recipient = self.recipient(recipient_did)
        return [] if recipient is None else [name for _, name in recipient.names.spellings]

    def move(self, prior: str, new: str) -> bool:
        if prior not in self._accounts_by_did or new in self._accounts_by_did or new in self._retired:
            return False
        account_entry = self._accounts_by_did[new] = self._accounts_by_did.pop(prior)
        account_entry.account = replace(account_entry.account, did=new)
        account_entry.mailbox.did = new
        self._retired.add(prior)
        return True

    def is_retired(self, did: str) -> bool:
        """Whether an account was moved away from this DID."""
        return did in self._retired

    def _add(self, account_entry: AccountEntry, name: str, max_recipients: int) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        recipient = self._recipients.get(digest)
        if recipient is not None and recipient.account_entry is not account_entry:
            return "client_error"
        if recipient is not None and name in recipient.names:
            return "no_change"
        if account_entry.names >= max_recipients or (
            recipient is not None and len(recipient.names) >= MAX_RECIPIENT_NAMES
        ):
            return "client_error"
        if recipient is None:
            did = canonicalize_did(name)
            recipient = RecipientEntry(did, account_entry, RecipientNames(did, None))
            self._recipients[digest] = self._by_text[did] = account_entry.recipients[digest] = recipient
            account_entry.mailbox.registered.add(did)
        account_entry.names += 1
        account_entry.places += 1
        recipient.names.add(name, account_entry.places)
        return "success"

    def _remove(self, account_entry: AccountEntry, name: str) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        recipient = account_entry.recipients.get(digest)
        if recipient is None or name not in recipient.names:
            return "no_change"
        recipient.names.remove(name)
        account_entry.names -= 1
        if not recipient.names:
            del self._recipients[digest], self._by_text[recipient.did], account_entry.recipients[digest]
            account_entry.mailbox.registered.discard(recipient.did)
            account_entry.mailbox.tidy(recipient.did)
        return "success"


def _get_expiry_reason(
    account_entry: AccountEntry, unused_before: float | None, idle_before: float | None
) -> ExpiryReason | None:
    if account_entry.mailbox.entry_list.entries:
        return None
    if unused_before is not None and account_entry.fresh and account_entry.account.created_at <= unused_before:
        return "unused"
    return "idle" if idle_before is not None and account_entry.account.seen_at <= idle_before else None
