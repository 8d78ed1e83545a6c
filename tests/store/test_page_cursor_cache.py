"""What is remembered of long lists."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.caches import PageCursorCache, PageCursors


class PageCursorCacheTests(SynchronousTestCase):
    """Where pages begin, as far as somebody has read."""

    def test_nearest(self) -> None:
        """The last bookmark that is not behind an offset is found; there is none at the beginning."""
        bookmarks = PageCursors(1)
        self.assertEqual(bookmarks.before(5), (0, None))
        for offset in (20, 10, 30, 10):
            bookmarks.add(offset, (float(offset), offset))
        for offset, expected in ((9, 0), (10, 10), (19, 10), (20, 20), (1000, 30)):
            found, place = bookmarks.before(offset)
            self.assertEqual((found, place), (expected, (float(expected), expected) if expected else None))

    def test_bounded(self) -> None:
        """However far somebody reads, there are not more and more of them, and the last one stays."""
        bookmarks = PageCursors(1)
        for offset in range(1, 1000):
            bookmarks.add(offset, (0.0, offset))
            self.assertEqual(bookmarks.before(10_000), (offset, (0.0, offset)))
        known = {bookmarks.before(offset)[0] for offset in range(1000)}
        self.assertLessEqual(len(known), 65)
        self.assertGreater(len(known), 30)

    def test_editions(self) -> None:
        """Another edition of a list begins without bookmarks, and so does a list that was not read for long."""
        page_cursors = PageCursorCache(capacity=2)
        first = page_cursors.of("a", 1)
        self.assertIs(page_cursors.of("a", 1), first)
        self.assertIsNot(page_cursors.of("a", 2), first)
        again = page_cursors.of("a", 2)
        page_cursors.of("b", 1)
        self.assertIs(page_cursors.of("a", 2), again)
        page_cursors.of("c", 1)
        self.assertIs(page_cursors.of("a", 2), again)
        page_cursors.of("b", 1)
        page_cursors.of("c", 1)
        self.assertIsNot(page_cursors.of("a", 2), again)
