"""Random commands on the SQLite store."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st

from mediatord.store.interfaces.decentrl import CommandGuard, ContractRequest, PendingEvent, PublicEvent, StoredEvent
from mediatord.store.sqlite.connection import SQLOperation
from tests.store.builders import NOON
from tests.store.sqlite.operations import PARTY_DIDS, SQLiteOperations, make_contract


class RandomCommands:
    """Draws commands of all kinds, many of which are refused or fail."""

    def __init__(self, data: st.DataObject, operations: SQLiteOperations) -> None:
        self.draw = data.draw
        self.operations = operations
        self.numbers = count()
        self.events: list[tuple[str, str]] = []

    def draw_id(self) -> str:
        """An id, mostly a new one."""
        return f"i{next(self.numbers)}" if self.draw(st.integers(0, 9)) else f"i{self.draw(st.integers(0, 5))}"

    def draw_did(self) -> str:
        return self.draw(st.sampled_from(PARTY_DIDS))

    def draw_guard(self) -> CommandGuard | None:
        """A guard, mostly one that admits the command."""
        if self.draw(st.integers(0, 3)):
            return None
        optional_did = st.none() | st.sampled_from(PARTY_DIDS)
        nonce = self.draw(st.sampled_from([b"1", b"2", b""]))
        return self.operations.make_guard(self.draw(optional_did), self.draw(optional_did), nonce)

    def draw_tags(self) -> tuple[str, ...]:
        return tuple(self.draw(st.lists(st.sampled_from(["x", "y", "\u20ac"]), max_size=2)))

    def draw_text(self) -> str:
        return self.draw(st.sampled_from(["", "x", "12345", "y" * 20, "z" * 31]))

    def draw_event(self) -> StoredEvent:
        at = self.draw(st.sampled_from([0.0, 1.0, 2.0]))
        return StoredEvent(self.draw_id(), self.draw_did(), self.draw_did(), self.draw_text(), self.draw_tags(), at)

    def draw_command(self) -> SQLOperation:
        operations, guard = self.operations, self.draw_guard()
        kind = self.draw(st.integers(0, 14))
        if kind < 4:
            return operations.deliver_event(
                PendingEvent(self.draw_id(), self.draw_did(), self.draw_did(), self.draw_text(), NOON), guard
            )
        if kind < 7:
            owner, events = self.draw_did(), [self.draw_event() for _ in range(self.draw(st.integers(0, 2)))]
            self.events += [(owner, event.id) for event in events]
            return operations.save_events(owner, events, guard)
        if kind < 9 and self.events:
            owner, id = self.draw(st.sampled_from(self.events))
            return operations.update_tags(owner, [(id, self.draw_tags()), ("unknown", self.draw_tags())], guard)
        return self.draw_rarer_command(kind, guard)

    def draw_rarer_command(self, kind: int, guard: CommandGuard | None) -> SQLOperation:
        operations, did = self.operations, self.draw_did()
        some = [f"i{number}" for number in self.draw(st.lists(st.integers(0, 8), max_size=3))]
        if kind < 10:
            until = NOON + self.draw(st.sampled_from([-1.0, 9.0]))
            return operations.save_contract(
                make_contract(self.draw_id(), self.draw(st.none() | st.just(did)), self.draw_did(), until), guard
            )
        if kind == 10:
            return operations.acknowledge_events(did, some, guard)
        if kind == 11:
            return operations.update_tags(did, [(id, self.draw_tags()) for id in some], guard)
        if kind == 12:
            return operations.add_request(ContractRequest(self.draw_id(), self.draw_did(), did, "", ""), guard)
        if kind == 13:
            return operations.acknowledge_requests(did, some, guard)
        if some:
            return operations.unpublish_event(did, some[0], guard)
        return operations.publish_event(
            did, PublicEvent(self.draw_id(), self.draw_text(), self.draw_tags(), 1.0, "", "blog"), guard
        )
