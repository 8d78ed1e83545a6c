"""Accounts as the store's own place has them: read and removed beside a daemon that may be running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mediatord.cli.queues import Waiting
from mediatord.config import Config
from mediatord.service import StartupError


@dataclass(frozen=True, slots=True)
class AccountRecord:
    """
    :param seen_at: last authenticated contact, to a day.
    :param used: whether a message was ever accepted for it, or there was contact after its first day.
    :param recipients: names of recipient DIDs that it has registered.
    :param messages: that wait for it, with their bytes.
    """

    did: str
    created_at: float
    seen_at: float
    used: bool
    recipients: int
    messages: int
    bytes: int


class AccountRecords(Waiting, Protocol):
    """Accounts of a store, and what waits for them."""

    def accounts(self, top: int) -> tuple[list[AccountRecord], int]:
        """The newest, and how many there are in all."""

    def account_dids(self) -> list[str]:
        """Those of all accounts."""

    def account(self, did: str) -> AccountRecord | None:
        """The one with this DID."""

    def names(self, did: str) -> list[str]:
        """What an account has registered, in order."""

    def queued_dids(self, did: str) -> list[str]:
        """Recipient DIDs of an account for which something waits, whether they are registered or not."""

    def unregister(self, did: str) -> None:
        """Remove all that an account has registered, so that nothing more comes for it."""

    def remove_account(self, did: str) -> bool:
        """Remove an account for which nothing waits; whether that was done."""


def account_records(config: Config) -> AccountRecords:
    """
    The accounts in the store of this configuration.

    :raise StartupError: nobody can look into it from outside.
    """
    storage = config.storage
    if storage.backend == "memory":
        raise StartupError("storage.backend: nobody but the daemon itself knows what is in its memory")
    if storage.backend == "sqlite":
        from mediatord.cli.account_records_sqlite import SQLiteAccountRecords

        return SQLiteAccountRecords(storage.sqlite.path)
    try:
        from mediatord.cli.account_records_mongodb import MongoAccountRecords
    except ImportError as error:
        if error.name is None or error.name.startswith("mediatord"):
            raise
        raise StartupError('storage.backend mongodb needs pip install "mediatord[mongodb]"') from None
    return MongoAccountRecords(storage.mongodb.uri)
