"""Items in order, found by what they are labelled with, in memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from math import inf
from typing import Generic, Protocol, TypeVar

from mediatord.errors import StoreUnavailable
from mediatord.interfaces.decentrl import Found, Slice

Label = tuple[str, str]
Labels = frozenset[Label]
Place = tuple[float, int]

_ANY: Label = ("any", "")


class Identified(Protocol):
    """What has an id."""

    @property
    def id(self) -> str:
        """Unique among its kind."""


Item = TypeVar("Item", bound=Identified)


@dataclass(frozen=True, slots=True)
class Search:
    """
    What is looked for.

    :param labels: of each of these collections an item has to have at least one.
    :param after: inclusive, like `before`.
    """

    labels: tuple[Collection[Label], ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False


@dataclass(eq=False, slots=True)
class _Entry(Generic[Item]):
    item: Item
    labels: Labels


class Timeline(Generic[Item]):
    """
    Items by time, then in order of arrival.

    Each label has a sorted list of places of its own, so that a page of what has one label costs no more than finding
    its beginning. What has to have several labels is looked for among those that have the rarest of them.

    :param arrivals: what numbers items in order of arrival; its own if it shares none.
    """

    def __init__(self, arrivals: Iterator[int] | None = None) -> None:
        self._arrivals = count() if arrivals is None else arrivals
        self._entries: dict[Place, _Entry[Item]] = {}
        self._places: dict[Label, list[Place]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: Place) -> Item:
        return self._entries[place].item

    def add(self, item: Item, labels: Iterable[Label], at: float) -> Place:
        """Put it where it belongs, and say where that is."""
        place = (at, next(self._arrivals))
        self._entries[place] = _Entry(item, frozenset(labels))
        for label in (_ANY, *self._entries[place].labels):
            insort(self._places.setdefault(label, []), place)
        return place

    def replace(self, place: Place, item: Item, labels: Iterable[Label]) -> None:
        """Another item with other labels in the same place."""
        entry = self._entries[place]
        before, entry.item, entry.labels = entry.labels, item, frozenset(labels)
        self._unlabel(place, before - entry.labels)
        for label in entry.labels - before:
            insort(self._places.setdefault(label, []), place)

    def remove(self, place: Place) -> Item:
        entry = self._entries.pop(place)
        self._unlabel(place, (_ANY, *entry.labels))
        return entry.item

    def count(self, label: Label) -> int:
        """How many have this label."""
        return len(self._places.get(label, ()))

    def find(self, search: Search, part: Slice) -> Found[Item]:
        """A slice of what matches."""
        places, first, end = self._matching(search)
        total = end - first
        if search.newest_first:
            end = max(first, end - part.offset)
            found = places[max(first, end - part.limit) : end][::-1]
        else:
            first = min(end, first + part.offset)
            found = places[first : min(end, first + part.limit)]
        return Found(tuple(self._entries[place].item for place in found), total)

    def _matching(self, search: Search) -> tuple[Sequence[Place], int, int]:
        """A sorted list, and which part of it matches."""
        groups = sorted((frozenset(group) for group in search.labels or ([_ANY],)), key=self._rarity)
        windows = [self._window(label, search) for label in groups[0]]
        if len(groups) == 1 and len(windows) == 1:
            return windows[0]
        matching: Iterable[Place] = chain.from_iterable(places[first:end] for places, first, end in windows)
        for group in groups[1:]:
            matching = [place for place in matching if not group.isdisjoint(self._entries[place].labels)]
        found = sorted(set(matching))
        return found, 0, len(found)

    def _rarity(self, group: Labels) -> int:
        return sum(self.count(label) for label in group)

    def _window(self, label: Label, search: Search) -> tuple[Sequence[Place], int, int]:
        """The places of a label, and which of them are between the bounds."""
        places = self._places.get(label, [])
        first = 0 if search.after is None else bisect_left(places, (search.after, -1))
        end = len(places) if search.before is None else bisect_left(places, (search.before, inf))
        return places, first, max(first, end)

    def _unlabel(self, place: Place, labels: Iterable[Label]) -> None:
        for label in labels:
            places = self._places[label]
            del places[bisect_left(places, place)]
            if not places:
                del self._places[label]


@dataclass(eq=False, slots=True)
class Shelves(Generic[Item]):
    """Items of one kind: each owner's in a timeline of its own, and all of them by id."""

    _arrivals: Iterator[int] = field(default_factory=count)
    _timelines: dict[str, Timeline[Item]] = field(default_factory=dict)
    _places: dict[str, tuple[str, Place]] = field(default_factory=dict)

    def of(self, owner: str) -> Timeline[Item]:
        """The timeline of an owner, to be looked at; an empty one if it has nothing."""
        return self._timelines.get(owner) or Timeline(self._arrivals)

    def check_ids(self, items: Sequence[Item]) -> None:
        """:raise StoreUnavailable: an id is there already, or twice."""
        ids = {item.id for item in items}
        if len(ids) < len(items) or not self._places.keys().isdisjoint(ids):
            raise StoreUnavailable()

    def add(self, owner: str, item: Item, labels: Iterable[Label], at: float = 0.0) -> None:
        """:param at: time to order by; without one items are in order of arrival."""
        timeline = self._timelines.setdefault(owner, Timeline(self._arrivals))
        self._places[item.id] = owner, timeline.add(item, labels, at)

    def get(self, owner: str, id: str) -> Item | None:
        """What an owner has with this id."""
        holder, place = self._places.get(id, (None, None))
        return None if place is None or holder != owner else self._timelines[owner][place]

    def first(self) -> Item | None:
        """What arrived first of all that is there."""
        owner, place = next(iter(self._places.values()), (None, None))
        return None if owner is None or place is None else self._timelines[owner][place]

    def newest(self) -> Iterator[Item]:
        """All that is there, what arrived last first."""
        return (self._timelines[owner][place] for owner, place in reversed(self._places.values()))

    def find_all(self, ids: Iterable[str]) -> list[Item]:
        """What is there with these ids, whoever owns it, in order of arrival."""
        known = [self._places[id] for id in dict.fromkeys(ids) if id in self._places]
        return [self._timelines[owner][place] for owner, place in sorted(known, key=lambda one: one[1][1])]

    def replace(self, owner: str, item: Item, labels: Iterable[Label]) -> None:
        """Put another item in the place of the one that has its id."""
        _, place = self._places[item.id]
        self._timelines[owner].replace(place, item, labels)

    def remove(self, owner: str, ids: Iterable[str]) -> list[Item]:
        """Remove what an owner has with these ids, and say in its order what that was."""
        mine = sorted(self._places[id][1] for id in set(ids) if self.get(owner, id) is not None)
        removed = [self._timelines[owner].remove(place) for place in mine]
        for item in removed:
            del self._places[item.id]
        if removed and not self._timelines[owner]:
            del self._timelines[owner]
        return removed
