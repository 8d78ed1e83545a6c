"""Commits and store operations of an acknowledgement on SQLite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mediatord.wallet.didcomm_client import PICKUP
from tests.integration.devices import DeviceWallet, LiveDevice
from tests.integration.message_load import ROOMY
from tests.integration.shared_daemon import SharedDaemonTestCase
from tests.store.sqlite.commit_test_case import count_wal_commits

# A timer of the daemon may commit during some rounds, but not during all.
ROUNDS, MAX_ROUNDS = 5, 100
_OPERATIONS = 'mediator_store_duration_seconds_count{operation="'
# Reads caused by a scrape of the metrics, and a timer's checkpoint.
_OTHER_OPERATIONS = frozenset(("backlog", "ledger", "statistics", "waiting", "checkpoint"))


class AcknowledgementCommitTests(SharedDaemonTestCase):
    """Costs from the request to the reply."""

    settings = ROOMY

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()
        self.eve = DeviceWallet(self.daemon_client).enrol()
        self.database = self.daemon.directory / "mediator.sqlite3"

    def count_operations(self) -> Counter[str]:
        """Number of store operations so far, by name."""
        lines = self.daemon_client.request("GET", "/metrics").body.decode().splitlines()
        counts: Counter[str] = Counter()
        for line in lines:
            if line.startswith(_OPERATIONS):
                name, _, count = line.removeprefix(_OPERATIONS).partition('"} ')
                counts[name] = int(float(count))
        return counts

    def measure_cost(self, acknowledge: Callable[[str], object]) -> tuple[int, Counter[str]]:
        """Commits and store operations of an acknowledgement, without those of a scrape, in the cheapest round."""
        rounds: list[tuple[int, Counter[str]]] = []
        for number in range(MAX_ROUNDS):
            if len(rounds) == ROUNDS:
                break
            self.bob.send_text(str(number))
            (delivered,) = self.bob.fetch()
            self.eve.send_text("")  # committed behind the claim of the fetch, for which its reply does not wait
            operations_before, commits_before = self.count_operations(), count_wal_commits(self.database)
            acknowledge(delivered.id)
            new_commits = count_wal_commits(self.database) - commits_before
            operations = self.count_operations() - operations_before
            if new_commits > 0:  # the log restarts after a checkpoint
                rounds.append(
                    (
                        new_commits,
                        Counter({name: operations[name] for name in operations if name not in _OTHER_OPERATIONS}),
                    )
                )
            self.assertEqual(self.bob.queued_count(), 0)
        return min(rounds, key=lambda costs: (costs[0], costs[1].total()))

    def test_http_acknowledgement_needs_one_commit(self) -> None:
        """One commit claims the digest, removes the message and reads the status."""
        self.assertEqual(self.measure_cost(self.bob.acknowledge), (1, {"acknowledge": 1, "commit": 1}))

    def test_socket_acknowledgement_needs_one_commit(self) -> None:
        """The same on an authenticated socket."""
        device = LiveDevice(self.bob)
        self.addCleanup(device.close)
        self.assertTrue(device.has_no_push())
        self.assertEqual(self.measure_cost(device.acknowledge), (1, {"acknowledge": 1, "commit": 1}))

    def test_refuses_replay_without_reading_status(self) -> None:
        """A repeated acknowledgement is refused without reading the status."""
        self.bob.send_text("first")
        (first,) = self.bob.fetch()
        raw = self.bob.pack(f"{PICKUP}/messages-received", {"message_id_list": [first.id]})
        self.assertEqual(self.bob.open(self.bob.post(raw).body).message.type.name, "status")
        before = self.count_operations()
        self.assertEqual(self.bob.open(self.bob.post(raw).body).message.type.name, "problemreport")
        self.assertNotIn("status", self.count_operations() - before)
