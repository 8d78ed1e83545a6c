"""Accounts of DIDComm wallets, and the recipient DIDs they have registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Interface

RecipientUpdateAction = Literal["add", "remove"]
# Seconds from its first day's begin after which contact shows that an account is used.
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
    An account that was removed because nobody used it.

    :param recipients: names of recipient DIDs that it had registered.
    """

    did: str
    recipients: int
    reason: ExpiryReason


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """
    What all accounts and registrations take.

    :param accounts: of DIDComm.
    :param bytes: of account DIDs, also those that were rotated away from, their long forms, recipient DIDs and the
        text of Decentrl registrations, about; with MongoDB of the documents.
    """

    accounts: int
    bytes: int


class IAccountStore(Interface):
    """
    Accounts and the recipient DIDs they have registered.

    A recipient DID has one owner, whichever of its forms or DID URLs it is named by
    (:mod:`mediatord.protocol.canonical_did`). What is named `recipient_did` here may be any of them; in the canonical
    form it is found fastest. DIDs of accounts are compared as they are: callers have them in the canonical form.
    """

    def get_account(did: str) -> Deferred[Account | None]:
        """The account of this DID, if it has a grant."""

    def grant(did: str) -> Deferred[Account]:
        """
        The account of this DID, made if there is none.

        :raise MediationNotGranted: the DID was rotated away from (`move`).
        """

    def record_contact(did: str) -> Deferred[None]:
        """Record authenticated contact of this account now. Once a day is enough."""

    def expire_accounts(
        limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        """
        Remove accounts with all that they have registered, at most so many; never one for which something waits.

        :param unused_before: those made before that, for which no message was ever accepted, and that were not
            touched after their first day; None for none.
        :param idle_before: those last touched before that; None for none.
        """

    def get_account_usage() -> Deferred[AccountUsage]:
        """What all accounts take together. Cheap: asked for every few seconds."""

    def mark_draft03(did: str) -> Deferred[None]:
        """Remember that this account reads and writes ECDH-1PU draft 03 only."""

    def find_owner(recipient_did: str) -> Deferred[str | None]:
        """The DID of the account that has registered this recipient DID. Cheap: asked for every forward."""

    def list_registered_names(recipient_did: str) -> Deferred[list[str]]:
        """Under which spellings its owner has registered it, in order of registration; empty if nobody has."""

    def get_buffered() -> tuple[int, int]:
        """How many operations wait in memory, and how many bytes they hold on to."""

    def update_recipients(
        account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        """
        Apply updates in order, one result each (reference 5.3): `success`; `no_change` for what already is so
        and for the removal of what is not ours; `client_error` for a DID of another account or one too many.
        An account may register several spellings of one DID, which is registered until the last of them is removed.
        On `remove` what is queued stays for this account until acknowledged or expired.
        """

    def list_recipients(account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        """
        A slice of what the account has registered, in the order and the spellings of that, and how many there are in
        all.
        """

    def move_account(prior: str, new: str) -> Deferred[bool]:
        """
        `from_prior` (reference 2.3): the account of `prior`, with all it has, becomes that of `new`, and `prior`
        is refused for good. Fires with False, changing nothing, when `prior` has no account or `new` has one.
        """

    def is_retired(did: str) -> Deferred[bool]:
        """Whether an account was moved away from this DID (`move`)."""

    def remember_did(short: str, long: str) -> Deferred[None]:
        """Keep the long form of a did:peer:4, so that its short form resolves from now on."""

    def recall_did(short: str) -> Deferred[str | None]:
        """The long form of a did:peer:4, if it was ever seen."""
