"""What is told of queues and of what waits in them; never a payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from mediatord.interfaces import Removed

if TYPE_CHECKING:
    from mediatord.cli.queues.course import Course

Half = Literal["didcomm", "decentrl"]
HALVES: tuple[Half, ...] = ("didcomm", "decentrl")


@dataclass(frozen=True, slots=True)
class Queue:
    """
    What waits for a recipient.

    :param account: that the recipient belongs to; itself in the Decentrl half.
    :param oldest_at: when the first of it arrived, seconds; None if it has gone meanwhile.
    """

    half: Half
    did: str
    account: str
    messages: int
    bytes: int
    oldest_at: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """All queues: how many they are, and what is in them."""

    queues: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One message or pending event.

    :param expires_at: None when it waits until it is acknowledged.
    :param due_at: before this time nobody sees it; None when it was not delayed, or is due.
    :param pushes: how often it was handed over; 0 of an event, of which nobody counts that.
    """

    half: Half
    id: str
    did: str
    account: str
    size: int
    received_at: float
    expires_at: float | None = None
    status: str = "pending"
    pushes: int = 0
    due_at: float | None = None

    def removed(self) -> Removed:
        """As what has left its queue."""
        return Removed(self.id, self.did, self.account, self.size, self.received_at, self.pushes)


@dataclass(frozen=True, slots=True)
class Scope:
    """
    Which of the messages for a recipient.

    :param half: only of this one.
    :param before: only what arrived before this time, seconds.
    :param ids: only these; empty for any.
    """

    did: str
    half: Half | None = None
    before: float | None = None
    ids: tuple[str, ...] = ()

    @property
    def halves(self) -> tuple[Half, ...]:
        return HALVES if self.half is None else (self.half,)

    def has(self, entry: Entry) -> bool:
        """Whether a message for the recipient is meant."""
        return (self.before is None or entry.received_at < self.before) and (not self.ids or entry.id in self.ids)


class Waiting(Protocol):
    """A place where messages wait. All of it fails with StartupError when the place cannot be used."""

    def queues(self, halves: Sequence[Half], top: int) -> tuple[list[Queue], Totals]:
        """The `top` longest queues, longest first, and all of them added up."""

    def recipients(self) -> list[str]:
        """The DIDs that something waits for, some of them twice."""

    def registered(self) -> list[str]:
        """All DIDs that something can wait for, some of them twice."""

    def kept(self, did: str) -> str | None:
        """The one of those that this is a form of, or a DID URL of, as it is kept."""

    def entries(self, scope: Scope) -> list[Entry]:
        """What waits for a recipient, each half in order of arrival."""

    def missing(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that are not there any more."""

    def remove(self, entries: Sequence[Entry], course: Course) -> None:
        """
        Take these out, some at a time, as the daemon would: durably, and counted off.

        :param course: told each time which of them are next, and then which of those were still there.
        """
