"""When an owner is woken, by the times that are kept of it: what the contract of the stores cannot show."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.devices import MAX_CLAIM_SECONDS, WakeupPolicy, WakeupState

NOW = 1_800_000_000.0
HOUR = 3_600.0
POLICY = WakeupPolicy(min_interval=20.0, quiet_after_poll=10.0)


def test_times_from_before_the_clock_was_set_back_do_not_count() -> None:
    """Neither a wake-up, nor a poll, nor a claim keeps an owner from being woken for an hour."""
    for state in (
        WakeupState(woken_at=NOW + HOUR),
        WakeupState(polled_at=NOW + HOUR),
        WakeupState(claimed_until=NOW + HOUR),
        WakeupState(NOW + HOUR, NOW + HOUR, NOW + HOUR),
    ):
        assert state.decide(NOW, NOW, POLICY) == 0.0, state
        assert state.is_owed(NOW, NOW, POLICY, 0.0), state


def test_times_that_can_be_count() -> None:
    """A claim lasts until a retry, and an operation may have waited while others were carried out."""
    assert WakeupState(claimed_until=NOW + MAX_CLAIM_SECONDS).decide(NOW, NOW, POLICY) == MAX_CLAIM_SECONDS
    assert WakeupState(polled_at=NOW + 5.0).decide(NOW, NOW, POLICY) is None
    assert WakeupState(woken_at=NOW + 5.0).decide(NOW, NOW, POLICY) is None
    assert WakeupState(-inf, -inf, -inf).decide(NOW, NOW, POLICY) == 0.0
