"""That everything which was accepted is stored, and nothing was refused."""

from __future__ import annotations

from collections.abc import Callable

from mediatord.bench.drive import Load, Server
from mediatord.bench.figures import Figures


class Accounting:
    """
    Compares what a server accepted in all runs with the rows in its database.

    :param count: how many rows there are now.
    :param failures: the list that they are added to, if there is one already.
    :ivar accepted: in all runs together.
    :ivar stored: rows after the last run.
    :ivar failures: sentences, one for each run in which something was missing or refused.
    """

    def __init__(self, server: Server, count: Callable[[], int], failures: list[str] | None = None) -> None:
        self.server = server
        self.accepted = 0
        self.stored = 0
        self.failures: list[str] = [] if failures is None else failures
        self._count = count

    def check(self, load: Load, *, payloads: int = 1) -> Figures:
        """
        Take note of one run; its figures.

        :param payloads: rows that each request makes.
        """
        self.accepted += load.accepted * payloads
        self.stored = self._count()
        if not set(load.statuses) <= set(self.server.success.split()):
            self.failures.append(f"other answers than {self.server.success}: {load.statuses}")
        if self.stored != self.accepted:
            self.failures.append(f"{self.accepted} messages were accepted, {self.stored} are stored")
        return load.figures()
