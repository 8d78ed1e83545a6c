"""What an acknowledgement costs the database of a daemon with SQLite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mediatord.wallet.didcomm_client import PICKUP
from tests.integration.devices import DeviceWallet, LiveDevice
from tests.integration.message_load import ROOMY
from tests.integration.shared_daemon import SharedDaemonTestCase
from tests.store.sqlite.commit_test_case import count_wal_commits

# A timer of the daemon may commit during a round, but not during each.
ROUNDS = 5
_OPERATIONS = 'mediator_store_duration_seconds_count{operation="'
# Reads that a scrape of the metrics causes.
_SCRAPED = frozenset(("backlog", "ledger", "statistics", "waiting"))


class CommitTests(SharedDaemonTestCase):
    """The whole way from the request to the reply."""

    settings = ROOMY

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()
        self.database = self.daemon.directory / "mediator.sqlite3"

    def operations(self) -> Counter[str]:
        """Number of store operations so far, by name."""
        lines = self.daemon_client.ask("GET", "/metrics").body.decode().splitlines()
        found: Counter[str] = Counter()
        for line in lines:
            if line.startswith(_OPERATIONS):
                name, _, count = line.removeprefix(_OPERATIONS).partition('"} ')
                found[name] = int(float(count))
        return found

    def cost(self, acknowledge: Callable[[str], object]) -> tuple[int, Counter[str]]:
        """Commits of an acknowledgement, and store operations without those of a scrape, in the cheapest round."""
        rounds = []
        for number in range(ROUNDS):
            self.bob.tell(str(number))
            (delivered,) = self.bob.fetch()
            before, commits = self.operations(), count_wal_commits(self.database)
            acknowledge(delivered.id)
            found = count_wal_commits(self.database) - commits
            done = self.operations() - before
            if found > 0:  # unless the log was begun anew, after a checkpoint
                rounds.append((found, Counter({name: done[name] for name in done if name not in _SCRAPED})))
            self.assertEqual(self.bob.waiting(), 0)
        return min(rounds, key=lambda costs: (costs[0], costs[1].total()))

    def test_http(self) -> None:
        """One commit claims the digest, removes the message and reads the status."""
        self.assertEqual(self.cost(self.bob.acknowledge), (1, {"acknowledge": 1, "commit": 1}))

    def test_socket(self) -> None:
        """The same on a socket that the wallet has authenticated on."""
        device = LiveDevice(self.bob)
        self.addCleanup(device.close)
        self.assertTrue(device.silent())
        self.assertEqual(self.cost(device.acknowledge), (1, {"acknowledge": 1, "commit": 1}))

    def test_replay(self) -> None:
        """One that came before is refused without reading the status."""
        self.bob.tell("first")
        (first,) = self.bob.fetch()
        raw = self.bob.pack(f"{PICKUP}/messages-received", {"message_id_list": [first.id]})
        self.assertEqual(self.bob.open(self.bob.post(raw).body).message.type.name, "status")
        before = self.operations()
        self.assertEqual(self.bob.open(self.bob.post(raw).body).message.type.name, "problemreport")
        self.assertNotIn("status", self.operations() - before)
