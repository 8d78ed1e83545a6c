"""Accounts of DIDComm wallets, and the recipient DIDs they have registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Interface

RecipientUpdateAction = Literal["add", "remove"]
# Seconds after its creation during which contact does not show that an account is used.
FIRST_DAY_SECONDS = 86_400.0

ExpiryReason = Literal["unused", "idle"]
RecipientUpdateResult = Literal["success", "no_change", "client_error", "server_error"]


@dataclass(frozen=True, slots=True)
class Account:
    """
    A wallet with a mediation grant (reference section 12).

    :param did: its DID; a did:peer:4 stands in its short form.
    :param draft03: whether it has been seen to use ECDH-1PU draft 03 and cannot read the later one (1.10).
    :param seen_at: last authenticated contact, as far as that was recorded (:meth:`IAccountStore.record_contact`).
    """

    did: str
    created_at: float
    draft03: bool = False
    seen_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ExpiredAccount:
    """
    An account that was removed because it was not used.

    :param recipients: number of recipient names that it had registered.
    """

    did: str
    recipients: int
    reason: ExpiryReason


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """
    Storage that all accounts and registrations take.

    :param accounts: number of DIDComm accounts.
    :param bytes: approximate size of account DIDs, including retired ones, their long forms, recipient DIDs and the
        text of Decentrl registrations; with MongoDB the size of the documents.
    """

    accounts: int
    bytes: int


class IAccountStore(Interface):
    """
    Accounts and the recipient DIDs that they have registered.

    A recipient DID has one owner, whichever of its forms or DID URLs names it
    (:mod:`mediatord.protocol.canonical_did`). A `recipient_did` may be any of them; the canonical form is found
    fastest. DIDs of accounts are compared literally: callers pass the canonical form.
    """

    def get_account(did: str) -> Deferred[Account | None]:
        """The account of this DID, if it has a grant."""

    def grant(did: str) -> Deferred[Account]:
        """
        The account of this DID, created if there is none.

        :raise MediationNotGranted: the DID is retired (:meth:`move_account`).
        """

    def record_contact(did: str) -> Deferred[None]:
        """Record authenticated contact of this account now. Once a day is enough."""

    def expire_accounts(
        limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        """
        Remove at most `limit` accounts with all that they have registered; never one with queued messages.

        :param unused_before: remove those created before this time for which no message was ever accepted, and
            without contact after their first day; None for none.
        :param idle_before: remove those with the last contact before this time; None for none.
        """

    def get_account_usage() -> Deferred[AccountUsage]:
        """Storage that all accounts take. Cheap: called every few seconds."""

    def mark_draft03(did: str) -> Deferred[None]:
        """Record that this account reads and writes ECDH-1PU draft 03 only."""

    def find_owner(recipient_did: str) -> Deferred[str | None]:
        """DID of the account that has registered this recipient DID. Cheap: called for every forward."""

    def list_registered_names(recipient_did: str) -> Deferred[list[str]]:
        """
        Names under which the owner has registered this DID, in order of registration; empty if there is no owner.
        """

    def get_buffered() -> tuple[int, int]:
        """Number of operations that are queued in memory, and the bytes that they hold."""

    def update_recipients(
        account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        """
        Apply updates in order, with one result each (reference 5.3): `success`; `no_change` for what is already so,
        and for the removal of a DID that the account has not registered; `client_error` for a DID of another account,
        or one too many.

        An account may register several names of one DID, which is registered until the last of them is removed. After
        a removal queued messages stay for this account until they are acknowledged or expire.
        """

    def list_recipients(account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        """A slice of the names that the account has registered, in order of registration, and the number of all."""

    def move_account(prior: str, new: str) -> Deferred[bool]:
        """
        Move the account of `prior`, with all it has, to `new`, after which `prior` is retired (`from_prior`,
        reference 2.3). Fires with False, and changes nothing, when `prior` has no account or `new` has one.
        """

    def is_retired(did: str) -> Deferred[bool]:
        """Whether an account was moved away from this DID (:meth:`move_account`)."""

    def remember_did(short: str, long: str) -> Deferred[None]:
        """Store the long form of a did:peer:4, so that its short form resolves from now on."""

    def recall_did(short: str) -> Deferred[str | None]:
        """The stored long form of a did:peer:4, if there is one."""
