"""Listings and removals for the operator, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.administration import (
    AccountSummary,
    DIDPage,
    EntryPage,
    IStoreAdministration,
    LatePurgeListener,
    QueuedMessage,
    QueueInfo,
    QueueListTotals,
    QueueProtocol,
)
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.memory.accounts import AccountEntry, MemoryAccounts
from mediatord.store.memory.decentrl import MemoryDecentrlState
from mediatord.store.memory.messages import MemoryMessages, QueueEntry

T = TypeVar("T")


class AdministeredState(Protocol):
    """The part of the store's state that is listed and changed here."""

    messages: MemoryMessages
    accounts: MemoryAccounts
    decentrl: MemoryDecentrlState


class StateAccess(Protocol):
    """Calls a function with the state of the open store and returns its result as a Deferred."""

    def __call__(self, work: Callable[[AdministeredState], T], /) -> Deferred[T]: ...


@implementer(IStoreAdministration)
class MemoryStoreAdministration:
    """Cursors are offsets: a page may miss an entry when others were removed since the page before."""

    def __init__(self, answer: StateAccess) -> None:
        self._answer = answer
        self.on_late_purge: LatePurgeListener = lambda protocol, removed: None

    def list_queues(self, protocols: Sequence[QueueProtocol], offset: int, limit: int) -> Deferred[list[QueueInfo]]:
        return self._answer(
            lambda state: sorted(_list_queues(state, protocols), key=lambda one: (-one.messages, one.did))[
                offset : offset + limit
            ]
        )

    def sum_queues(self, protocols: Sequence[QueueProtocol]) -> Deferred[QueueListTotals]:
        def add_up(state: AdministeredState) -> QueueListTotals:
            found = _list_queues(state, protocols)
            return QueueListTotals(len(found), sum(one.messages for one in found), sum(one.bytes for one in found))

        return self._answer(add_up)

    def list_dids(self, after: str, limit: int) -> Deferred[DIDPage]:
        def page(state: AdministeredState) -> DIDPage:
            queued = [one.did for one in state.messages.queues()]
            return DIDPage(*_slice([*state.accounts.dids(), *queued, *state.decentrl.dids()], after, limit))

        return self._answer(page)

    def find_did(self, did: str) -> Deferred[str | None]:
        canonical, digest = canonicalize_did(did), compute_did_digest(did)

        def find(state: AdministeredState) -> str | None:
            parties = state.decentrl.dids()
            recipient = state.accounts.recipient(did)
            if did in parties:
                return did
            if recipient is not None:
                return recipient.did
            left_over = (one.did for one in state.messages.queues() if compute_did_digest(one.did) == digest)
            known = canonical if state.accounts.account_entry(canonical) or canonical in parties else None
            return next(left_over, known)

        return self._answer(find)

    def list_entries(self, did: str, protocol: QueueProtocol, after: str, limit: int) -> Deferred[EntryPage]:
        def page(state: AdministeredState) -> EntryPage:
            if protocol == "decentrl":
                events = next((events for owner, events in state.decentrl.pending.queues() if owner == did), [])
                found = [
                    QueuedMessage("decentrl", one.id, did, did, len(one.payload.encode()), one.received_at)
                    for one in events
                ]
            else:
                queues = state.messages.queues_of(canonicalize_did(did))
                entries = sorted(
                    (entry for queue in queues for entry in queue.entry_list.entries.values()),
                    key=lambda entry: entry.seq,
                )
                found = [_describe_entry(did, entry) for entry in entries]
            return EntryPage(*_slice(found, after, limit))

        return self._answer(page)

    def purge(self, did: str, protocol: QueueProtocol, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._answer(
            lambda state: (
                state.messages.purge(ids)
                if protocol == "didcomm"
                else state.decentrl.pending.acknowledge(did, ids, "removed")
            )
        )

    def list_accounts(self, offset: int, limit: int) -> Deferred[list[AccountSummary]]:
        return self._answer(
            lambda state: [_summarize(one) for one in state.accounts.newest()[offset : offset + limit]]
        )

    def count_accounts(self) -> Deferred[int]:
        return self._answer(lambda state: state.accounts.usage().accounts)

    def find_account(self, did: str) -> Deferred[AccountSummary | None]:
        def find(state: AdministeredState) -> AccountSummary | None:
            account_entry = state.accounts.account_entry(did)
            return None if account_entry is None else _summarize(account_entry)

        return self._answer(find)

    def list_queued_dids(self, account: str) -> Deferred[list[str]]:
        def find(state: AdministeredState) -> list[str]:
            account_entry = state.accounts.account_entry(account)
            return [] if account_entry is None else list(account_entry.mailbox.queues)

        return self._answer(find)

    def unregister_recipients(self, account: str) -> Deferred[None]:
        return self._answer(lambda state: state.accounts.unregister(account))

    def remove_account(self, account: str) -> Deferred[bool]:
        def remove(state: AdministeredState) -> bool:
            account_entry = state.accounts.account_entry(account)
            if account_entry is None or account_entry.mailbox.entry_list.entries:
                return False
            state.accounts.remove(account)
            return True

        return self._answer(remove)


def _list_queues(state: AdministeredState, protocols: Sequence[QueueProtocol]) -> list[QueueInfo]:
    found: list[QueueInfo] = []
    if "didcomm" in protocols:
        for queue in state.messages.queues():
            entries = queue.entry_list.entries
            oldest = next(iter(entries.values())).received_at
            account = queue.mailbox.did
            found.append(QueueInfo("didcomm", queue.did, account, len(entries), queue.entry_list.size, oldest))
    if "decentrl" in protocols:
        for did, events in state.decentrl.pending.queues():
            size, oldest_at = state.decentrl.pending.queue(did)
            found.append(QueueInfo("decentrl", did, did, len(events), size, oldest_at))
    return found


def _describe_entry(did: str, entry: QueueEntry) -> QueuedMessage:
    return QueuedMessage(
        half="didcomm",
        id=entry.payload.id,
        did=did,
        account=entry.queue.mailbox.did,
        size=entry.size,
        received_at=entry.received_at,
        expires_at=entry.expires_at,
        status="pending" if entry.node is None else "delivered",
        pushes=entry.pushes,
        due_at=entry.due_at,
    )


def _summarize(account_entry: AccountEntry) -> AccountSummary:
    account, entry_list = account_entry.account, account_entry.mailbox.entry_list
    return AccountSummary(
        account.did,
        account.created_at,
        account.seen_at,
        not account_entry.fresh,
        account_entry.names,
        len(entry_list.entries),
        entry_list.size,
    )


def _slice(items: list[T], after: str, limit: int) -> tuple[list[T], str | None]:
    start = int(after or 0)
    page = items[start : start + limit]
    return page, str(start + limit) if len(page) == limit else None
