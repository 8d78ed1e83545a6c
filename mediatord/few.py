"""Groups that have one member nearly always, and must not cost a hash table each."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Hashable)
V = TypeVar("V")


class Few(Generic[K, M, V]):
    """
    For each key its members in order of coming, and a value for each of them.

    A single member takes a tuple of 56 bytes, where a dictionary would take four times as much; from the second on
    the key has a dictionary, for as long as there are several.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[K, tuple[M, V] | dict[M, V]] = {}

    def __len__(self) -> int:
        """How many keys have members."""
        return len(self._groups)

    def __iter__(self) -> Iterator[K]:
        return iter(self._groups)

    def put(self, key: K, member: M, value: V) -> None:
        """Let it be a member, or give it another value."""
        group = self._groups.get(key)
        if group is None or (isinstance(group, tuple) and group[0] == member):
            self._groups[key] = (member, value)
        elif isinstance(group, tuple):
            self._groups[key] = {group[0]: group[1], member: value}
        else:
            group[member] = value

    def has(self, key: K, member: object) -> bool:
        """Whether it is a member."""
        group = self._groups.get(key)
        if isinstance(group, tuple):
            return group[0] == member
        return group is not None and member in group

    def count(self, key: K) -> int:
        """How many members there are."""
        group = self._groups.get(key)
        return 0 if group is None else 1 if isinstance(group, tuple) else len(group)

    def of(self, key: K) -> list[tuple[M, V]]:
        """The members and their values, as they are now."""
        group = self._groups.get(key)
        if isinstance(group, tuple):
            return [group]
        return [] if group is None else list(group.items())

    def drop(self, key: K, member: M) -> bool:
        """Let it be none. Whether it was one, and the last."""
        group = self._groups.get(key)
        if isinstance(group, tuple):
            if group[0] != member:
                return False
            del self._groups[key]
            return True
        if group is not None and member in group:
            del group[member]
            if len(group) == 1:
                self._groups[key] = next(iter(group.items()))
        return False

    def pop(self, key: K) -> list[tuple[M, V]]:
        """The members and their values; the key has none any more."""
        members = self.of(key)
        self._groups.pop(key, None)
        return members
