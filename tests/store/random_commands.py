"""Any commands at all."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st

from mediatord.store.interfaces.decentrl import CommandGuard, ContractRequest, PendingEvent, PublicEvent, StoredEvent
from mediatord.store.sqlite.connection import SQLOperation
from tests.store.builders import NOON
from tests.store.sqlite.operations import PEOPLE, SQLiteOperations, make_contract


class RandomCommands:
    """Commands of all kinds, many of which are refused or fail."""

    def __init__(self, data: st.DataObject, orders: SQLiteOperations) -> None:
        self.draw = data.draw
        self.orders = orders
        self.numbers = count()
        self.events: list[tuple[str, str]] = []

    def id(self) -> str:
        """Mostly a new one."""
        return f"i{next(self.numbers)}" if self.draw(st.integers(0, 9)) else f"i{self.draw(st.integers(0, 5))}"

    def did(self) -> str:
        return self.draw(st.sampled_from(PEOPLE))

    def guard(self) -> CommandGuard | None:
        """Mostly one that lets the command pass."""
        if self.draw(st.integers(0, 3)):
            return None
        anybody = st.none() | st.sampled_from(PEOPLE)
        nonce = self.draw(st.sampled_from([b"1", b"2", b""]))
        return self.orders.guard(self.draw(anybody), self.draw(anybody), nonce)

    def tags(self) -> tuple[str, ...]:
        return tuple(self.draw(st.lists(st.sampled_from(["x", "y", "\u20ac"]), max_size=2)))

    def text(self) -> str:
        return self.draw(st.sampled_from(["", "x", "12345", "y" * 20, "z" * 31]))

    def event(self) -> StoredEvent:
        at = self.draw(st.sampled_from([0.0, 1.0, 2.0]))
        return StoredEvent(self.id(), self.did(), self.did(), self.text(), self.tags(), at)

    def command(self) -> SQLOperation:
        orders, guard = self.orders, self.guard()
        kind = self.draw(st.integers(0, 14))
        if kind < 4:
            return orders.deliver(PendingEvent(self.id(), self.did(), self.did(), self.text(), NOON), guard)
        if kind < 7:
            owner, events = self.did(), [self.event() for _ in range(self.draw(st.integers(0, 2)))]
            self.events += [(owner, event.id) for event in events]
            return orders.save(owner, events, guard)
        if kind < 9 and self.events:
            owner, id = self.draw(st.sampled_from(self.events))
            return orders.tag(owner, [(id, self.tags()), ("unknown", self.tags())], guard)
        return self.rarer(kind, guard)

    def rarer(self, kind: int, guard: CommandGuard | None) -> SQLOperation:
        orders, did = self.orders, self.did()
        some = [f"i{number}" for number in self.draw(st.lists(st.integers(0, 8), max_size=3))]
        if kind < 10:
            until = NOON + self.draw(st.sampled_from([-1.0, 9.0]))
            return orders.contract(
                make_contract(self.id(), self.draw(st.none() | st.just(did)), self.did(), until), guard
            )
        if kind == 10:
            return orders.acknowledge(did, some, guard)
        if kind == 11:
            return orders.tag(did, [(id, self.tags()) for id in some], guard)
        if kind == 12:
            return orders.request(ContractRequest(self.id(), self.did(), did, "", ""), guard)
        if kind == 13:
            return orders.acknowledge_requests(did, some, guard)
        if some:
            return orders.unpublish(did, some[0], guard)
        return orders.publish(did, PublicEvent(self.id(), self.text(), self.tags(), 1.0, "", "blog"), guard)
