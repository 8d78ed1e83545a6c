"""A store with data of all kinds in all states, and its query results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from random import Random
from typing import Any

from mediatord.errors import MediatorError
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)
from mediatord.store.interfaces.devices import (
    DEVICE_ID_BYTES,
    MAX_CLAIM_SECONDS,
    Device,
    FinishedWakeup,
    WakeupClaim,
    WakeupPolicy,
    WakeupRequest,
)
from mediatord.store.interfaces.messages import ArrivalWindow, Payload, StoredMessage
from mediatord.store.interfaces.store import IStore, RecipientUpdateAction
from mediatord.store.interfaces.v1_connections import V1Connection

FAR_FUTURE = 4_102_444_800.0
WALLETS = tuple(f"did:example:wallet-{number}" for number in range(6))
INBOXES = tuple(f"did:key:z6MkInbox{number}" for number in range(14))
IDENTITIES = tuple(f"did:decentrl:{name}" for name in ("ann", "bob", "çelik", "dan", "eve", "nobody"))
V1_WALLETS = tuple(f"did:key:z6MkV1{number}" for number in (3, 0, 4, 1, 2, 5))
TAGS = ("red", "grün", "", "blue sky", "🙂")
CHANNELS = ("news", "weather", None)
ALL = PageRequest(0, 10_000)
WAKEUP_POLICY = WakeupPolicy(min_interval=20.0, quiet_after_poll=0.0, lease=MAX_CLAIM_SECONDS)


@dataclass(eq=False, slots=True)
class StorePopulator:
    """
    Fills a store by its own operations.

    :param now: time of the store's clock.

    :ivar messages: ids of all enqueued messages; `events` and `public` have the ids of events with their owners.
    """

    store: IStore
    random: Random
    now: float
    numbers: count[int] = field(default_factory=count)
    messages: list[str] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    public: list[tuple[str, str]] = field(default_factory=list)

    async def fill(self, rounds: int) -> None:
        """Run each operation so many times."""
        await self._enrol()
        for _ in range(rounds):
            await self._run_message_operations()
            await self._change_owner()
            await self._run_decentrl_operations()
        await self._rotate()

    async def _enrol(self) -> None:
        for wallet in WALLETS:
            await self.store.grant(wallet)
        await self.store.mark_draft03(WALLETS[2])
        for position, inbox in enumerate(INBOXES):
            await self._update(WALLETS[position % 4], inbox, "add")
        for number in range(5):
            await self.store.remember_did(f"did:peer:4short{number}", f"did:peer:4short{number}:long")
        for number in range(9):
            await self.store.claim_nonce(b"nonce %d" % number, FAR_FUTURE + number)
        await self.store.release_nonce(b"nonce 3")
        await self._save_contracts()

    async def _save_contracts(self) -> None:
        for identity in IDENTITIES[:5] * 2:
            registration = self._make_contract(None, identity, FAR_FUTURE + self.random.random())
            await self.store.decentrl.save_contract(self._make_guard(), registration)
        for owner in IDENTITIES[:4]:
            for peer in IDENTITIES[:3]:
                await self.store.decentrl.save_contract(
                    self._make_guard(), self._make_contract(owner, peer, FAR_FUTURE)
                )
        # The event came while there was a contract, which has expired.
        await self.store.decentrl.save_contract(
            self._make_guard(), self._make_contract(IDENTITIES[0], IDENTITIES[4], self.now - 1.0)
        )

    async def _run_message_operations(self) -> None:
        for inbox in self.random.sample(INBOXES, 4):
            expires_at = self.random.choice([self.now + 3600.125, self.now + 7200.1, self.now - 1.0])
            due_at = self.random.choice([None, None, self.now - 0.5, self.now + 600.3, self.now + 9000.0])
            data = self.random.randbytes(self.random.choice([0, 1, 40, 5000]))
            payloads = [Payload(self._make_id(), data + bytes([part]), "json") for part in range(2)]
            if await self._succeeds(self.store.enqueue(inbox, payloads, expires_at=expires_at, due_at=due_at)):
                self.messages += [payload.id for payload in payloads]
        some = self.random.sample(self.messages, min(3, len(self.messages)))
        await self.store.mark_delivered(some, node=self.random.choice(["", "boot-1"]))
        await self.store.take_due_messages(1)
        await self.store.acknowledge(self.random.choice(WALLETS), self.random.sample(self.messages, 1))

    async def _change_owner(self) -> None:
        inbox = self.random.choice(INBOXES)
        await self._update(self.random.choice(WALLETS[:4]), inbox, "remove")
        await self._update(self.random.choice(WALLETS[:4]), inbox, "add")

    async def _run_decentrl_operations(self) -> None:
        decentrl, draw = self.store.decentrl, self.random
        owner, sender = draw.choice(IDENTITIES[:4]), draw.choice(IDENTITIES[:3])
        event = PendingEvent(self._make_id(), owner, sender, "é" * draw.randrange(9), self.now + draw.random())
        await self._succeeds(decentrl.enqueue_event(self._make_guard(), event))
        await decentrl.request_contract(
            self._make_guard(),
            ContractRequest(self._make_id(), f"did:stranger:{draw.randrange(99)}", owner, "sealed", "key"),
        )
        stored = [
            StoredEvent(
                self._make_id(), draw.choice([owner, sender]), sender, "z" * draw.randrange(40), self._make_tags(), at
            )
            for at in (self.now + draw.random(), 1.5, 1e-7)
        ]
        await decentrl.save_events(self._make_guard(), owner, [replace(stored[0], contract_id="c"), *stored[1:]])
        self.events += [(owner, one.id) for one in stored]
        shown = PublicEvent(
            self._make_id(), '{"a": 1}', self._make_tags(), draw.random(), "signature", draw.choice(CHANNELS)
        )
        await decentrl.publish(self._make_guard(), owner, shown)
        self.public.append((owner, shown.id))
        who, id = draw.choice(self.events)
        await decentrl.update_tags(self._make_guard(), who, [(id, self._make_tags())])
        if draw.random() < 0.3:
            who, id = self.public.pop(draw.randrange(len(self.public)))
            await decentrl.unpublish(self._make_guard(), who, id)

    async def register_devices(self) -> None:
        """Register devices, and wake some of their owners."""
        owners, devices = [WALLETS[0], *WALLETS[2:5], *IDENTITIES[:3]], self.store.devices
        for number, owner in enumerate(owners * 2):
            id, service = self.random.randbytes(DEVICE_ID_BYTES), ("fcm", "apns", "web_push")[number % 3]
            expires_at = FAR_FUTURE + self.random.random() if service == "web_push" else None
            await devices.set_device(owner, Device(id, service, self.random.randbytes(90), expires_at), 10)
        await devices.record_polls({owner: self.random.random() for owner in owners[::2]})
        requests = [WakeupRequest(owner, -60.0) for owner in owners]
        claims = [one for one in await devices.claim_wakeups(requests, WAKEUP_POLICY) if isinstance(one, WakeupClaim)]
        await devices.finish_wakeups([FinishedWakeup(one.owner, one.claim) for one in claims[1:]])

    async def connect_v1_wallets(self) -> None:
        """Connect wallets that speak DIDComm v1, some of which have an account."""
        for number, wallet in enumerate(V1_WALLETS):
            if number % 3 == 0:
                await self.store.grant(wallet)
            connection = V1Connection(wallet, f"{wallet}Own", f"request {number}")
            more: dict[str, Any] = (
                {}
                if number % 2
                else {
                    "endpoint": f"https://{number}.example/",
                    "routing_keys": ("did:key:z6MkRouting", f"did:key:z6Mk{number}"),
                    "has_base58_keys": True,
                    "implicit_pickup": "raw",
                }
            )
            await self.store.v1_connections.put_connection(replace(connection, **more), max_pending=len(V1_WALLETS))

    async def _rotate(self) -> None:
        await self.store.move_account(WALLETS[1], "did:example:rotated")
        await self.store.move_account(WALLETS[5], "did:example:rotated-too")
        for identity in IDENTITIES[:2]:
            waiting = await self.store.decentrl.pending_events(identity, None, ALL)
            await self.store.decentrl.acknowledge_events(
                self._make_guard(), identity, [item.id for item in waiting.items[:1]]
            )

    async def _update(self, wallet: str, inbox: str, action: RecipientUpdateAction) -> None:
        await self._succeeds(self.store.update_recipients(wallet, [(inbox, action)], max_recipients=100))

    async def _succeeds(self, deferred: Any) -> bool:
        """Whether the operation was not refused."""
        try:
            await deferred
        except MediatorError:
            return False
        return True

    def _make_contract(self, owner: str | None, peer: str, until: float) -> Contract:
        id = self._make_id()
        return Contract(id, owner, peer, until, sha256(id.encode()).digest(), b'{"signed": "%s"}' % id.encode())

    def _make_guard(self) -> CommandGuard:
        return CommandGuard(b"guard %d" % next(self.numbers), FAR_FUTURE)

    def _make_tags(self) -> tuple[str, ...]:
        return tuple(self.random.sample(TAGS, self.random.randrange(4)))

    def _make_id(self) -> str:
        """An id that begins with the time, like those of the daemon."""
        return f"{next(self.numbers):08d}"


async def query_everything(
    store: IStore, wallets: Sequence[str] = (*WALLETS, "did:example:rotated")
) -> dict[str, Any]:
    """Results of all queries of a store, except for data that a restart changes."""
    results: dict[str, Any] = {}
    for wallet in wallets:
        results[f"account {wallet}"] = await store.get_account(wallet)
        results[f"recipients {wallet}"] = await store.list_recipients(wallet, offset=0, limit=1000)
        for inbox in (None, *INBOXES):
            results[f"status {wallet} {inbox}"] = await store.get_queue_status(wallet, inbox)
            found = await store.fetch_messages(wallet, inbox, limit=10_000, max_bytes=1 << 40)
            results[f"fetch {wallet} {inbox}"] = [_to_pending(one) for one in found]
    results["arrived"] = await store.find_arrivals(wallets, ArrivalWindow(0.0, FAR_FUTURE), limit=10_000)
    for inbox in INBOXES:
        results[f"owner {inbox}"] = await store.find_owner(inbox)
    sizes, rest = await store.queue_sizes(1000)
    results["sizes"] = sorted(sizes), rest
    results["waiting"] = await store.get_queue_totals()
    results["due"] = await store.find_next_due()
    results["long forms"] = [await store.recall_did(f"did:peer:4short{number}") for number in range(6)]
    return results | await _query_decentrl(store)


async def query_devices(store: IStore) -> dict[str, Any]:
    """Results of all queries of devices and owed wake-ups."""
    results: dict[str, Any] = {"devices": await store.devices.count_devices()}
    for owner in (*WALLETS, *IDENTITIES):
        results[f"devices {owner}"] = await store.devices.list_devices(owner)
    owed: list[str] = []
    after: str | None = ""
    while after is not None:
        some, after = await store.devices.find_owed_wakeups(after, 5, WAKEUP_POLICY)
        owed += some
    return results | {"owed wake-ups": sorted(owed)}


async def query_v1_connections(store: IStore) -> dict[str, Any]:
    """Results of all queries of connections of DIDComm v1."""
    connections = store.v1_connections
    found = await connections.scan_connections("", 100)
    results: dict[str, Any] = {"v1 connections": found, "v1 numbers": await connections.count_connections()}
    for one in found:
        results[f"v1 connection {one.own_key}"] = await connections.find_connection(one.own_key)
        results[f"v1 account {one.account}"] = await store.get_account(one.account)
    return results


async def _query_decentrl(store: IStore) -> dict[str, Any]:
    results: dict[str, Any] = {}
    decentrl = store.decentrl
    for identity in IDENTITIES:
        results[f"registered {identity}"] = await decentrl.registered_until(identity)
        results[f"requests {identity}"] = await decentrl.contract_requests(identity, ALL)
        for other in (None, *IDENTITIES):
            results[f"contracts {identity} {other}"] = await decentrl.contracts(
                identity, ContractFilter(did=other), ALL
            )
            results[f"pending {identity} {other}"] = await decentrl.pending_events(identity, other, ALL)
            results[f"events {identity} {other}"] = await decentrl.events(
                identity, EventFilter(participant=other), ALL
            )
        results[f"unprocessed {identity}"] = await decentrl.events(identity, EventFilter(unprocessed_only=True), ALL)
        for tag in TAGS:
            results[f"tagged {identity} {tag}"] = await decentrl.events(identity, EventFilter(tags=(tag,)), ALL)
            results[f"shown {identity} {tag}"] = await decentrl.public_events(
                identity, PublicEventFilter(tags=(tag,)), ALL
            )
        for channel in CHANNELS:
            wanted = PublicEventFilter(channel_id=channel)
            results[f"channel {identity} {channel}"] = await decentrl.public_events(identity, wanted, ALL)
    return results


def _to_pending(message: StoredMessage) -> StoredMessage:
    return replace(message, status="pending")


async def acknowledge_everything(store: IStore, wallets: Sequence[str] = (*WALLETS, "did:example:rotated")) -> None:
    """Acknowledge all visible messages, so that only delayed and expired ones still count."""
    for wallet in wallets:
        found = await store.fetch_messages(wallet, None, limit=10_000, max_bytes=1 << 40)
        await store.acknowledge(wallet, [item.id for item in found])
