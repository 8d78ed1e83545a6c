"""The compact multimap."""

from __future__ import annotations

import random
import sys

from mediatord.delivery.connections import CompactMultiMap


def test_behaves_like_dict_of_dicts() -> None:
    """All operations give the results of a dict of dicts."""
    chance = random.Random(7)
    few: CompactMultiMap[str, int, str] = CompactMultiMap()
    plain: dict[str, dict[int, str]] = {}
    for step in range(5000):
        key, member = chance.choice("abc"), chance.randrange(4)
        action = chance.choice(("put", "put", "drop", "drop", "pop"))
        if action == "put":
            few.put(key, member, f"{step}")
            plain.setdefault(key, {})[member] = f"{step}"
        elif action == "drop":
            was_last = plain.get(key, {}).keys() == {member}
            assert few.discard(key, member) is was_last
            plain.get(key, {}).pop(member, None)
        elif chance.random() < 0.2:
            assert few.pop(key) == list(plain.pop(key, {}).items())
        plain = {one: members for one, members in plain.items() if members}
        assert (len(few), sorted(few)) == (len(plain), sorted(plain))
        for one in "abc":
            assert few.lookup(one) == list(plain.get(one, {}).items())
            assert few.count(one) == len(plain.get(one, {}))
            assert [few.has(one, other) for other in range(4)] == [other in plain.get(one, {}) for other in range(4)]


def test_single_value_is_small() -> None:
    """Its purpose: a dict or a set takes more than 200 bytes, also for one member."""
    few: CompactMultiMap[str, str, None] = CompactMultiMap()
    few.put("key", "member", None)
    assert sys.getsizeof(few.groups["key"]) <= 64
    few.put("key", "other", None)
    few.discard("key", "member")
    assert sys.getsizeof(few.groups["key"]) <= 64
