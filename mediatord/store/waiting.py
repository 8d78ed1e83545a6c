"""What waits in the two halves together."""

from __future__ import annotations

from mediatord.interfaces import Waiting


def both(one: Waiting, other: Waiting) -> Waiting:
    """The sum."""
    times = [at for at in (one.oldest_received_at, other.oldest_received_at) if at is not None]
    return Waiting(
        one.messages + other.messages,
        None if one.bytes is None or other.bytes is None else one.bytes + other.bytes,
        None if one.recipients is None or other.recipients is None else one.recipients + other.recipients,
        min(times, default=None),
    )
