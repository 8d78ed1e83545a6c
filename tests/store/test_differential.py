"""Both stores give the same answers to the same questions, whatever is asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from twisted.internet.defer import Deferred

from mediatord.interfaces import Action, IStore, Payload, QueueLimits
from mediatord.store.memory import MemoryStore
from mediatord.store.sqlite_file import Tuning
from tests.store.builders import Held, PromptClock, a_sqlite_store, answer

LIMITS = QueueLimits(max_messages=4, max_bytes=40)

accounts = st.sampled_from(["did:a", "did:ab", "did:c", "did:d"])
recipients = st.sampled_from(["did:1", "did:12", "did:3", "did:a"])
scopes = st.none() | recipients
bodies = st.sampled_from([b"", b"x", b"same", b"0123456789", b"y" * 25, b"z" * 41])
spans = st.sampled_from([0.0, 1.0, 5.0, 20.0])
keys = st.sampled_from([b"k1", b"k2", b"k3", b"k4", b"k5"])


class Stores(RuleBasedStateMachine):
    """The memory store and the SQLite store, asked the same."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = PromptClock()
        self.folder = mkdtemp(prefix="mediatord-store-")
        self.writer = Held()
        path = Path(self.folder) / "db"
        self.stores: list[IStore] = [
            MemoryStore(self.clock, LIMITS, max_nonces=3),
            a_sqlite_store(self.clock, path, LIMITS, write=self.writer, tuning=Tuning(max_nonces=3)),
        ]
        self.ids = count()
        self.known: list[str] = []
        self.same(lambda store: store.open())
        self.same(lambda store: store.grant("did:a"))
        self.same(lambda store: store.grant("did:ab"))
        self.same(lambda store: store.update("did:a", [("did:1", "add"), ("did:12", "add")], max_recipients=3))

    def teardown(self) -> None:
        self.same(lambda store: store.close())
        rmtree(self.folder)

    def same(self, ask: Callable[[IStore], Deferred[Any]]) -> Any:
        """Ask both and compare."""
        memory, sqlite = (answer(ask(store)) for store in self.stores)
        assert memory == sqlite, f"memory: {memory!r}\nsqlite: {sqlite!r}"
        return memory

    def some_ids(self, data: st.DataObject) -> list[str]:
        digests = [sha256(body).hexdigest() for body in (b"x", b"same", b"")]
        return data.draw(st.lists(st.sampled_from([*self.known[-12:], *digests, "unknown"]), max_size=4))

    @rule(did=recipients, contents=st.lists(bodies, max_size=6), ttl=spans, delay=st.none() | spans)
    def deposit(self, did: str, contents: list[bytes], ttl: float, delay: float | None) -> None:
        payloads = [Payload(f"m{next(self.ids)}", body, "json") for body in contents]
        self.known += [payload.id for payload in payloads]
        now = self.clock.seconds()
        due_at = None if delay is None else now + delay
        self.same(lambda store: store.deposit(did, payloads, expires_at=now + ttl, due_at=due_at))

    @rule(
        orders=st.lists(st.tuples(recipients, st.lists(bodies, max_size=2), st.booleans()), min_size=2, max_size=9),
        ttl=spans,
    )
    def deposit_together(self, orders: list[tuple[str, list[bytes], bool]], ttl: float) -> None:
        """Many deposits, some spoiled by an id that is there twice, reach SQLite in one batch."""
        until = self.clock.seconds() + ttl
        whole: list[tuple[str, list[Payload]]] = []
        for did, contents, spoiled in orders:
            payloads = [Payload(f"m{next(self.ids)}", body, "base64") for body in contents]
            self.known += [payload.id for payload in payloads]
            whole.append((did, payloads + payloads[:1] if spoiled else payloads))
        memory, sqlite = self.stores
        self.writer.hold()
        blocking = sqlite.ping()
        asked = [sqlite.deposit(did, payloads, expires_at=until) for did, payloads in whole]
        self.writer.let_go()
        answer(blocking)
        expected = [answer(memory.deposit(did, payloads, expires_at=until)) for did, payloads in whole]
        assert [answer(deposited) for deposited in asked] == expected

    @rule(did=recipients, body=bodies, data=st.data())
    def deposit_twice(self, did: str, body: bytes, data: st.DataObject) -> None:
        if not self.known:
            return
        payloads = [Payload("once", body, "base64"), Payload(data.draw(st.sampled_from(self.known)), body, "json")]
        until = self.clock.seconds() + 5
        self.same(lambda store: store.deposit(did, payloads, expires_at=until))
        # It goes away again, so that its id can be used the next time.
        for account in ("did:a", "did:ab", "did:c", "did:d"):
            self.same(partial(self.forget_once, account))

    @staticmethod
    def forget_once(account: str, store: IStore) -> Deferred[Any]:
        return store.acknowledge(account, ["once"])

    @rule(account=accounts, did=scopes, limit=st.integers(0, 5), max_bytes=st.integers(0, 60))
    def fetch(self, account: str, did: str | None, limit: int, max_bytes: int) -> None:
        self.same(lambda store: store.fetch(account, did, limit=limit, max_bytes=max_bytes))

    @rule(account=accounts, did=scopes)
    def look(self, account: str, did: str | None) -> None:
        self.same(lambda store: store.status(account, did))
        self.same(lambda store: store.fetch(account, did, limit=99, max_bytes=9999))

    @rule(data=st.data())
    def mark_delivered(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        self.same(lambda store: store.mark_delivered(ids))

    @rule(data=st.data())
    def mark_pending(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        self.same(lambda store: store.mark_pending(ids))

    @rule(account=accounts, data=st.data())
    def acknowledge(self, account: str, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        self.same(lambda store: store.acknowledge(account, ids))

    @rule(span=spans, limit=st.integers(0, 3))
    def time_passes(self, span: float, limit: int) -> None:
        self.clock.advance(span)
        self.same(lambda store: store.next_due())
        self.same(lambda store: store.take_due(limit))
        self.same(lambda store: store.expire(limit))

    @rule(did=accounts)
    def grant(self, did: str) -> None:
        self.same(lambda store: store.grant(did))
        self.same(lambda store: store.mark_draft03(did))
        self.same(lambda store: store.account(did))

    @rule(
        account=accounts,
        updates=st.lists(st.tuples(recipients, st.sampled_from(["add", "remove"])), max_size=4),
        max_recipients=st.integers(1, 3),
    )
    def update(self, account: str, updates: list[tuple[str, Action]], max_recipients: int) -> None:
        self.same(lambda store: store.update(account, updates, max_recipients=max_recipients))

    @rule(account=accounts, did=recipients, offset=st.integers(0, 3), limit=st.integers(0, 3))
    def registrations(self, account: str, did: str, offset: int, limit: int) -> None:
        self.same(lambda store: store.recipients(account, offset=offset, limit=limit))
        self.same(lambda store: store.owner(did))

    @rule(prior=accounts, new=accounts)
    def move(self, prior: str, new: str) -> None:
        self.same(lambda store: store.move(prior, new))

    @rule(top=st.integers(0, 4))
    def queue_sizes(self, top: int) -> None:
        # Which of equally long queues comes first is nobody's promise.
        answers = [answer(store.queue_sizes(top)) for store in self.stores]
        lengths, rest = zip(*[([number for _, number in largest], rest) for largest, rest in answers], strict=True)
        assert lengths[0] == lengths[1] and rest[0] == rest[1], answers
        assert self.everything(self.stores[0]) == self.everything(self.stores[1])

    def everything(self, store: IStore) -> dict[str, int]:
        largest, rest = answer(store.queue_sizes(99))
        assert rest == 0
        return dict(largest)

    @rule(key=keys, ttl=spans, release=st.booleans())
    def claim(self, key: bytes, ttl: float, release: bool) -> None:
        until = self.clock.seconds() + ttl
        self.same(lambda store: store.claim(key, until))
        if release:
            self.same(lambda store: store.release(key))

    @rule()
    def prune(self) -> None:
        self.same(lambda store: store.prune())


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
