"""
Process that shares a database with others and works on the same accounts as fast as it can.

`python -m tests.store.sqlite.stress_process DATABASE NAME`: waits for a line, works, prints the outcome as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.internet.task import react

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.cluster_and_quotas import ClusterJoinError, ClusterNode
from mediatord.store.interfaces.decentrl import CommandGuard, ContractRequest, DecentrlQuotas
from mediatord.store.interfaces.devices import (
    MAX_CLAIM_SECONDS,
    FinishedWakeup,
    WakeupClaim,
    WakeupPolicy,
    WakeupRequest,
)
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.sqlite.executor import SQLiteExecutor, ThreadRunner
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import ALICE, BOB, HOUR, make_payload

INBOX = "did:key:z6MkInbox"
LIMITS = QueueLimits(max_messages=60)
CAPS = DecentrlQuotas(requests=40, requests_of_one=1000)
MAX_RECIPIENTS = 30
NONCES = 200
MAX_TAKEN = 50
MAX_PENDING_CONNECTIONS = 40
SLEEPERS = 60
WAKEUP_POLICY = WakeupPolicy(min_interval=HOUR, quiet_after_poll=0.0, lease=MAX_CLAIM_SECONDS)
ROUNDS = 40
CONCURRENCY = 5
# Seconds for which a write waits for other processes: long enough for all of them on a busy machine.
LOCK_TIMEOUT = 60.0


def get_sleeper(number: int) -> str:
    """DID of an account that has a device and a message."""
    return f"did:example:sleeper{number}"


class StressWorker:
    """
    Runs operations that compete with other processes.

    :ivar outcomes: ids enqueued, evicted and acknowledged, and what was obtained of limited resources.
    """

    def __init__(self, store: IStore, clock: IReactorTime, name: str) -> None:
        self._store = store
        self._clock = clock
        self._name = name
        self.outcomes: dict[str, list[Any]] = {}

    async def run(self) -> None:
        works = [
            self._enqueue_messages,
            self._claim_nonces,
            self._register_dids,
            self._send_requests,
            self._use_quota,
            self._join_cluster,
            self._claim_wakeups,
            self._connect_wallets,
        ]
        await gatherResults([Deferred.fromCoroutine(work()) for work in works])

    def _record(self, what: str, *items: Any) -> None:
        self.outcomes.setdefault(what, []).extend(items)

    async def _run_concurrently(self, work: Callable[[int], Awaitable[None]], rounds: int) -> None:
        async def some(first: int) -> None:
            for number in range(first, rounds, CONCURRENCY):
                await work(number)

        await gatherResults([Deferred.fromCoroutine(some(first)) for first in range(CONCURRENCY)])

    async def _enqueue_messages(self) -> None:
        await self._run_concurrently(self._enqueue, ROUNDS)

    async def _enqueue(self, number: int) -> None:
        """Enqueue a few messages, then acknowledge the oldest, which another process may have acknowledged too."""
        payloads = [make_payload(f"{self._name}-{number}-{part}") for part in range(3)]
        enqueued = await self._store.enqueue(INBOX, payloads, expires_at=self._clock.seconds() + HOUR)
        self._record("deposited", *(message.id for message in enqueued.messages))
        self._record("evicted", *(removed.id for removed in enqueued.evicted))
        found = await self._store.fetch_messages(ALICE, None, limit=1000, max_bytes=1 << 30)
        self._record("waiting", len(found))
        removed = await self._store.acknowledge(ALICE, [message.id for message in found[:2]])
        self._record("acknowledged", *(item.id for item in removed))

    async def _claim_nonces(self) -> None:
        order = Random(self._name).sample(range(NONCES), NONCES)
        until = self._clock.seconds() + HOUR

        async def claim(number: int) -> None:
            if await self._store.claim_nonce(b"%d" % order[number], until):
                self._record("claimed", order[number])

        await self._run_concurrently(claim, NONCES)

    async def _register_dids(self) -> None:
        async def register(number: int) -> None:
            update = await self._store.update_recipients(
                BOB, [(f"did:{self._name}:{number}", "add")], max_recipients=MAX_RECIPIENTS
            )
            self._record("registered", *(one for one in update if one == "success"))

        await self._run_concurrently(register, ROUNDS)

    async def _send_requests(self) -> None:
        async def request(number: int) -> None:
            id = f"{self._name}-{number}"
            guard = CommandGuard(id.encode(), self._clock.seconds() + HOUR)
            try:
                await self._store.decentrl.request_contract(guard, ContractRequest(id, BOB, ALICE, "", ""))
            except QuotaExceeded:
                return
            self._record("requested", id)

        await self._run_concurrently(request, ROUNDS)

    async def _use_quota(self) -> None:
        async def take(_: int) -> None:
            if not await self._store.cluster.take_quota(b"key", 1, limit=MAX_TAKEN, period=HOUR):
                self._record("taken", 1)

        await self._run_concurrently(take, MAX_TAKEN)

    async def _claim_wakeups(self) -> None:
        order = Random(self._name).sample(range(SLEEPERS), SLEEPERS)

        async def claim(number: int) -> None:
            requests = [WakeupRequest(get_sleeper(one)) for one in (order[number], order[number - 1])]
            decisions = await self._store.devices.claim_wakeups(requests, WAKEUP_POLICY)
            woken = [one for one in decisions if isinstance(one, WakeupClaim)]
            await self._store.devices.finish_wakeups([FinishedWakeup(one.owner, one.claim) for one in woken])
            self._record("woken", *(one.owner for one in woken))

        await self._run_concurrently(claim, SLEEPERS)

    async def _connect_wallets(self) -> None:
        """Connect wallets, of which each third one gets an account before that or at the same time."""

        async def connect(number: int) -> None:
            wallet = f"did:key:z6Mk{self._name}{number}"
            connection = V1Connection(wallet, f"own key of {wallet}", "request")
            granted = [self._store.grant(wallet)] if number % 3 == 0 else []
            await self._store.v1_connections.put_connection(connection, max_pending=MAX_PENDING_CONNECTIONS)
            await gatherResults(granted)
            self._record("connected with account" if granted else "connected", wallet)

        await self._run_concurrently(connect, ROUNDS)

    async def _join_cluster(self) -> None:
        try:
            await self._store.cluster.join(ClusterNode("node", self._name, "tcp:host=x:port=1", b""), HOUR)
        except ClusterJoinError:
            return
        self._record("joined", self._name)


async def run_stress(reactor: IReactorTime) -> None:
    path, name = sys.argv[1:]
    threads = IReactorFromThreads(reactor)
    executor = SQLiteExecutor(
        Path(path),
        reactor,
        lambda kind: ThreadRunner(threads, f"mediatord-store-{kind}"),
        patience=LOCK_TIMEOUT,
        shared=True,
    )
    store = SQLiteStore(executor, reactor, LIMITS, caps=CAPS, shared=True)
    sys.stdin.readline()
    await store.open()
    one = StressWorker(store, reactor, name)
    await one.run()
    await store.close()
    sys.stdout.write(json.dumps(one.outcomes))


if __name__ == "__main__":
    react(lambda reactor: Deferred.fromCoroutine(run_stress(reactor)))
