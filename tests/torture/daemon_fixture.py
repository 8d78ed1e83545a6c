"""A daemon on one store, with wallets, that is used for many rounds."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from twisted.internet.threads import deferToThread

from mediatord.store.interfaces.messages import StoreLedger
from mediatord.wallet.didcomm_client import DIDCommWallet
from tests.integration.delivery_ledger import DeliveryLedger
from tests.integration.message_load import MAX_DELIVERY, ROOMY, enrol_wallet
from tests.integration.raw_decentrl_client import DaemonClient
from tests.integration.retrying_clients import ReconnectingRecipient, RetryingSenders, SendTask
from tests.ledger_checks import read_sqlite_ledger
from tests.replica_set import ReplicaSet
from tests.torture import ledger_checks
from tests.torture.black_hole_proxy import BlackHoleProxy
from tests.torture.controlled_daemon import ControlledDaemon
from tests.torture.event_load import ContractedIdentities

StoreName = Literal["sqlite", "mongodb", "memory"]

WALLETS = 2
# Size of the file system of a daemon on SQLite.
FILE_SYSTEM_BYTES = 64 << 20
_DATABASE = "mediatord"
# Unacknowledged pushes are soon requeued, and nothing expires under any clock.
_SETTINGS: dict[str, Any] = {
    "queue": {**ROOMY["queue"], "delivered_timeout": 2, "ttl": 2_592_000},
    "didcomm": {"delivery_limit": MAX_DELIVERY},
    "decentrl": {"timestamp_window": 86_400},
    "drain_timeout": 2,
}


@dataclass(frozen=True, slots=True)
class MessageLoad:
    """
    Senders and their tasks.

    :param ledger: records attempts and deliveries.
    """

    ledger: DeliveryLedger
    senders: RetryingSenders
    send_tasks: Sequence[SendTask]

    @property
    def message_count(self) -> int:
        """Number of messages."""
        return len(self.send_tasks)

    def start(self, held: int = 0) -> None:
        """As :meth:`RetryingSenders.start`."""
        self.senders.start(self.send_tasks, held)


class DaemonFixture:
    """
    Runs between :meth:`open` and :meth:`close`.

    :param mounts: whether file systems can be mounted in a private namespace.
    :ivar daemon: the daemon that gets the faults.
    :ivar servers: MongoDB servers, if they are its store.
    :ivar relay: proxy to the daemon whose connections can become half open.
    :ivar small: whether all files of the daemon are on a small file system.
    """

    daemon: ControlledDaemon
    identities: ContractedIdentities

    def __init__(self, reactor: Any, store: StoreName, *, mounts: bool) -> None:
        self.reactor = reactor
        self.store = store
        self.relay = BlackHoleProxy(reactor)
        self.servers: ReplicaSet | None = ReplicaSet(3) if store == "mongodb" else None
        self.small = mounts and store == "sqlite"
        self.wallets: list[DIDCommWallet] = []

    async def open(self, *, syncs: bool = True) -> None:
        """
        Start the store and the daemon, and enrol the wallets.

        :param syncs: whether the disk honours syncs.
        """
        if self.servers is not None:
            await deferToThread(self.servers.open)
        self.daemon = ControlledDaemon({**_SETTINGS, "storage": self._storage()})
        self.daemon.syncs = syncs
        if self.small:
            self.daemon.directory.mkdir()
            _mount(self.daemon.directory)
        await deferToThread(self.daemon.start)
        self.wallets = [await enrol_wallet(self.daemon, self.reactor) for _ in range(WALLETS)]
        self.identities = await deferToThread(lambda: ContractedIdentities(DaemonClient(self.daemon)))
        self.relay.route_to(self.daemon.port)

    async def close(self, keep: Path | None = None) -> None:
        """
        End everything.

        :param keep: directory for files of a failed round; all files are deleted unless given.
        """
        if hasattr(self, "daemon"):
            if self.daemon.running:
                self.daemon.kill()
            if keep is not None:
                await deferToThread(self._keep, keep)
            if self.small:
                subprocess.run(["umount", "-l", self.daemon.directory], check=False)
            self.daemon.clean()
        await self.relay.close()
        if self.servers is not None:
            await deferToThread(self.servers.close)

    def make_recipients(self, ledger: DeliveryLedger, port: int | None = None) -> list[ReconnectingRecipient]:
        """Recipients for the wallets, not started. :param port: port to use instead of the daemon's."""
        return [
            ReconnectingRecipient(wallet, [port or self.daemon.port], ledger, self.reactor) for wallet in self.wallets
        ]

    def prepare_load(self, prefix: str, number: int) -> MessageLoad:
        """A load of `number` messages to each wallet, not started."""
        send_tasks = [
            SendTask(wallet, f"{prefix}-{index}-{message_number}")
            for message_number in range(number)
            for index, wallet in enumerate(self.wallets)
        ]
        ledger = DeliveryLedger()
        ledger.expect(send_task.message for send_task in send_tasks)
        return MessageLoad(ledger, RetryingSenders([self.daemon.port], ledger), send_tasks)

    def read_ledger(self) -> StoreLedger | None:
        """The store's ledger; None if only the daemon can read it."""
        if self.servers is not None:
            return ledger_checks.read_mongo_ledger(self.servers.client, _DATABASE)
        return read_sqlite_ledger(self.daemon.database) if self.store == "sqlite" else None

    def count_queued(self) -> int:
        """Number of queued messages; 0 if only the daemon can read it."""
        ledger = self.read_ledger()
        return 0 if ledger is None else cast(int, ledger.didcomm.waiting)

    async def wait_until_recovered(self) -> None:
        """Return when the daemon is healthy."""
        if self.servers is not None:
            await deferToThread(self.servers.primary)
        await deferToThread(self.daemon.await_health)

    def _storage(self) -> dict[str, Any]:
        if self.servers is not None:
            return {"backend": "mongodb", "mongodb": {"uri": self.servers.uri(_DATABASE)}}
        return {"backend": self.store}

    def _keep(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "output").write_text(self.daemon.output(), encoding="utf-8")
        without_sockets = shutil.ignore_patterns("*.sock")
        shutil.copytree(self.daemon.directory, directory / "mediator", ignore=without_sockets, dirs_exist_ok=True)
        if self.servers is not None:
            database = self.servers.client[_DATABASE]
            for name in ("ledger", "messages", "recipients", "session_owners", "nodes"):
                rows = [str(row) for row in database[name].find({}, {"payload": 0})]
                (directory / f"{name}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _mount(directory: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES},mode=0700", "tmpfs", str(directory)]
    subprocess.run(command, check=True)
