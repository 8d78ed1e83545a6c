"""The sliding window where more come than it has room for: nobody is forgotten, and nobody has more for it."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter

NOW = 1_800_000_000.0
# Those of a minute that :class:`mediatord.ratelimit.rate_limiter.RateLimiter` has.
BUCKETS = 9
# What docs/reference/limits.md promises for all of them.
MOST_BYTES = 72_000_000


def test_a_flood_of_names_does_not_reset_anybody() -> None:
    """Who is over its limit stays so, whatever comes after it, until its minute is over."""
    window = SlidingWindowLimiter(2, max_keys=100)
    assert [window.admit("abuser", NOW) for _ in range(3)] == [0, 0, 60]
    for number in range(10_000):
        window.admit(f"fresh {number}", NOW + 1)
    assert window.admit("abuser", NOW + 59) == 1
    assert window.admit("abuser", NOW + 60) == 0


def test_who_comes_too_late_shares() -> None:
    """The 101st of 100 has an allowance together with others: never more than a limit, and mostly something."""
    window = SlidingWindowLimiter(2, max_keys=100)
    for number in range(100):
        window.admit(f"first {number}", NOW)
    assert [window.admit("late", NOW) for _ in range(3)] == [0, 0, 60]
    admitted = [sum(window.admit(f"later {number}", NOW) == 0 for _ in range(9)) for number in range(100)]
    assert max(admitted) == 2
    assert sum(admitted) > 150


def test_a_share_is_taken_along() -> None:
    """Whoever has an allowance of its own at last has used what it used before."""
    window = SlidingWindowLimiter(3, max_keys=1)
    window.admit("first", NOW)
    assert [window.admit("late", NOW + at) for at in (30, 31)] == [0, 0]
    assert [window.admit("late", NOW + at) for at in (61, 62)] == [0, 28]
    assert len(window) == 2
    assert window.admit("late", NOW + 90) == 0
    window.admit("other", NOW + 200)
    assert len(window) == 1


def test_what_is_shared_is_given_back() -> None:
    """As what is not."""
    window = SlidingWindowLimiter(1, max_keys=1)
    window.admit("first", NOW)
    for _ in range(9):
        assert window.admit("late", NOW) == 0
        window.refund("late")


def test_what_is_shared_can_be_asked() -> None:
    """How long whoever shares has to wait, also without being charged."""
    window = SlidingWindowLimiter(1, max_keys=1)
    window.admit("first", NOW)
    assert window.wait("late", NOW) == 0
    window.admit("late", NOW)
    assert window.wait("late", NOW + 10) == 50


def test_a_share_is_taken_along_beyond_the_bound() -> None:
    """As much as was used, all of it as of the last time."""
    window = SlidingWindowLimiter(4, max_keys=1, max_entries=2)
    window.admit("first", NOW)
    assert [window.admit("late", NOW + at) for at in (30, 46)] == [0, 0]
    assert [window.admit("late", NOW + at) for at in (61, 62, 63)] == [0, 0, 43]


def test_shares_whose_time_is_over_are_forgotten() -> None:
    """Also while whoever has an allowance of its own still uses it."""
    window = SlidingWindowLimiter(1, max_keys=1)
    for key, at in (("first", 0), ("late", 0), ("first", 61), ("later", 62)):
        assert window.admit(key, NOW + at) == 0
    assert len(window) == 2


def test_few_turns_are_exact() -> None:
    """Nobody waits for longer because of others, as long as there is room."""
    window = SlidingWindowLimiter(2)
    assert [window.admit("a", NOW + at) for at in (0.25, 0.28125, 60.265625)] == [0, 0, 0]


def test_turns_beyond_the_bound_count_for_longer() -> None:
    """By less than a quarter of the period, and what was admitted never counts for less than it."""
    window = SlidingWindowLimiter(4, max_entries=2)
    assert [window.admit("a", NOW + at) for at in (0, 5, 16, 29, 29.5)] == [0, 0, 0, 0, 31]
    # The third and the fourth are one turn.
    assert [window.admit("a", NOW + at) for at in (60, 65, 76, 88, 89, 89)] == [0, 0, 13, 1, 0, 0]


def test_many_turns_of_one_key_are_fine() -> None:
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
def test_no_minute_has_more_than_the_limit(
    steps: list[tuple[int, int, int]], limit: int, max_keys: int, max_entries: int
) -> None:
    """Whoever comes when, and however little room there is."""
    window, now = SlidingWindowLimiter(limit, max_keys=max_keys, max_entries=max_entries), NOW
    admitted: dict[int, list[float]] = {}
    for key, gap, cost in steps:
        now += gap / 4
        if not window.admit(str(key), now, cost):
            admitted.setdefault(key, []).extend([now] * cost)
        assert window._entry_count == sum(
            len(turns) // 2 for held in (window._entries, window._shared_entries) for turns in held.values()
        )
    for moments in admitted.values():
        for start in moments:
            assert sum(start <= moment < start + 60 for moment in moments) <= limit


def test_the_bytes_of_all_buckets() -> None:
    """As many keys as come, at as many moments as are told apart, with one bucket measured for eight."""
    tracemalloc.start()
    try:
        window, now = SlidingWindowLimiter(600), NOW
        before, _ = tracemalloc.get_traced_memory()
        for turn in range(6):
            for number in range(30_000):
                window.admit(f"did:example:{number:050d}", now + 9 * turn)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(window) > 20_000
    assert 1_000_000 < (after - before) * BUCKETS < MOST_BYTES
