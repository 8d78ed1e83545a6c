"""That everything the subject accepted is kept by it, found out in the way that is open to us."""

from __future__ import annotations

from mediatord.bench.drive import Load
from mediatord.bench.figures import Figures
from mediatord.bench.subject import Residents, Subject

_LIMIT = 50


class Keeping:
    """
    Compares what the mediator accepted with what it has: with the rows in the database of a daemon of ours, and with
    what the wallets can fetch from any other, whose queues are emptied by that after each run.

    :ivar failures: sentences, one for each run in which something was missing or refused.
    """

    def __init__(self, subject: Subject, residents: Residents) -> None:
        self._subject = subject
        self._residents = residents
        self._before = subject.stored or 0
        self._accepted = self._kept = 0
        self.failures: list[str] = []

    @property
    def note(self) -> str:
        """A sentence about all runs."""
        return f"{self._accepted} forwards were accepted and {self._kept} messages were kept."

    def check(self, load: Load) -> Figures:
        """Take note of one run; its figures."""
        self._accepted += load.accepted
        stored = self._subject.stored
        if stored is None:
            self._kept += self._residents.do("drain", connections=2, limit=_LIMIT)["messages"]
        else:
            self._kept = stored - self._before
        if load.accepted != sum(load.statuses.values()):
            self.failures.append(f"forwards were refused: {load.statuses}")
        if self._kept != self._accepted:
            self.failures.append(f"{self._accepted} forwards were accepted, {self._kept} messages are kept")
        return load.figures()
