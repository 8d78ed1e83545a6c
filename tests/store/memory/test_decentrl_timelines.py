"""How much work it is to find something in memory."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.decentrl import PageRequest, StoredEvent
from mediatord.store.memory.decentrl import Timeline, TimelineSearch
from tests.store.contract.decentrl_base import an_event

MANY = 10_000


class Watched(float):
    """A time that notes how often any of its kind is compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Watched.comparisons += 1
        return float(self) < other

    def __eq__(self, other: object) -> bool:
        Watched.comparisons += 1
        return float(self) == other

    __hash__ = float.__hash__


class TimelineTests(SynchronousTestCase):
    """Many events, all with the same tag, few with another one."""

    def setUp(self) -> None:
        self.timeline: Timeline[StoredEvent] = Timeline()
        for number in range(MANY):
            labels = [("tag", "common"), *([("tag", "rare")] if number % 1000 == 0 else [])]
            self.timeline.add(an_event(f"e{number}"), labels, Watched(number))

    def found(self, search: TimelineSearch, part: PageRequest) -> tuple[list[str], int, int]:
        """Ids, the total, and how many comparisons it took."""
        Watched.comparisons = 0
        found = self.timeline.find(search, part)
        return [event.id for event in found.items], found.total, Watched.comparisons

    def test_a_page_is_not_searched_for(self) -> None:
        """A page of what has one label costs nothing that grows with how many have it, wherever it is."""
        for newest_first, expected in ((False, ["e5000", "e5001"]), (True, ["e4999", "e4998"])):
            search = TimelineSearch(([("tag", "common")],), newest_first=newest_first)
            self.assertEqual(self.found(search, PageRequest(5000, 2)), (expected, MANY, 0))

    def test_bounds_are_bisected(self) -> None:
        """Bounds are found in logarithmic time."""
        search = TimelineSearch(([("tag", "common")],), after=1000.0, before=8999.0)
        ids, total, comparisons = self.found(search, PageRequest(4000, 1))
        self.assertEqual((ids, total), (["e5000"], 8000))
        self.assertLess(comparisons, 100)

    def test_the_rarest_decides(self) -> None:
        """What has to have two labels is looked for among those that have the rarer one."""
        for labels in ((("tag", "rare"), ("tag", "common")), (("tag", "common"), ("tag", "rare"))):
            ids, total, comparisons = self.found(
                TimelineSearch(tuple([label] for label in labels)), PageRequest(1, 2)
            )
            self.assertEqual((ids, total), (["e1000", "e2000"], 10))
            self.assertLess(comparisons, 100)

    def test_taken_out(self) -> None:
        """Taking one out is as little trouble."""
        place = self.timeline.add(an_event("new"), [("tag", "common")], Watched(MANY))
        Watched.comparisons = 0
        self.timeline.remove(place)
        self.assertLess(Watched.comparisons, 100)
        self.assertEqual(self.timeline.count(("tag", "common")), MANY)
