"""Removing accounts that nobody uses, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.interfaces import IReactorTime

from mediatord.interfaces import FIRST_DAY, IStore
from mediatord.journal import Journal

# Accounts that go in one step.
AT_A_TIME = 64


class AccountExpiry:
    """
    Removes accounts for which no message was ever accepted and that were not in contact after their first day, and,
    if that is wanted, those without contact for long. One for which something waits stays.

    :param live: the DIDs of accounts with an open socket at this process, which are in contact.
    :param unused: seconds after which an account goes that was never used; 0 for never.
    :param idle: seconds without contact after which an account goes; 0 for never.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        live: Callable[[], Iterable[str]],
        journal: Journal,
        *,
        unused: float,
        idle: float,
    ) -> None:
        self._clock = clock
        self._store = store
        self._live = live
        self._journal = journal
        self._unused = unused
        self._idle = idle

    async def touch_live(self) -> None:
        """An open socket is contact, although nothing may be said on it for days."""
        if not self._unused and not self._idle:
            return
        for did in list(self._live()):
            account = await self._store.account(did)
            if account is not None and not 0 <= self._clock.seconds() - account.seen_at < FIRST_DAY:
                await self._store.touch(did)

    async def expire(self) -> bool:
        """Remove a few; whether there may be more."""
        now = self._clock.seconds()
        unused, idle = (now - ttl if ttl else None for ttl in (self._unused, self._idle))
        if unused is None and idle is None:
            return False
        expired = await self._store.expire_accounts(AT_A_TIME, unused_before=unused, idle_before=idle)
        for one in expired:
            self._journal.account_expired(one)
        return bool(expired)
