"""
Process that runs all operations that store and remove, and prints the outcomes, until it is killed.

`python -m tests.store.sqlite.churn_process DATABASE SEED`: lines with a protocol, an entry of its ledger, a number;
and `v1 connected 1` for each connection of DIDComm v1 that is not removed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import react

from mediatord.errors import QuotaExceeded
from mediatord.store.factory import build_store
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, DecentrlQuotas, PageRequest, PendingEvent
from mediatord.store.interfaces.messages import QueueLimits, RemovedMessage
from mediatord.store.interfaces.store import IStore
from mediatord.store.interfaces.v1_connections import V1Connection
from tests.store.builders import ALICE, BOB, HOUR, LEDGER_ENTRY_BY_REASON, make_payload

INBOX = "did:key:z6MkInbox"
LIMITS = QueueLimits(max_messages=40, max_bytes=100_000, share=0.5)
CONCURRENCY = 8
ORIGINS = (0, 0x0001_0001, 0x0001_0002, 0x0002_0003)


class ChurnWorker:
    """Runs operations; its ids are different for every seed."""

    def __init__(self, store: IStore, clock: IReactorTime, seed: str) -> None:
        self._store = store
        self._clock = clock
        self._random = Random(seed)
        self._seed = seed
        self._last = 0

    async def prepare(self) -> None:
        """Create the recipients of both protocols."""
        await self._store.grant(ALICE)
        await self._store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=1)
        until = self._clock.seconds() + HOUR
        for owner, peer in ((None, ALICE), (ALICE, BOB)):
            contract = Contract(self._make_id(), owner, peer, until, self._make_id().encode(), b"{}")
            await self._store.decentrl.save_contract(self._make_guard(), contract)

    async def run_forever(self) -> None:
        """Run operations until the process is killed."""
        works = (
            self._enqueue,
            self._enqueue,
            self._acknowledge,
            self._take_and_remove,
            self._expire,
            self._deliver_event,
            self._acknowledge_event,
            self._connect_wallet,
            self._change_wallets,
        )
        while True:
            await self._random.choice(works)()

    async def _enqueue(self) -> None:
        payloads = [make_payload(self._make_id(), b"x" * self._random.randrange(3000)) for _ in range(3)]
        if not self._random.randrange(9):
            payloads.append(make_payload(self._make_id(), b"x" * (LIMITS.max_bytes + 1)))
        expires_at = self._clock.seconds() + self._random.choice([0.0, 0.1, HOUR])
        origin = self._random.choice(ORIGINS)
        enqueued = await self._store.enqueue(INBOX, payloads, expires_at=expires_at, origin=origin)
        _print_entry("didcomm", "accepted", len(enqueued.messages))
        _print_removed(enqueued.evicted)

    async def _acknowledge(self) -> None:
        _print_removed(await self._store.acknowledge(ALICE, await self._choose_ids()))

    async def _take_and_remove(self) -> None:
        _print_removed(await self._store.remove_messages(await self._choose_ids()))

    async def _choose_ids(self) -> list[str]:
        found = await self._store.fetch_messages(ALICE, None, limit=3, max_bytes=1 << 20)
        return [message.id for message in found]

    async def _expire(self) -> None:
        _print_removed(await self._store.expire_messages(5))

    async def _deliver_event(self) -> None:
        event = PendingEvent(self._make_id(), ALICE, BOB, "event", self._clock.seconds())
        try:
            await self._store.decentrl.enqueue_event(self._make_guard(), event)
        except QuotaExceeded:
            return
        _print_entry("decentrl", "accepted", 1)

    async def _acknowledge_event(self) -> None:
        found = await self._store.decentrl.pending_events(ALICE, None, PageRequest(0, 2))
        ids = [event.id for event in found.items]
        acknowledged = await self._store.decentrl.acknowledge_events(self._make_guard(), ALICE, ids)
        _print_entry("decentrl", "acknowledged", len(acknowledged))

    async def _connect_wallet(self) -> None:
        """Store a connection of DIDComm v1 that stays."""
        await self._put_connection(self._make_id())
        _print_entry("v1", "connected", 1)

    async def _change_wallets(self) -> None:
        """Store connections of DIDComm v1, replace one, and remove them in each way."""
        wallets = [self._make_id() for _ in range(3)]
        for wallet in (*wallets, wallets[0]):
            await self._put_connection(wallet)
        await self._store.grant(wallets[0])
        await self._store.administration.remove_account(wallets[0])
        await self._store.v1_connections.remove_connection(wallets[1])
        # Those that stay are younger by the clock of the process.
        await self._store.v1_connections.expire_connections(self._clock.seconds() - HOUR, 5)

    async def _put_connection(self, wallet: str) -> None:
        connection = V1Connection(wallet, f"own key of {wallet}", "request")
        await self._store.v1_connections.put_connection(connection, max_pending=1_000_000)

    def _make_guard(self) -> CommandGuard:
        return CommandGuard(self._make_id().encode(), self._clock.seconds() + 1)

    def _make_id(self) -> str:
        self._last += 1
        return f"{self._seed}-{self._last}"


def _print_removed(removed: Iterable[RemovedMessage]) -> None:
    for message in removed:
        _print_entry("didcomm", LEDGER_ENTRY_BY_REASON[message.reason], 1)


def _print_entry(protocol: str, entry: str, number: int) -> None:
    sys.stdout.write(f"{protocol} {entry} {number}\n")
    sys.stdout.flush()


async def churn_forever(reactor: IReactorTime) -> None:
    path, seed = sys.argv[1:]
    store = build_store("sqlite", reactor, LIMITS, caps=DecentrlQuotas(pending=20), path=Path(path))
    await store.open()
    churner = ChurnWorker(store, reactor, seed)
    await churner.prepare()
    await gatherResults([Deferred.fromCoroutine(churner.run_forever()) for _ in range(CONCURRENCY)])


if __name__ == "__main__":
    react(lambda reactor: Deferred.fromCoroutine(churn_forever(reactor)))
