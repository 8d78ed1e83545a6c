"""Texts that no database takes."""

from __future__ import annotations

from collections.abc import Iterable


def is_storable(text: str) -> bool:
    """Whether anything can be called so: what is no Unicode, as half of a surrogate pair is not, nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def storable(ids: Iterable[str]) -> tuple[str, ...]:
    """Those that something can have; one that nothing can have would spoil the question for all others."""
    return tuple(filter(is_storable, ids))
