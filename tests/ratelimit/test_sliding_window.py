"""The sliding window behind UC-021 AF-2."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from mediatord.ratelimit.distributed_limiter import QuotaLease
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter

NOW = 1_800_000_000.0


def test_exactly_the_limit_is_admitted_in_a_fresh_minute() -> None:
    """The 61st request of a minute is refused, and told to wait for the first to grow old."""
    window = SlidingWindowLimiter(60)
    assert [window.admit("a", NOW) for _ in range(60)] == [0] * 60
    assert window.admit("a", NOW + 20) == 40


def test_a_refusal_costs_nothing() -> None:
    """Hammering while refused does not put off the end of it."""
    window = SlidingWindowLimiter(1)
    window.admit("a", NOW)
    for second in range(1, 60):
        assert window.admit("a", NOW + second) == 60 - second
    assert window.admit("a", NOW + 60) == 0


def test_keys_do_not_share() -> None:
    """What one key used up, another has."""
    window = SlidingWindowLimiter(1)
    assert (window.admit("a", NOW), window.admit("ab", NOW)) == (0, 0)


def test_waiting_is_asked_without_being_charged() -> None:
    """`wait` changes nothing."""
    window = SlidingWindowLimiter(1)
    assert [window.wait("a", NOW) for _ in range(3)] == [0, 0, 0]
    assert window.admit("a", NOW) == 0
    assert window.wait("a", NOW) == 60


def test_keys_whose_time_is_over_are_forgotten() -> None:
    """Memory follows what is going on, not what went on."""
    window = SlidingWindowLimiter(1)
    for number in range(100):
        window.admit(f"{number}" * 100, NOW)
    for number in range(60):
        window.admit(f"new {number}", NOW + 61)
    assert len(window) == 60


def test_another_limit() -> None:
    """It counts at once, and so does what was admitted under the one before."""
    window = SlidingWindowLimiter(2)
    assert [window.admit("a", NOW + second) for second in range(3)] == [0, 0, 58]
    window.limit = 4
    assert [window.admit("a", NOW + second) for second in range(3, 6)] == [0, 0, 55]
    window.limit = 1
    assert window.admit("a", NOW + 60) == 4
    assert window.admit("a", NOW + 64) == 0


def test_several_at_once() -> None:
    """All or none are admitted, and the wait is for the last of them."""
    window = SlidingWindowLimiter(3)
    assert window.admit("a", NOW, 2) == 0
    assert window.admit("a", NOW + 10, 2) == 50
    assert window.admit("a", NOW + 10) == 0
    assert window.wait("a", NOW + 20, 3) == 50
    assert window.wait("b", NOW, 4) == 60


def test_a_clock_set_back_shuts_nobody_out() -> None:
    """Admissions from what is now the future do not count."""
    window = SlidingWindowLimiter(1)
    window.admit("a", NOW)
    assert window.admit("a", NOW - 3600) == 0


@given(st.lists(st.integers(0, 120), min_size=1, max_size=200), st.integers(1, 10))
def test_no_minute_has_more_than_the_limit(gaps: list[int], limit: int) -> None:
    """Whatever the rhythm, no 60 seconds hold more admissions than the limit, and waiting as told suffices."""
    window, now, admitted = SlidingWindowLimiter(limit), NOW, []
    for gap in gaps:
        now += gap / 4  # exact in floating point, unlike tenths
        wait = window.admit("a", now)
        if wait:
            assert isinstance(wait, int)
            assert deepcopy(window).wait("a", now + wait) == 0
        else:
            admitted.append(now)
    for start in admitted:
        assert sum(start <= moment < start + 60 for moment in admitted) <= limit


def test_a_lot_is_used_up_and_lapses() -> None:
    """What was taken can be used for a period after it was asked for."""
    lease = QuotaLease(b"", 60, 0)
    lease.add_granted(10, NOW, NOW + 1)
    assert lease.try_use(4, NOW + 2) and not lease.try_use(7, NOW + 3)
    assert lease.remaining(NOW + 59) == 6
    assert lease.remaining(NOW + 60) == 0


def test_a_debt_is_paid_first() -> None:
    """What is owed is missing from what is taken next, and is forgotten in the end."""
    lease = QuotaLease(b"", 60, 0)
    lease.charge_deferred(3, NOW)
    assert lease.remaining(NOW) == -3 and not lease.try_use(0, NOW)
    lease.add_granted(5, NOW, NOW)
    assert lease.remaining(NOW) == 2
    lease.charge_deferred(4, NOW + 59)
    assert lease.remaining(NOW + 118) == -2
    assert lease.remaining(NOW + 119) == 0


def test_a_refusal_is_remembered() -> None:
    """Nobody who needs as much asks again before its time, and who wants as much asks for less."""
    lease = QuotaLease(b"", 60, 0)
    lease.note_refusal(8, 30, NOW)
    assert [lease.wait(amount, NOW + 10) for amount in (7, 8, 9)] == [0, 20, 20]
    assert [lease.limit_request(20, needed, NOW) for needed in (1, 2, 3)] == [2, 2, 3]
    assert (lease.wait(9, NOW + 30), lease.limit_request(20, 1, NOW + 30)) == (0, 20)
    lease.add_granted(2, NOW, NOW)
    assert [lease.wait(amount, NOW) for amount in (9, 10)] == [0, 30]
    lease.clear_refusal()
    assert lease.wait(99, NOW) == 0
    for now in (0.1, NOW):
        for wait in (1e-12, 60.0, 61.5):
            lease = QuotaLease(b"", 60, 0)
            lease.note_refusal(8, wait, now)
            assert 0 < lease.wait(8, now) < 61


def test_what_is_given_back_to_a_lot() -> None:
    """It can be used again while its period lasts; what may not be kept is let go of."""
    lease = QuotaLease(b"", 60, 0)
    lease.refund(1, NOW)
    assert lease.remaining(NOW) == 0
    lease.add_granted(5, NOW, NOW)
    lease.try_use(5, NOW)
    lease.refund(5, NOW + 30)
    assert lease.trim(3, NOW + 30) == 2
    assert lease.trim(3, NOW + 30) == 0
    assert lease.remaining(NOW + 59) == 3


def test_a_lot_and_a_clock_set_back() -> None:
    """What was taken or refused in what is now the future is forgotten."""
    lease = QuotaLease(b"", 60, 0)
    lease.add_granted(5, NOW, NOW)
    lease.note_refusal(5, 60, NOW)
    assert lease.is_idle(NOW - 3600)
    assert not QuotaLease(b"", 60, 0).wait(0, NOW)
