"""One mediator on each store: all get the same requests and have to give the same responses."""

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

# Members whose values a mediator generates: ids, by which things are requested again, and keys.
_IDS = frozenset({"id", "pendingEventId", "public_event_id", "event_id"})
_GENERATED_MEMBERS = frozenset({"recipient_encryption_public_key", "recipient_signature"})


class IdAliases:
    """
    Aliases of the ids that one mediator has generated, numbered by first appearance: the same for all mediators.
    """

    def __init__(self) -> None:
        self._aliases: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def get_alias(self, id_: str) -> str:
        """Alias of an id."""
        alias = self._aliases.setdefault(id_, f"id-{len(self._aliases)}")
        self._ids[alias] = id_
        return alias

    def get_id(self, alias: str) -> str:
        """The id with this alias; any other text is returned unchanged."""
        return self._ids.get(alias, alias)

    def replace_in(self, value: Any) -> Any:
        """A copy of a value with aliases in place of generated ids."""
        if isinstance(value, list):
            return [self.replace_in(one) for one in value]
        if not isinstance(value, Mapping):
            return value
        return {name: self._replace_member(name, inner) for name, inner in value.items()}

    def _replace_member(self, name: str, value: Any) -> Any:
        if name in _GENERATED_MEMBERS:
            return "made up"
        return self.get_alias(value) if name in _IDS and isinstance(value, str) else self.replace_in(value)


class MirroredMediators:
    """
    The mediators, with the same keys.

    :ivar aliases: aliases of each.
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
        self.aliases = {mediator.backend: IdAliases() for mediator in self.mediator_fixtures}

    @property
    def first(self) -> RestartableMediator:
        """Any of them, for what they have in common."""
        return self.mediator_fixtures[0]

    @property
    def now(self) -> float:
        """Unix seconds, by their clocks."""
        return self.first.clock.seconds()

    def ask_all(self, request: Callable[[RestartableMediator], Any]) -> Any:
        """Send the same request to all; return the common result."""
        answers = {one.backend: self.aliases[one.backend].replace_in(request(one)) for one in self.mediator_fixtures}
        first = answers[self.first.backend]
        assert all(one == first for one in answers.values()), "\n".join(f"{k}: {v!r}" for k, v in answers.items())
        return first

    def get_ids(self, mediator_fixture: RestartableMediator, aliases: list[str]) -> list[str]:
        """Ids of these aliases at one mediator."""
        return [self.aliases[mediator_fixture.backend].get_id(alias) for alias in aliases]

    def close(self) -> None:
        """Stop all of them and delete their data."""
        for mediator in self.mediator_fixtures:
            mediator.stop()
        self._fresh.__exit__(None, None, None)
        rmtree(self._directory)
