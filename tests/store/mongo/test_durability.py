"""Commits request the journals of a majority, which MongoDB guarantees then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mediatord.store.interfaces.messages import Payload
from mediatord.store.mongo.store import MongoStore
from tests.store.mongo.mongo_test_case import ALICE, CLOCK, INBOX, MongoTestCase

# Milliseconds from which on the server logs a command as slow, here and by default.
_EVERYTHING, _USUAL = -1, 100


class DurabilityTests(MongoTestCase):
    """What the server reports of its commands."""

    async def test_commits_request_journal_and_majority(self) -> None:
        """Each commit requests both; messages are written in transactions only."""
        store = await self.open_store()
        with self.record_commands() as commands:
            await self.run_all_writes(store)
        commits = [command for command in commands if "commitTransaction" in command]
        concerns = [{name: commit["writeConcern"].get(name) for name in ("w", "j")} for commit in commits]
        self.assertEqual(concerns, [{"w": "majority", "j": True}] * len(commits))
        self.assertGreaterEqual(len(commits), 4)
        changes = [
            command
            for command in commands
            if "messages" in (command.get("insert"), command.get("update"), command.get("delete"))
        ]
        self.assertEqual([change.get("autocommit") for change in changes], [False] * len(changes))
        self.assertGreaterEqual(len(changes), 4)

    async def run_all_writes(self, store: MongoStore) -> None:
        """Run each operation that adds or removes messages."""
        await self.enqueue_ids(store, "acknowledged", "removed")
        await store.enqueue(INBOX, [Payload("expired", b"", "json")], expires_at=CLOCK.seconds())
        await store.acknowledge(ALICE, ["acknowledged"])
        await store.remove_messages(["removed"])
        (expired,) = await store.expire_messages(10)
        self.assertEqual((expired.id, self.list_queued()), ("expired", []))

    @contextmanager
    def record_commands(self) -> Iterator[list[dict[str, Any]]]:
        """Commands on this database, and commits, during this context."""
        found: list[dict[str, Any]] = []
        log = self.servers.members[0].log
        begin = log.stat().st_size
        self.servers.client.admin.command("profile", 0, slowms=_EVERYTHING)
        try:
            yield found
        finally:
            self.servers.client.admin.command("profile", 0, slowms=_USUAL)
        # At either end the server may be writing a line for another database.
        log_bytes = log.read_bytes()[begin:].partition(b"\n")[2].rpartition(b"\n")[0]
        log_lines = log_bytes.decode(errors="replace").splitlines()
        started = [json.loads(line).get("attr", {}).get("command", {}) for line in log_lines if '"COMMAND"' in line]
        found += [item for item in started if item.get("$db") == self.database or "commitTransaction" in item]
