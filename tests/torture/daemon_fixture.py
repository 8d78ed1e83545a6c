"""A daemon on one store with its wallets, which lives through many rounds."""

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
from tests.integration.message_load import MANY, ROOMY, enrol_wallet
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
# Bytes of the file system that a daemon on SQLite has for itself.
ROOM_BYTES = 64 << 20
_DATABASE = "mediatord"
# So that a push that is not acknowledged is soon pending again; and whatever a clock says, nothing expires.
_SETTINGS: dict[str, Any] = {
    "queue": {**ROOMY["queue"], "delivered_timeout": 2, "ttl": 2_592_000},
    "didcomm": {"delivery_limit": MANY},
    "decentrl": {"timestamp_window": 86_400},
    "drain_timeout": 2,
}


@dataclass(frozen=True, slots=True)
class MessageLoad:
    """
    Senders with what they are to send.

    :param ledger: in which all is entered.
    """

    ledger: DeliveryLedger
    senders: RetryingSenders
    send_tasks: Sequence[SendTask]

    @property
    def message_count(self) -> int:
        """How many."""
        return len(self.send_tasks)

    def start(self) -> None:
        """Begin to send."""
        self.senders.start(self.send_tasks)


class DaemonFixture:
    """
    Runs between :meth:`open` and :meth:`close`.

    :param mounts: whether file systems can be mounted where only this process sees them.
    :ivar daemon: the one that is tortured.
    :ivar servers: of MongoDB, if those are its store.
    :ivar relay: another way to the daemon, which may go dead.
    :ivar small: whether all that the daemon writes is on a small file system of its own.
    """

    daemon: ControlledDaemon
    friends: ContractedIdentities

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

        :param syncs: whether the disk does as it is told.
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
        self.friends = await deferToThread(lambda: ContractedIdentities(DaemonClient(self.daemon)))
        self.relay.way_to(self.daemon.port)

    async def close(self, keep: Path | None = None) -> None:
        """
        End everything.

        :param keep: a directory for what it leaves; nothing is left unless given.
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

    def recipients(self, ledger: DeliveryLedger, port: int | None = None) -> list[ReconnectingRecipient]:
        """The wallets, yet to be started. :param port: where they reach the daemon, unless directly."""
        return [
            ReconnectingRecipient(wallet, [port or self.daemon.port], ledger, self.reactor) for wallet in self.wallets
        ]

    def load(self, prefix: str, number: int) -> MessageLoad:
        """Yet to be started: so many messages to each wallet."""
        send_tasks = [
            SendTask(wallet, f"{prefix}-{who}-{letter}")
            for letter in range(number)
            for who, wallet in enumerate(self.wallets)
        ]
        ledger = DeliveryLedger()
        ledger.due(send_task.letter for send_task in send_tasks)
        return MessageLoad(ledger, RetryingSenders([self.daemon.port], ledger), send_tasks)

    def books(self) -> StoreLedger | None:
        """What the store says; None of one that nobody else can read."""
        if self.servers is not None:
            return ledger_checks.read_mongo_ledger(self.servers.client, _DATABASE)
        return read_sqlite_ledger(self.daemon.database) if self.store == "sqlite" else None

    def left(self) -> int:
        """Messages that wait, as far as somebody else can know."""
        books = self.books()
        return 0 if books is None else cast(int, books.didcomm.waiting)

    async def recovered(self) -> None:
        """Returns when the daemon is well again."""
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
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES},mode=0700", "tmpfs", str(directory)]
    subprocess.run(command, check=True)
