"""The sliding window limiter (UC-021 AF-2)."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from mediatord.ratelimit.distributed_limiter import QuotaLease
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter

NOW = 1_800_000_000.0


def test_admits_exactly_the_limit() -> None:
    """The 61st request of a minute is refused until the first is a minute old."""
    window = SlidingWindowLimiter(60)
    assert [window.admit("a", NOW) for _ in range(60)] == [0] * 60
    assert window.admit("a", NOW + 20) == 40


def test_refusals_are_free() -> None:
    """Refused requests do not prolong the refusal."""
    window = SlidingWindowLimiter(1)
    window.admit("a", NOW)
    for second in range(1, 60):
        assert window.admit("a", NOW + second) == 60 - second
    assert window.admit("a", NOW + 60) == 0


def test_keys_are_independent() -> None:
    """Each key has its own limit."""
    window = SlidingWindowLimiter(1)
    assert (window.admit("a", NOW), window.admit("ab", NOW)) == (0, 0)


def test_wait_does_not_charge() -> None:
    """`wait` changes nothing."""
    window = SlidingWindowLimiter(1)
    assert [window.wait("a", NOW) for _ in range(3)] == [0, 0, 0]
    assert window.admit("a", NOW) == 0
    assert window.wait("a", NOW) == 60


def test_expired_keys_are_forgotten() -> None:
    """Memory follows current use."""
    window = SlidingWindowLimiter(1)
    for number in range(100):
        window.admit(f"{number}" * 100, NOW)
    for number in range(60):
        window.admit(f"new {number}", NOW + 61)
    assert len(window) == 60


def test_changed_limit() -> None:
    """A changed limit applies at once, including admissions under the old one."""
    window = SlidingWindowLimiter(2)
    assert [window.admit("a", NOW + second) for second in range(3)] == [0, 0, 58]
    window.limit = 4
    assert [window.admit("a", NOW + second) for second in range(3, 6)] == [0, 0, 55]
    window.limit = 1
    assert window.admit("a", NOW + 60) == 4
    assert window.admit("a", NOW + 64) == 0


def test_cost_above_one() -> None:
    """All units or none are admitted, and the wait is for the last of them."""
    window = SlidingWindowLimiter(3)
    assert window.admit("a", NOW, 2) == 0
    assert window.admit("a", NOW + 10, 2) == 50
    assert window.admit("a", NOW + 10) == 0
    assert window.wait("a", NOW + 20, 3) == 50
    assert window.wait("b", NOW, 4) == 60


def test_clock_set_back() -> None:
    """Admissions from what is now the future do not count."""
    window = SlidingWindowLimiter(1)
    window.admit("a", NOW)
    assert window.admit("a", NOW - 3600) == 0


@given(st.lists(st.integers(0, 120), min_size=1, max_size=200), st.integers(1, 10))
def test_no_minute_exceeds_the_limit(gaps: list[int], limit: int) -> None:
    """In any rhythm, no 60 seconds exceed the limit, and waiting as told suffices."""
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


def test_lease_is_used_and_expires() -> None:
    """A lease can be used for a period after it was requested."""
    lease = QuotaLease(b"", 60, 0)
    lease.add_granted(10, NOW, NOW + 1)
    assert lease.try_use(4, NOW + 2) and not lease.try_use(7, NOW + 3)
    assert lease.remaining(NOW + 59) == 6
    assert lease.remaining(NOW + 60) == 0


def test_debt_is_paid_first() -> None:
    """A debt is deducted from the next lease, and expires."""
    lease = QuotaLease(b"", 60, 0)
    lease.charge_deferred(3, NOW)
    assert lease.remaining(NOW) == -3 and not lease.try_use(0, NOW)
    lease.add_granted(5, NOW, NOW)
    assert lease.remaining(NOW) == 2
    lease.charge_deferred(4, NOW + 59)
    assert lease.remaining(NOW + 118) == -2
    assert lease.remaining(NOW + 119) == 0


def test_refusal_is_cached() -> None:
    """Requests of the same cost are not repeated before the time given; smaller ones are."""
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


def test_refund_into_lease() -> None:
    """A refund can be used for the rest of its period; what exceeds the lease is returned."""
    lease = QuotaLease(b"", 60, 0)
    lease.refund(1, NOW)
    assert lease.remaining(NOW) == 0
    lease.add_granted(5, NOW, NOW)
    lease.try_use(5, NOW)
    lease.refund(5, NOW + 30)
    assert lease.trim(3, NOW + 30) == 2
    assert lease.trim(3, NOW + 30) == 0
    assert lease.remaining(NOW + 59) == 3


def test_lease_and_clock_set_back() -> None:
    """Leases and refusals from what is now the future are dropped."""
    lease = QuotaLease(b"", 60, 0)
    lease.add_granted(5, NOW, NOW)
    lease.note_refusal(5, 60, NOW)
    assert lease.is_idle(NOW - 3600)
    assert not QuotaLease(b"", 60, 0).wait(0, NOW)
