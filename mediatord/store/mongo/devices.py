"""
Devices and wake-ups in MongoDB.

An owner is known by the id of its account, which stays when the DID of that changes, or by the key of its Decentrl
party. Polls, wake-ups and claims are dates by the clock of the server. Whether messages are visible and devices have
expired is decided by the clock of the host, which wrote those times.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf

from bson import ObjectId, Timestamp
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import MediationNotGranted, TooManyDevices
from mediatord.protocol.canonical_did import is_decentrl_did
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW
from mediatord.store.interfaces.devices import (
    Device,
    FinishedWakeup,
    IDeviceStore,
    WakeupClaim,
    WakeupDecision,
    WakeupPolicy,
    WakeupRequest,
    WakeupState,
)
from mediatord.store.interfaces.messages import is_valid_unicode
from mediatord.store.mongo.decentrl_parties import PARTY_KEY_BYTES, make_party_key
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection as MongoCollection
from mediatord.store.mongo.driver.collection import Document, MongoCommand, batch_by_size
from mediatord.store.mongo.driver.operation import Operation, operation, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.schema import (
    ABSENT,
    ACCOUNTS,
    DEVICES,
    MESSAGES,
    PARTIES,
    PENDING_EVENTS,
    PRESENT,
    RECIPIENTS,
    WAKEUPS,
)
from mediatord.store.mongo.space_limit import MongoSpaceLimit

_OWNERS_PER_QUERY, _QUERY_BYTES = 1_000, 8_388_608
_TOKEN_BYTES = 12
# Seconds after which to ask again for a wake-up whose owner was changed by another process meanwhile.
_CONTENTION_DELAY = 0.1
# Messages of an account that are examined for one that was delayed; by the time at which it arrived.
_MAX_EXAMINED = 16
# `seq` of an imported message has this time.
_IMPORTED = 1
# Less than any key.
_FIRST_ACCOUNT, _FIRST_PARTY = ObjectId(bytes(12)), bytes(PARTY_KEY_BYTES)
# Polls do not wait for a majority: a failover loses only what was recorded a moment before.
_UNREPLICATED = {"writeConcern": {"w": 1}}

# An owner in the database: the id of an account, or the key of a party.
_OwnerKey = ObjectId | bytes
_Query = Callable[[MongoCommand], Awaitable[list[Document]]]


@dataclass(slots=True)
class _Candidate:
    """
    An owner that may be woken.

    :param wakeup: its document in WAKEUPS; an empty one if there is none.
    :param ids: of messages, the newest first.
    """

    key: _OwnerKey
    wakeup: Document = field(default_factory=dict)
    devices: list[Document] = field(default_factory=list)
    messages: int = 0
    size: int = 0
    ids: Sequence[str] = ()

    def build_claim_update(self, token: bytes, lease: float) -> Document:
        """Build an update that claims the wake-up if the document is as it was read, and else changes nothing."""
        times = [self.wakeup.get(name) for name in ("polled", "woken", "until")]
        claim = {"claimed": "$$NOW", "until": _build_time_in(lease), "token": token, "changed": "$$NOW"}
        is_unchanged = {"$eq": [["$polled", "$woken", "$until"], times]}
        change = {"$replaceWith": {"$cond": [is_unchanged, {"$mergeObjects": ["$$ROOT", claim]}, "$$ROOT"]}}
        return {"q": {"_id": self.key}, "u": [change], "upsert": True}

    def to_claim(self, owner: str, token: bytes) -> WakeupClaim:
        devices = tuple([_parse_device(one) for one in self.devices])
        return WakeupClaim(owner, devices, self.messages, self.size, tuple(self.ids), token)


@implementer(IDeviceStore)
class MongoDeviceStore:
    """
    Devices and wake-ups.

    :param clock: of the host; see the module.
    """

    def __init__(
        self, client: ReplicaSetClient, clock: IReactorTime, clocks: ClockSkewMonitor, space_limit: MongoSpaceLimit
    ) -> None:
        self._client = client
        self._clock = clock
        self._clocks = clocks
        self._space_limit = space_limit

    @operation
    async def set_device(self, owner: str, device: Device, max_devices: int) -> None:
        self._space_limit.admit("set_device")
        now = self._clock.seconds()

        async def set_device(t: Transaction) -> None:
            key = await _find_registered_owner(t, owner, now)
            found, others = await t.query_many(
                DEVICES.find({"_id": device.id}, projection={"owner": 1, "seq": 1}),
                DEVICES.find({"owner": key}, projection={"expires_at": 1}, hint="device_of_owner"),
            )
            place, expired = Timestamp(0, 0), [one["_id"] for one in others if _is_expired(one, now)]
            if found and found[0]["owner"] == key:
                place = found[0]["seq"]
            elif len(others) - len(expired) >= max_devices:
                raise TooManyDevices()
            document: Document = {"_id": device.id, "owner": key, "service": device.service, "sealed": device.sealed}
            if device.expires_at is not None:
                document["expires_at"] = float(device.expires_at)
            # The document of the owner is written too: concurrent registrations and its removal conflict with this.
            owners = ACCOUNTS if isinstance(key, ObjectId) else PARTIES
            t.write_at_end(
                owners.update({"_id": key}, {"$set": {"device_set": ObjectId()}}),
                DEVICES.delete({"_id": {"$in": [device.id, *expired]}}),
                DEVICES.insert([{**document, "seq": place}]),
                WAKEUPS.update({"_id": key}, [{"$set": {"changed": "$$NOW"}}], upsert=True),
            )

        await self._client.transact("set_device", set_device)

    @operation
    async def list_devices(self, owner: str, service: str | None = None) -> list[Device]:
        now = self._clock.seconds()
        with self._client.operate("list_devices") as run:
            owners = await _find_owners(run.query, [owner])
            wanted = {"owner": {"$in": list(owners.values())}}
            found = await run.query(DEVICES.find(wanted, sort={"seq": 1}, hint="device_of_owner"))
        return [
            _parse_device(one) for one in found if service in (None, one["service"]) and not _is_expired(one, now)
        ]

    @operation
    async def remove_devices(self, owner: str, service: str) -> int:
        with self._client.operate("remove_devices") as run:
            owners = await _find_owners(run.query, [owner])
            wanted = {"owner": {"$in": list(owners.values())}, "service": service}
            return _sum_deleted(await run.write(DEVICES.delete(wanted)))

    @operation
    async def forget_devices(self, ids: Sequence[bytes]) -> int:
        return _sum_deleted(await self._client.write("forget_devices", DEVICES.delete({"_id": {"$in": list(ids)}})))

    @operation
    async def expire_devices(self, limit: int) -> int:
        if limit <= 0:
            return 0
        expired = {"expires_at": {"$lte": self._clock.seconds()}}
        with self._client.operate("expire_devices") as run:
            found = await run.query(DEVICES.find(expired, limit=limit, projection={"_id": 1}, hint="device_expiry"))
            wanted = {"_id": {"$in": [one["_id"] for one in found]}, **expired}
            return _sum_deleted(await run.write(DEVICES.delete(wanted))) if found else 0

    @operation
    async def count_devices(self) -> dict[str, int]:
        # The condition lets the server read keys only.
        stages: list[Document] = [
            {"$match": {"service": {"$gte": ""}}},
            {"$group": {"_id": "$service", "number": {"$sum": 1}}},
            {"$sort": {"_id": 1}},
        ]
        found = await self._client.query("count_devices", DEVICES.aggregate(stages, hint="device_service"))
        return {one["_id"]: one["number"] for one in found}

    @operation
    async def scan_devices(self, after: bytes, limit: int) -> list[Device]:
        if limit <= 0:
            return []
        wanted = DEVICES.find({"_id": {"$gt": after}}, sort={"_id": 1}, limit=limit, hint="_id_")
        return [_parse_device(one) for one in await self._client.query("scan_devices", wanted)]

    @operation
    async def reseal_devices(self, changes: Sequence[tuple[Device, bytes]]) -> None:
        updates = [
            {"q": {"_id": device.id, "sealed": device.sealed}, "u": {"$set": {"sealed": sealed}}}
            for device, sealed in changes
        ]
        await self._client.write("reseal_devices", DEVICES.update_each(updates, ordered=False))

    @operation
    async def record_polls(self, ages: Mapping[str, float]) -> None:
        """
        Changes existing documents only, which all have that were woken or have a device. Their polls
        must not seem to know of what came while they waited to be written.
        """
        clock, began = self._client.clock, self._client.clock.seconds()
        for some in _split_dids(ages):
            with self._client.operate("record_polls") as run:
                owners = await _find_owners(run.query, some)
                updates = []
                for did, key in owners.items():
                    age = ages[did] + max(0.0, clock.seconds() - began)
                    polled = {"$max": ["$polled", _build_time_in(-age)]}
                    updates.append({"q": {"_id": key}, "u": [{"$set": {"polled": polled, "changed": "$$NOW"}}]})
                for command in WAKEUPS.update_each(updates, ordered=False):
                    await run.command(command.with_fields(_UNREPLICATED))

    @operation
    async def claim_wakeups(self, requests: Sequence[WakeupRequest], policy: WakeupPolicy) -> list[WakeupDecision]:
        self._clocks.check()
        ages: dict[str, float] = {}
        for owner, age in requests:
            ages[owner] = min(age, ages.get(owner, inf))
        decisions: dict[str, WakeupDecision] = {}
        for some in _split_dids(ages):
            with self._client.operate("claim_wakeups") as run:
                decisions |= await self._claim(run, {did: ages[did] for did in some}, policy)
        answers: list[WakeupDecision] = []
        for request in requests:
            answers.append(decisions.get(request.owner))
            if isinstance(answers[-1], WakeupClaim):
                decisions[request.owner] = policy.lease
        return answers

    async def _claim(
        self, run: Operation, ages: Mapping[str, float], policy: WakeupPolicy
    ) -> dict[str, WakeupDecision]:
        """Decide by what was read, and claim on the condition that it has not changed; those left out are not due."""
        now = self._clock.seconds()
        read = partial(_read_candidates, dids=ages, now=now, policy=policy)
        candidates = await run.transact(read, reading=True)
        decisions: dict[str, WakeupDecision] = {
            did: _decide(one.wakeup, ages[did], policy) for did, one in candidates.items()
        }
        due = {did: one for did, one in candidates.items() if decisions[did] == 0}
        if not due:
            return decisions
        token = os.urandom(_TOKEN_BYTES)
        updates = [one.build_claim_update(token, policy.lease) for one in due.values()]
        await retry_on_duplicate_key(lambda: run.write(WAKEUPS.update_each(updates, ordered=False)))
        found = await run.query(_build_wakeup_query([one.key for one in due.values()]))
        wakeups = {one["_id"]: one for one in found}
        for did, one in due.items():
            wakeup = wakeups.get(one.key, {})
            if hmac.compare_digest(wakeup.get("token", b""), token):
                decisions[did] = one.to_claim(did, token)
            else:
                wait = _decide(wakeup, ages[did], policy)
                decisions[did] = wait if wait is None else max(wait, _CONTENTION_DELAY)
        return decisions

    @operation
    async def finish_wakeups(self, finished: Sequence[FinishedWakeup]) -> None:
        for some in batch_by_size(finished, lambda one: len(one.owner), _QUERY_BYTES, _OWNERS_PER_QUERY):
            with self._client.operate("finish_wakeups") as run:
                owners = await _find_owners(run.query, {one.owner: None for one in some})
                updates = [
                    {"q": {"_id": owners[owner], "token": claim}, "u": _build_finish(retry_in)}
                    for owner, claim, retry_in in some
                    if owner in owners
                ]
                await run.write(WAKEUPS.update_each(updates, ordered=False))

    @operation
    async def find_owed_wakeups(
        self, after: str, limit: int, policy: WakeupPolicy, *, repeat_after: float = 0.0
    ) -> tuple[list[str], str | None]:
        """
        Goes through the owners of devices, or without those through all accounts and parties. Messages count as
        having arrived as late as the clocks allow.
        """
        self._clocks.check()
        now = self._clock.seconds()
        cursor = _OwnerCursor.parse(after, with_devices=not policy.without_devices)

        async def find(t: Transaction) -> tuple[list[str], str | None]:
            keys, following = await cursor.read(t, limit, now)
            newest, wakeups = await t.query_many(cursor.build_newest_query(keys, now), _build_wakeup_query(keys))
            states = {one["_id"]: one for one in wakeups}
            owed = []
            for one in newest:
                wakeup, arrival = states.get(one["_id"], {}), _find_last_arrival(one)
                server_now = _to_seconds(wakeup.get("now"))
                if arrival is not None and _parse_state(wakeup).is_owed(arrival, server_now, policy, repeat_after):
                    owed.append(one["did"])
            return owed, following

        return await self._client.transact("find_owed", find, reading=True)


async def _find_owners(query: _Query, dids: Iterable[str]) -> dict[str, _OwnerKey]:
    """Find the keys of owners; those without an account are left out."""
    valid = [did for did in dids if is_valid_unicode(did)]
    keys: dict[str, _OwnerKey] = {did: make_party_key(did) for did in valid if is_decentrl_did(did)}
    accounts = [did for did in valid if did not in keys]
    if accounts:
        found = await query(ACCOUNTS.find({"did": {"$in": accounts}}, projection={"did": 1}))
        keys |= {one["did"]: one["_id"] for one in found}
    return keys


async def _find_registered_owner(t: Transaction, did: str, now: float) -> _OwnerKey:
    """:raise MediationNotGranted: there is no such account or registration."""
    key = (await _find_owners(t.query, [did])).get(did)
    if isinstance(key, bytes):
        registered = PARTIES.find({"_id": key, "registered_until": {"$gt": now}}, projection={"_id": 1}, hint="_id_")
        key = key if await t.query(registered) else None
    if key is None:
        raise MediationNotGranted()
    return key


async def _read_candidates(
    t: Transaction, dids: Iterable[str], now: float, policy: WakeupPolicy
) -> dict[str, _Candidate]:
    """Read the owners that can be woken and for whom a message is visible and pending."""
    owners = await _find_owners(t.query, dids)
    candidates = {key: _Candidate(key) for key in owners.values()}
    keys = list(candidates)
    accounts, parties = _split_keys(keys)
    devices, wakeups, queues, events = await t.query_many(
        DEVICES.find({"owner": {"$in": keys}}, sort={"seq": 1}, hint="device_of_owner"),
        _build_wakeup_query(keys),
        _build_queue_query(accounts),
        PARTIES.find({"_id": {"$in": parties}}, projection={"pending": 1, "pending_bytes": 1}, hint="_id_"),
    )
    for one in devices:
        if not _is_expired(one, now):
            candidates[one["owner"]].devices.append(one)
    for one in wakeups:
        candidates[one["_id"]].wakeup = one
    for one in queues:
        candidate = candidates[one["_id"]]
        candidate.messages, candidate.size = one["messages"], one["bytes"]
    for one in events:
        candidate = candidates[one["_id"]]
        candidate.messages, candidate.size = one["pending"], one["pending_bytes"]
    possible = [one for one in candidates.values() if one.messages and (one.devices or policy.without_devices)]
    pending = await _read_newest_ids(t, possible, now, policy.max_message_ids)
    for candidate in possible:
        candidate.ids = pending.get(candidate.key, ())
    return {did: candidates[key] for did, key in owners.items() if key in pending}


def _build_queue_query(accounts: Sequence[ObjectId]) -> MongoCommand:
    """Build a query for the totals of accounts, which the server adds up, as each may have many queues."""
    queued = {"account": {"$in": accounts}, "messages": {"$gt": 0}}
    totals: Document = {"messages": {"$sum": "$messages"}, "bytes": {"$sum": "$bytes"}}
    stages: list[Document] = [{"$match": queued}, {"$group": {"_id": "$account", **totals}}]
    return RECIPIENTS.aggregate(stages, hint="recipient_order")


async def _read_newest_ids(
    t: Transaction, candidates: Iterable[_Candidate], now: float, number: int
) -> dict[_OwnerKey, list[str]]:
    """
    Read the ids of the newest visible pending messages of those owners that have one, the newest first.

    :param number: of ids; one of each account is read at least.
    """
    accounts, parties = _split_keys([one.key for one in candidates])
    ids: dict[_OwnerKey, list[str]] = {key: [] for key in parties}
    queries = []
    if accounts:
        limit = max(number, 1)
        queries.append(_build_lookup_query(ACCOUNTS, accounts, _build_visible_lookups(now, limit)))
    if parties and number:
        queries.append(_build_lookup_query(PARTIES, parties, {"newest": _build_event_lookup(number)}))
    for found in await t.query_many(*queries):
        for one in found:
            messages = sorted([*one["newest"], *one.get("due", ())], key=_get_seq, reverse=True)
            if messages:
                ids[one["_id"]] = [message["_id"] for message in messages[:number]]
    return ids


@dataclass(frozen=True, slots=True)
class _OwnerCursor:
    """
    A place in the order of all owners: accounts by their ids, and then parties by their keys.

    :param last: the key before; no key is less than the one that a protocol begins with.
    :param with_devices: whether only owners of devices count.
    """

    last: _OwnerKey
    with_devices: bool

    @classmethod
    def parse(cls, text: str, *, with_devices: bool) -> _OwnerCursor:
        protocol, _, last = (text or f"didcomm:{_FIRST_ACCOUNT}").partition(":")
        return cls(ObjectId(last) if protocol == "didcomm" else bytes.fromhex(last), with_devices)

    @property
    def owners(self) -> MongoCollection:
        return ACCOUNTS if isinstance(self.last, ObjectId) else PARTIES

    async def read(self, t: Transaction, limit: int, now: float) -> tuple[list[_OwnerKey], str | None]:
        """
        Read the next keys, from so many documents at most and the other devices of the last owner; and the cursor
        behind them, None at the end.
        """
        name, collection, hint = "_id", self.owners, "_id_"
        if self.with_devices:
            name, collection, hint = "owner", DEVICES, "device_of_owner"
        fields = {name: 1, "expires_at": 1}
        query = collection.find({name: {"$gt": self.last}}, projection=fields, sort={name: 1}, limit=limit, hint=hint)
        found = await t.query(query)
        keys = list(dict.fromkeys([one[name] for one in found if not _is_expired(one, now)]))
        if len(found) == limit:
            last = found[-1][name]
            if last not in keys:
                others = await t.query(collection.find({name: last}, projection=fields, hint=hint))
                if not all([_is_expired(one, now) for one in others]):
                    keys.append(last)
            return keys, _format_cursor(last)
        return keys, _format_cursor(_FIRST_PARTY) if isinstance(self.last, ObjectId) else None

    def build_newest_query(self, keys: Sequence[_OwnerKey], now: float) -> MongoCommand:
        """Build a query for what :func:`_find_last_arrival` needs, and the DIDs of the owners."""
        if self.owners is PARTIES:
            return _build_lookup_query(PARTIES, keys, {"newest": _build_event_lookup(1)})
        visible = {"due_at": ABSENT, "arrived_at": PRESENT, "expires_at": {"$gt": now}, "delivered": ABSENT}
        arrived = _build_message_lookup(visible, {"arrived_at": -1}, _MAX_EXAMINED)
        return _build_lookup_query(ACCOUNTS, keys, {**_build_visible_lookups(now, 1), "arrived": arrived})


def _format_cursor(key: _OwnerKey) -> str:
    return f"didcomm:{key}" if isinstance(key, ObjectId) else f"decentrl:{key.hex()}"


def _build_lookup_query(
    collection: MongoCollection, keys: Sequence[_OwnerKey], lookups: Mapping[str, Document]
) -> MongoCommand:
    """:param lookups: by the fields for what they find."""
    stages: list[Document] = [{"$match": {"_id": {"$in": list(keys)}}}, {"$project": {"did": 1}}]
    stages += [{"$lookup": {**lookup, "as": name}} for name, lookup in lookups.items()]
    return collection.aggregate(stages, hint="_id_")


def _build_visible_lookups(now: float, limit: int) -> dict[str, Document]:
    """Build lookups of visible pending messages: of those that are not delayed, and of those that were until now."""
    common = {"expires_at": {"$gt": now}, "delivered": ABSENT}
    return {
        "newest": _build_message_lookup({"due_at": ABSENT, **common}, {"seq": -1}, limit),
        "due": _build_message_lookup({"due_at": {"$lte": now}, **common}, {"due_at": -1}, limit),
    }


def _build_message_lookup(wanted: Document, order: Document, limit: int) -> Document:
    fields = {"seq": 1, "received_at": 1, "arrived_at": 1, "visible": 1}
    return _build_lookup(MESSAGES, "account", wanted, order, limit, fields)


def _build_event_lookup(limit: int) -> Document:
    return _build_lookup(PENDING_EVENTS, "party", {}, {"seq": -1}, limit, {"seq": 1, "received_at": 1})


def _build_lookup(
    collection: MongoCollection, owner: str, wanted: Document, order: Document, limit: int, fields: Document
) -> Document:
    stages: list[Document] = [{"$match": wanted}, {"$sort": order}, {"$limit": limit}, {"$project": fields}]
    return {"from": collection.name, "localField": "_id", "foreignField": owner, "pipeline": stages}


def _find_last_arrival(found: Document) -> float | None:
    """
    The latest time at which the newest visible pending message of an owner can have arrived or become visible, by the
    clock of the server, whose timestamps are exact to a second; None if there is no message.
    """
    if found.get("due"):
        return inf  # it has just become visible, as nobody has taken it yet
    arrivals = [_find_arrival(one, "seq", "received_at") for one in found["newest"]]
    delayed = [one for one in found.get("arrived", ()) if one["arrived_at"] > one["received_at"]]
    arrivals += [_find_arrival(one, "visible", "arrived_at") for one in delayed]
    return max(arrivals, default=None)


def _find_arrival(message: Document, stamp: str, time: str) -> float:
    """
    :param stamp: field with a timestamp of the server, if it is not that of an import.
    :param time: field with the same time by the clock of a host, which may be behind.
    """
    found: Timestamp | None = message.get(stamp)
    if found is None or found.time <= _IMPORTED:
        return float(message[time]) + MAX_CLOCK_SKEW
    return found.time + 1.0


def _build_wakeup_query(keys: Collection[_OwnerKey]) -> MongoCommand:
    fields: Document = dict.fromkeys(("polled", "woken", "until", "token"), 1) | {"now": "$$NOW"}
    return WAKEUPS.find({"_id": {"$in": list(keys)}}, projection=fields, hint="_id_")


def _build_finish(retry_in: float | None) -> list[Document]:
    """Build the change that ends a claim, or extends it."""
    if retry_in is not None:
        return [{"$set": {"until": _build_time_in(retry_in), "changed": "$$NOW"}}]
    return [{"$set": {"woken": "$claimed", "changed": "$$NOW"}}, {"$unset": ["claimed", "until", "token"]}]


def _build_time_in(seconds: float) -> Document:
    return {"$add": ["$$NOW", round(seconds * 1000)]}


def _decide(wakeup: Document, age: float, policy: WakeupPolicy) -> float | None:
    """Decide by a document of WAKEUPS; see :meth:`WakeupState.decide`."""
    now = _to_seconds(wakeup.get("now"))
    return _parse_state(wakeup).decide(now - age, now, policy) if wakeup else 0.0


def _parse_state(wakeup: Document) -> WakeupState:
    return WakeupState(*[_to_seconds(wakeup.get(name)) for name in ("polled", "woken", "until")])


def _to_seconds(time: datetime | None) -> float:
    """Seconds since the epoch; minus infinity for never."""
    return -inf if time is None else time.replace(tzinfo=UTC).timestamp()


def _parse_device(document: Document) -> Device:
    return Device(document["_id"], document["service"], document["sealed"], document.get("expires_at"))


def _is_expired(document: Document, now: float) -> bool:
    return float(document.get("expires_at", inf)) <= now


def _split_keys(keys: Iterable[_OwnerKey]) -> tuple[list[ObjectId], list[bytes]]:
    """Split keys into those of accounts and of parties."""
    accounts: list[ObjectId] = []
    parties: list[bytes] = []
    for key in keys:
        if isinstance(key, ObjectId):
            accounts.append(key)
        else:
            parties.append(key)
    return accounts, parties


def _split_dids(dids: Iterable[str]) -> Iterator[list[str]]:
    """Split distinct DIDs into chunks for one query."""
    return batch_by_size(dids, len, _QUERY_BYTES, _OWNERS_PER_QUERY)


def _sum_deleted(replies: Iterable[Document]) -> int:
    return sum([reply["n"] for reply in replies])


def _get_seq(document: Document) -> Timestamp:
    seq: Timestamp = document["seq"]
    return seq
