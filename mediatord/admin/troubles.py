"""What went wrong lately: requests that were refused or failed, and warnings of our own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from twisted.internet.interfaces import IReactorTime
from twisted.logger import ILogObserver, LogEvent, LogLevel, formatEvent
from zope.interface import implementer

Source = Literal["request", "output"]

# Kinds of trouble that are kept of each source, those that occurred last.
MOST = 50
# Characters of a line.
_LONGEST = 300
_OURS = "mediatord"
_GRAVE = (LogLevel.warn, LogLevel.error, LogLevel.critical)


@dataclass(frozen=True, slots=True)
class Trouble:
    """
    Something that has occurred, perhaps often.

    :param kind: name of the situation in words, or the level of a line.
    :param where: `didcomm` or `decentrl`, or the part of the daemon that wrote the line.
    :param text: what the peer was told, as a code; or the line, when it was last written.
    :param count: how often, since `first`.
    """

    source: Source
    kind: str
    where: str
    text: str
    count: int
    first: float
    last: float


@implementer(ILogObserver)
class Troubles:
    """Keeps a few of each source, and of each what is needed to tell of it; nothing that a peer has written."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._kept: dict[Source, OrderedDict[tuple[str, ...], Trouble]] = {
            "request": OrderedDict(),
            "output": OrderedDict(),
        }

    def refused(self, protocol: str, situation: str, code: str) -> None:
        """A request was refused, or failed; signature of :attr:`mediatord.journal.Journal.on_refusal`."""
        self._note((protocol, situation, code), "request", situation, protocol, code)

    def __call__(self, event: LogEvent) -> None:
        """A line was logged. Of what others than mediatord write, it is said that it is there."""
        level = event.get("log_level")
        if level not in _GRAVE:
            return
        namespace = str(event.get("log_namespace", ""))
        # The workers' own lines, which are their own troubles.
        if "worker" in event and event.get("log_format") == "{worker}: {text}":
            return
        if namespace.partition(".")[0] != _OURS or event.get("log_format") is None:
            self._note((level.name, namespace), "output", level.name, namespace, "see the standard output")
            return
        text = formatEvent(event)[:_LONGEST]
        where = namespace.partition(".")[2] or namespace
        self._note((level.name, namespace, str(event["log_format"])), "output", level.name, where, text)

    def told(self) -> list[dict[str, Any]]:
        """All of it as plain values, for :func:`merged`."""
        return [asdict(one) for kept in self._kept.values() for one in kept.values()]

    def _note(self, key: tuple[str, ...], source: Source, kind: str, where: str, text: str) -> None:
        now, kept = self._clock.seconds(), self._kept[source]
        before = kept.pop(key, None)
        first, count = (now, 0) if before is None else (before.first, before.count)
        kept[key] = Trouble(source, kind, where, text, count + 1, first, now)
        if len(kept) > MOST:
            kept.popitem(last=False)


def merged(processes: Iterable[Iterable[Mapping[str, Any]]], source: Source) -> list[Trouble]:
    """
    What several processes tell, the latest first; requests that were refused for the same reason as one.

    :param processes: what :meth:`Troubles.told` gave in each.
    """
    found: dict[tuple[str, str, str], Trouble] = {}
    for told in processes:
        for values in told:
            one = Trouble(**values)
            if one.source == source:
                key = one.kind, one.where, one.text
                found[key] = _together(found[key], one) if key in found else one
    return sorted(found.values(), key=lambda one: one.last, reverse=True)[:MOST]


def _together(one: Trouble, other: Trouble) -> Trouble:
    return replace(
        one,
        count=one.count + other.count,
        first=min(one.first, other.first),
        last=max(one.last, other.last),
    )
