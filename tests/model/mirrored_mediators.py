"""One mediator on each store, side by side: all are told the same, and have to answer the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from mediatord.identity.key_file import create_keys
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from tests.model.restartable_mediator import MediatorEnvironment, RestartableMediator
from tests.mongod import fresh_database

LIMITS = QueueLimits(max_messages=5, max_bytes=900)
CAPS = DecentrlQuotas(pending=4, pending_bytes=120, stored=6, stored_bytes=200)
BACKENDS = ("memory", "sqlite", "mongodb")

# Members whose values a mediator makes up: ids, by which things are asked for again, and keys.
_IDS = frozenset({"id", "pendingEventId", "public_event_id", "event_id"})
_CHANCE = frozenset({"recipient_encryption_public_key", "recipient_signature"})


class IdAliases:
    """Ids that one mediator has given out, by the order in which they came to light: the same at all of them."""

    def __init__(self) -> None:
        self._aliases: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def of(self, id_: str) -> str:
        """What an id is called from now on."""
        alias = self._aliases.setdefault(id_, f"id-{len(self._aliases)}")
        self._ids[alias] = id_
        return alias

    def id(self, alias: str) -> str:
        """What is called so; any other text is what it is."""
        return self._ids.get(alias, alias)

    def in_(self, value: Any) -> Any:
        """The same without what is made up."""
        if isinstance(value, list):
            return [self.in_(one) for one in value]
        if not isinstance(value, Mapping):
            return value
        return {name: self._member(name, inner) for name, inner in value.items()}

    def _member(self, name: str, value: Any) -> Any:
        if name in _CHANCE:
            return "made up"
        return self.of(value) if name in _IDS and isinstance(value, str) else self.in_(value)


class MirroredMediators:
    """
    The mediators, with the same keys.

    :ivar aliases: of each.
    """

    def __init__(self) -> None:
        self._directory = Path(mkdtemp(prefix="mediatord-model-"))
        create_keys(self._directory / "keys.jwks")
        self._fresh = fresh_database()
        database = self._fresh.__enter__()
        self.mediator_fixtures = [
            RestartableMediator(
                MediatorEnvironment(one, self._directory / one, LIMITS, CAPS, database if one == "mongodb" else "")
            )
            for one in BACKENDS
        ]
        self.aliases = {one.backend: IdAliases() for one in self.mediator_fixtures}

    @property
    def first(self) -> RestartableMediator:
        """Any of them, for what they have in common."""
        return self.mediator_fixtures[0]

    @property
    def now(self) -> float:
        """Unix seconds, by their clocks."""
        return self.first.clock.seconds()

    def same(self, ask: Callable[[RestartableMediator], Any]) -> Any:
        """Ask all of them; what they agree on."""
        answers = {one.backend: self.aliases[one.backend].in_(ask(one)) for one in self.mediator_fixtures}
        first = answers[self.first.backend]
        assert all(one == first for one in answers.values()), "\n".join(f"{k}: {v!r}" for k, v in answers.items())
        return first

    def ids(self, mediator_fixture: RestartableMediator, aliases: list[str]) -> list[str]:
        """What one of them calls these."""
        return [self.aliases[mediator_fixture.backend].id(one) for one in aliases]

    def close(self) -> None:
        """Stop all of them, and delete what they kept."""
        for one in self.mediator_fixtures:
            one.stop()
        self._fresh.__exit__(None, None, None)
        rmtree(self._directory)
