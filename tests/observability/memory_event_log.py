"""In-memory event log that validates events."""

from __future__ import annotations

from mediatord.observability.event_schema import validate_fields


class MemoryEventLog:
    """
    Event log in memory.

    :ivar events: (event, fields without None) in order.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def emit(self, event: str, **fields: object) -> None:
        """As :meth:`EventLog.emit`."""
        self.events.append((event, validate_fields(event, fields)))

    def write(self, event: str, fields: dict[str, object]) -> None:
        """
        As :meth:`EventLog.write`.

        :raise TypeError: invalid fields.
        """
        if validate_fields(event, dict(fields)) != fields:
            raise TypeError(f"{event} has a field without a value, or one that is not rounded")
        self.events.append((event, fields))

    def flush(self) -> None:
        """No-op."""

    def named(self, event: str) -> list[dict[str, object]]:
        """Fields of all events of this name, in order."""
        return [fields for name, fields in self.events if name == event]
