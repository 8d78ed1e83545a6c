"""The cache of page cursors of long lists."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.caches import PageCursorCache, PageCursors


class PageCursorCacheTests(SynchronousTestCase):
    """Cursors of lists, as far as they were read."""

    def test_finds_nearest_cursor(self) -> None:
        """The last cursor at or before an offset is found; the beginning has none."""
        bookmarks = PageCursors(1)
        self.assertEqual(bookmarks.before(5), (0, None))
        for offset in (20, 10, 30, 10):
            bookmarks.add(offset, (float(offset), offset))
        for offset, expected in ((9, 0), (10, 10), (19, 10), (20, 20), (1000, 30)):
            found, cursor = bookmarks.before(offset)
            self.assertEqual((found, cursor), (expected, (float(expected), expected) if expected else None))

    def test_number_of_cursors_is_bounded(self) -> None:
        """However far a list is read, the number of cursors is bounded, and the last one stays."""
        bookmarks = PageCursors(1)
        for offset in range(1, 1000):
            bookmarks.add(offset, (0.0, offset))
            self.assertEqual(bookmarks.before(10_000), (offset, (0.0, offset)))
        starts = {bookmarks.before(offset)[0] for offset in range(1000)}
        self.assertLessEqual(len(starts), 65)
        self.assertGreater(len(starts), 30)

    def test_new_edition_has_no_cursors(self) -> None:
        """A new edition of a list has no cursors, nor has a list that was not read for long."""
        page_cursors = PageCursorCache(capacity=2)
        first = page_cursors.of("a", 1)
        self.assertIs(page_cursors.of("a", 1), first)
        self.assertIsNot(page_cursors.of("a", 2), first)
        cursors = page_cursors.of("a", 2)
        page_cursors.of("b", 1)
        self.assertIs(page_cursors.of("a", 2), cursors)
        page_cursors.of("c", 1)
        self.assertIs(page_cursors.of("a", 2), cursors)
        page_cursors.of("b", 1)
        page_cursors.of("c", 1)
        self.assertIsNot(page_cursors.of("a", 2), cursors)
