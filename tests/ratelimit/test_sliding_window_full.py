"""The sliding window limiter with more keys than it can hold: no key is forgotten, and none gains by it."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter

NOW = 1_800_000_000.0
# Keys per minute of :class:`mediatord.ratelimit.rate_limiter.RateLimiter`.
BUCKETS = 9
# The bound on memory in docs/reference/limits.md.
MOST_BYTES = 72_000_000


def test_flood_of_keys_resets_none() -> None:
    """A refused key stays refused until its minute is over, whatever comes after it."""
    window = SlidingWindowLimiter(2, max_keys=100)
    assert [window.admit("abuser", NOW) for _ in range(3)] == [0, 0, 60]
    for number in range(10_000):
        window.admit(f"fresh {number}", NOW + 1)
    assert window.admit("abuser", NOW + 59) == 1
    assert window.admit("abuser", NOW + 60) == 0


def test_late_keys_share_a_counter() -> None:
    """The 101st of 100 keys shares a limit with others: never more than the limit, and mostly something."""
    window = SlidingWindowLimiter(2, max_keys=100)
    for number in range(100):
        window.admit(f"first {number}", NOW)
    assert [window.admit("late", NOW) for _ in range(3)] == [0, 0, 60]
    admitted = [sum(window.admit(f"later {number}", NOW) == 0 for _ in range(9)) for number in range(100)]
    assert max(admitted) == 2
    assert sum(admitted) > 150


def test_shared_use_is_carried_over() -> None:
    """A key that gets its own counter keeps its earlier use."""
    window = SlidingWindowLimiter(3, max_keys=1)
    window.admit("first", NOW)
    assert [window.admit("late", NOW + at) for at in (30, 31)] == [0, 0]
    assert [window.admit("late", NOW + at) for at in (61, 62)] == [0, 28]
    assert len(window) == 2
    assert window.admit("late", NOW + 90) == 0
    window.admit("other", NOW + 200)
    assert len(window) == 1


def test_refund_of_shared_use() -> None:
    """Shared use can be refunded."""
    window = SlidingWindowLimiter(1, max_keys=1)
    window.admit("first", NOW)
    for _ in range(9):
        assert window.admit("late", NOW) == 0
        window.refund("late")


def test_wait_of_shared_counter() -> None:
    """The wait of a shared counter can be read without a charge."""
    window = SlidingWindowLimiter(1, max_keys=1)
    window.admit("first", NOW)
    assert window.wait("late", NOW) == 0
    window.admit("late", NOW)
    assert window.wait("late", NOW + 10) == 50


def test_shared_use_is_carried_over_beyond_the_bound() -> None:
    """The whole use is carried over, as of its last time."""
    window = SlidingWindowLimiter(4, max_keys=1, max_entries=2)
    window.admit("first", NOW)
    assert [window.admit("late", NOW + at) for at in (30, 46)] == [0, 0]
    assert [window.admit("late", NOW + at) for at in (61, 62, 63)] == [0, 0, 43]


def test_expired_shared_use_is_forgotten() -> None:
    """Also while keys with counters of their own still use it."""
    window = SlidingWindowLimiter(1, max_keys=1)
    for key, at in (("first", 0), ("late", 0), ("first", 61), ("later", 62)):
        assert window.admit(key, NOW + at) == 0
    assert len(window) == 2


def test_few_entries_are_exact() -> None:
    """Within the bound nobody waits longer because of others."""
    window = SlidingWindowLimiter(2)
    assert [window.admit("a", NOW + at) for at in (0.25, 0.28125, 60.265625)] == [0, 0, 0]


def test_merged_entries_count_longer() -> None:
    """By less than a quarter of the period, and never shorter."""
    window = SlidingWindowLimiter(4, max_entries=2)
    assert [window.admit("a", NOW + at) for at in (0, 5, 16, 29, 29.5)] == [0, 0, 0, 0, 31]
    # The third and the fourth are merged into one entry.
    assert [window.admit("a", NOW + at) for at in (60, 65, 76, 88, 89, 89)] == [0, 0, 13, 1, 0, 0]


def test_many_entries_of_one_key_are_precise() -> None:
    """A limit of thousands is exact in number, and to a tenth of a second in time."""
    window = SlidingWindowLimiter(5_000)
    assert sum(window.admit("a", NOW + number / 1000) == 0 for number in range(6_000)) == 5_000
    assert 0 < window._entry_count < 1_300
    assert window.wait("a", NOW + 60.5) == 0
    assert sum(window.admit("a", NOW + 65.2) == 0 for _ in range(6_000)) == 5_000
    assert window._entry_count == 1


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.integers(1, 2)), min_size=1, max_size=150),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 20),
)
def test_no_minute_exceeds_the_limit(
    steps: list[tuple[int, int, int]], limit: int, max_keys: int, max_entries: int
) -> None:
    """With any keys at any times, and any bounds."""
    window, now = SlidingWindowLimiter(limit, max_keys=max_keys, max_entries=max_entries), NOW
    admitted: dict[int, list[float]] = {}
    for key, gap, cost in steps:
        now += gap / 4
        if not window.admit(str(key), now, cost):
            admitted.setdefault(key, []).extend([now] * cost)
        assert window._entry_count == sum(
            len(entries) // 2 for held in (window._entries, window._shared_entries) for entries in held.values()
        )
    for moments in admitted.values():
        for start in moments:
            assert sum(start <= moment < start + 60 for moment in moments) <= limit


def test_memory_of_all_buckets() -> None:
    """As many keys and entries as possible, with one bucket measured for eight."""
    tracemalloc.start()
    try:
        window, now = SlidingWindowLimiter(600), NOW
        before, _ = tracemalloc.get_traced_memory()
        for iteration in range(6):
            for number in range(30_000):
                window.admit(f"did:example:{number:050d}", now + 9 * iteration)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(window) > 20_000
    assert 1_000_000 < (after - before) * BUCKETS < MOST_BYTES
