"""Whether wallets and senders should be sent to this process."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.interfaces import ClockDiffers

_log = Logger()

NOT_JOINED = "cluster: not joined"


class Standing:
    """
    What is in the way, beside the store.

    :param patience: seconds for which a node of a cluster may be none after it was one: as long as others take it for
        one. None for a process that is no node.
    """

    def __init__(self, clock: IReactorTime, patience: float | None = None) -> None:
        self._clock = clock
        self._patience = patience
        self._joined = patience is None
        self._parted_at = float("-inf")
        self._clock_differs = ""

    @property
    def trouble(self) -> str:
        """In a few words; empty when there is none."""
        if self._clock_differs:
            return self._clock_differs
        if self._joined or self._patience is None:
            return ""
        # Who parted in the future has had the clock set back since.
        return "" if 0.0 <= self._clock.seconds() - self._parted_at <= self._patience else NOT_JOINED

    @property
    def is_member(self) -> bool:
        """Whether it is a node, or the only one."""
        return self._joined

    def joined(self) -> None:
        """It is a node, or the only one."""
        self._joined = True
        self.clock_agrees()

    def clock_agrees(self) -> None:
        """Whatever else may keep it from being one."""
        if self._clock_differs:
            _log.info("the clock of this host agrees with the MongoDB server's again")
        self._clock_differs = ""

    def parted(self) -> None:
        """It is none for the time being."""
        if self._joined:
            self._joined, self._parted_at = False, self._clock.seconds()

    def clock_differs(self, refused: ClockDiffers) -> None:
        """Nor can it be one; said once, until they agree."""
        if not self._clock_differs:
            _log.warn(f"{refused}: nothing is accepted here, expired or pushed live until they agree")
        self._clock_differs = str(refused)
