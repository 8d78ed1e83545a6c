"""
Process that enqueues messages and prints what was accepted until it is killed.

`python -m tests.store.sqlite.enqueue_process DATABASE`: one line with three message ids for each commit.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import react

from mediatord.store.factory import build_store
from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits
from mediatord.store.interfaces.store import IStore
from tests.store.builders import ALICE, HOUR, make_payload

INBOX = "did:key:z6MkInbox"
CONCURRENCY = 10


async def enqueue_forever(reactor: IReactorTime) -> None:
    store = build_store("sqlite", reactor, QueueLimits(max_messages=1_000_000), path=Path(sys.argv[1]))
    await store.open()
    await store.grant(ALICE)
    await store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=1)
    numbers = count()
    while True:
        await gatherResults([_enqueue(store, reactor, next(numbers)) for _ in range(CONCURRENCY)])


def _enqueue(store: IStore, reactor: IReactorTime, number: int) -> Deferred[None]:
    payloads = [make_payload(f"m{number}-{part}", b"x" * 3000) for part in range(3)]
    return store.enqueue(INBOX, payloads, expires_at=reactor.seconds() + HOUR).addCallback(_print)


def _print(enqueued: EnqueueResult) -> None:
    sys.stdout.write(" ".join(message.id for message in enqueued.messages) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    react(enqueue_forever)
