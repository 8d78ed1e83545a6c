"""Lists of the limits and memory buffers of the daemon for docs/reference/limits.md, with the values of the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

from twisted.web.http import HTTPChannel

from mediatord.app.push import WEB_PUSH_CONNECTIONS
from mediatord.config.settings import Config
from mediatord.config.value_syntax import format_size
from mediatord.delivery.connections import (
    MAX_BACKLOG_IDS,
    MAX_BACKLOG_IDS_PER_SUBSCRIPTION,
    MAX_DIDS_PER_SOCKET,
)
from mediatord.didcomm import endpoint_delivery
from mediatord.didcomm.pickup import MAX_REMEMBERED_PUSHES, MAX_UNACKNOWLEDGED_PUSHES
from mediatord.didcomm.replay_protection import MAX_RECENT_DIGESTS
from mediatord.didcomm_v1.pickup import MAX_BATCH_IDS, MAX_DELIVERED_IDS
from mediatord.http.channel import REQUEST_RECEIVE_TIMEOUT
from mediatord.http.flow_control import SMALL_RESPONSE_BYTES
from mediatord.http.resources import HTTPContext
from mediatord.http.websocket import MAX_FRAGMENTS, MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, MAX_UNDECRYPTABLE
from mediatord.net import name_lookups
from mediatord.net.listeners import TLS_HANDSHAKE_TIMEOUT
from mediatord.protocol.encoding import MAX_VALUES
from mediatord.push import requester, scheduler
from mediatord.ratelimit.admission import MAX_MEMORY_PER_ADDRESS, MAX_MEMORY_TOTAL, MEMORY_WAIT_SECONDS
from mediatord.runtime.request_time import REQUEST_TIME_LIMIT
from mediatord.store.disk_space import RESERVE_BYTES
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.registered_spellings import MAX_REGISTERED_SPELLINGS

_DEFAULTS = Config()
_DEADLINE: Any = next(field.default for field in fields(HTTPContext) if field.name == "deadline")


def _constant(path: str) -> Any:
    """A private constant of the daemon, such as `net.did_resolver:_MAX_CONCURRENT_FETCHES`."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"mediatord.{module}"), name)


def _size(number: int) -> str:
    text = format_size(number)
    return f"{text[:-3]} {text[-3:]}" if text.endswith("iB") else f"{number:,} bytes"


def _seconds(number: float) -> str:
    return f"{number:g} s"


def list_rates() -> Iterator[str]:
    """Limits per minute: what is limited, the default, the setting."""
    limits = _DEFAULTS.limits
    accounts = _constant("ratelimit.rate_limiter:_ACCOUNTS_PER_ADDRESS")
    charges = _constant("ratelimit.rate_limiter:_REQUESTS_PER_CHARGE")
    least = _constant("ratelimit.rate_limiter:_MIN_REQUESTS")
    requests = max(least, accounts * limits.account_per_minute, charges * limits.ip_per_minute)
    lookups = _constant("ratelimit.rate_limiter:_DID_LOOKUPS_PER_MINUTE")
    yield (
        f"forwards, invalid requests and requests without an account, per address: {limits.ip_per_minute}, "
        "`limits.ip_per_minute`"
    )
    yield f"forwards and outgoing commands, per sender DID: {limits.did_per_minute}, `limits.did_per_minute`"
    yield (
        f"mediation and pickup requests and other commands, per account: {limits.account_per_minute}, "
        "`limits.account_per_minute`"
    )
    yield f"reads of public channels, per address: {limits.account_per_minute}, `limits.account_per_minute`"
    yield (
        f"commands, per address: {accounts * limits.account_per_minute:,}, {accounts} × `limits.account_per_minute`"
    )
    yield (
        f"requests and WebSocket messages of any kind, per address and process: {requests:,}, the larger of "
        f"{charges} × `limits.ip_per_minute` and {accounts} × `limits.account_per_minute`, at least {least:,}; above "
        "it the connection is closed (WebSocket: 1008)"
    )
    yield (
        f"each limit above per address, for a trusted network: {limits.trusted_per_minute:,}, "
        "`limits.trusted_per_minute`"
    )
    connections = _DEFAULTS.didcomm_v1.connections_per_minute
    yield f"new connections of DIDComm v1, per address: {connections}, `didcomm_v1.connections_per_minute`"
    yield f"did:web documents fetched, per address: {lookups}"


def list_limits() -> Iterator[str]:
    """Other limits: what is limited, the value, what happens above it."""
    limits, queue, didcomm = _DEFAULTS.limits, _DEFAULTS.queue, _DEFAULTS.didcomm
    yield f"message, `limits.max_message_bytes`: {_size(limits.max_message_bytes)} (413; WebSocket: close code 1009)"
    yield f"HTTP request head: {_size(HTTPChannel.totalHeadersSize)} (400, or connection closed)"
    yield f"fragments of a WebSocket message: {MAX_FRAGMENTS:,} (close code 1009)"
    yield f"undecryptable messages on a WebSocket: {MAX_UNDECRYPTABLE - 1} (close code 1008)"
    yield f"JSON values in a message or command: {MAX_VALUES:,} (rejected as unreadable)"
    yield (
        "WebSockets per address and process, `limits.max_connections_per_ip`: "
        f"{limits.max_connections_per_ip}; per trusted network, `limits.trusted_connections`: "
        f"{limits.trusted_connections:,} (429)"
    )
    yield "other connections per address, except trusted proxies: 4 × the limit on WebSockets (connection closed)"
    yield f"TLS handshake: {_seconds(TLS_HANDSHAKE_TIMEOUT)} (connection closed)"
    yield f"receiving a request: {_seconds(REQUEST_RECEIVE_TIMEOUT)} (connection closed)"
    yield f"processing a request: {_seconds(_DEADLINE)} (503)"
    yield f"MongoDB operations of a request: {_seconds(REQUEST_TIME_LIMIT)} (503)"
    yield (
        f"messages per recipient DID, `queue.max_messages`, `queue.max_bytes`: {queue.max_messages:,}, "
        f"{_size(queue.max_bytes)} ([eviction](#full-queues), or 429)"
    )
    yield f"age of a message, `queue.ttl`: {queue.ttl / 3600:g} h (expired)"
    yield (
        "new accounts per address in 24 hours, `limits.accounts_per_address_per_day`: "
        f"{limits.accounts_per_address_per_day:,} (429 `registration_limited`)"
    )
    yield (
        "new bytes of registrations per address in 24 hours, `limits.registration_bytes_per_address_per_day`: "
        f"{_size(limits.registration_bytes_per_address_per_day)} (429 `registration_limited`)"
    )
    full = "503 `registrations_full`"
    yield f"accounts, `limits.accounts`: {limits.accounts:,} ({full})"
    yield f"bytes of registrations, `limits.registration_bytes`: {_size(limits.registration_bytes)} ({full})"
    yield (
        "connections of DIDComm v1 without an account, `didcomm_v1.max_pending_connections`: "
        f"{_DEFAULTS.didcomm_v1.max_pending_connections:,} (the oldest is removed)"
    )
    yield (
        f"forwards of DIDComm v1 that wait {_seconds(_constant('didcomm_v1.forwarding:REGISTRATION_WAIT'))} for the "
        f"registration of their key: {_constant('didcomm_v1.forwarding:MAX_WAITING_PER_PEER')} per address, "
        f"{_constant('didcomm_v1.forwarding:MAX_WAITING')} in total (404 at once)"
    )
    yield f"recipient DIDs per account, `didcomm.max_recipients`: {didcomm.max_recipients:,} (`client_error`)"
    yield f"spellings of a recipient DID: {MAX_REGISTERED_SPELLINGS} (`client_error`)"
    yield "items of a Decentrl identity: [`decentrl.max_...`](configuration.md) (429 `over_quota`)"
    yield (
        f"replay digests and nonces: {_nonces('sqlite_store:SQLiteStore'):,}; with `memory` "
        f"{_nonces('memory_store:MemoryStore'):,} (503 `replay_memory_full` for commands, recipient updates and "
        "rotations; other messages use a quarter and are not remembered beyond it)"
    )
    yield (
        "size of the database, `storage.*.max_bytes`: unlimited; free disk space, `storage.*.min_free_bytes`: 5 % of "
        "the disk, 256 MiB to 1 GiB, at most a tenth (503 for all that needs space; reads and deletions succeed)"
    )
    yield (
        "space reserved for deletions on a full disk (SQLite), each for database and write-ahead log: "
        f"{_size(RESERVE_BYTES)}, at most 1/16 of the disk"
    )
    yield (
        f"endpoint deliveries in parallel: {endpoint_delivery.MAX_CONCURRENT_POSTS} for each version of DIDComm, "
        f"{endpoint_delivery.MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT} to an account of v1 (they wait; "
        f"an account's beyond {endpoint_delivery.MAX_PENDING_PER_ACCOUNT} messages or "
        f"{_size(endpoint_delivery.MAX_PENDING_BYTES_PER_ACCOUNT)} stay queued)"
    )
    yield (
        f"replies by POST in parallel: {endpoint_delivery.MAX_REPLIES_PER_PEER} per address, in DIDComm v1 "
        f"{_constant('didcomm_v1.endpoint_delivery:MAX_REPLIES_PER_PEER')}, "
        f"{endpoint_delivery.MAX_CONCURRENT_POSTS} in total (reply on the connection)"
    )
    yield (
        f"requests to a push service in parallel, per host: {requester.MAX_REQUESTS_PER_HOST}, and "
        f"{requester.MAX_WAITING_PER_HOST:,} waiting; to all Web Push hosts that did not accept the last within 2 s: "
        f"{requester.MAX_UNTRUSTED_REQUESTS} (tried again later)"
    )
    web_push = WEB_PUSH_CONNECTIONS
    yield (
        f"connections of Web Push: {web_push.per_host} per host, {web_push.total} in total (after "
        f"{_seconds(web_push.wait or 0.0)} tried again later); its names looked up in parallel: "
        f"{name_lookups.MAX_LOOKUPS} (tried again later)"
    )
    yield (
        f"pause of a push service that fails: {_seconds(requester.INITIAL_BACKOFF)} after "
        f"{requester.FAILURES_BEFORE_BACKOFF} failures, doubled up to {_seconds(requester.MAX_BACKOFF)}; or as it "
        f"asks, at most {_seconds(requester.MAX_RETRY_AFTER)}"
    )
    yield f"devices per account, `push.max_devices`: {_DEFAULTS.push.max_devices} (problem report)"
    yield f"did:web documents fetched in parallel: {_constant('net.did_resolver:_MAX_CONCURRENT_FETCHES')} (429)"
    yield f"connections of the status page, per process: {_constant('admin.site:_MAX_CONNECTIONS')} (closed)"
    yield f"wrong tokens per address in a minute: {_constant('admin.site:_MAX_FAILED_ATTEMPTS')} (429)"


def _nonces(store: str) -> int:
    """Capacity of a store's replay cache."""
    defaults = _constant(f"store.sqlite.{store}").__init__.__kwdefaults__
    number: int = defaults["max_nonces"]
    return number


def list_buffers() -> Iterator[str]:
    """Memory buffers of a process by their name in metrics: contents, maximum, what happens when full."""
    store = BatchLimits()
    small, queued = _size(SMALL_RESPONSE_BYTES), "messages stay queued"
    forgotten = "the oldest is forgotten"
    rows = {
        "socket_outboxes": (
            "unsent WebSocket frames",
            f"64 frames or `limits.max_outbox_bytes` per socket, and {small} in its transport",
            queued,
        ),
        "socket_inboxes": (
            "received WebSocket messages",
            f"{MAX_QUEUED_MESSAGES} messages or {_size(MAX_QUEUED_BYTES)} per socket, and one of "
            "`limits.max_message_bytes`",
            "the socket is not read",
        ),
        "http_requests": (
            "incomplete and pipelined requests; entries are connections",
            f"`limits.max_message_bytes` and {small} per connection",
            "413, or connection closed",
        ),
        "requests_in_progress": (
            "requests being processed, by estimated memory",
            f"{_size(MAX_MEMORY_PER_ADDRESS)} per address, {_size(MAX_MEMORY_TOTAL)} in total",
            f"they wait for {_seconds(MEMORY_WAIT_SECONDS)}, then 429",
        ),
        "http_answers": (
            "unsent HTTP responses; entries are addresses",
            f"`limits.max_unread_bytes`, an eighth of it per address, and {small} per connection",
            "429",
        ),
        "store_operations": (
            "operations waiting for the store",
            f"{store.waiting:,} or {_size(store.waiting_bytes)}",
            "503",
        ),
        "event_log": (
            "unwritten event log lines",
            _size(_constant("observability.segments:SegmentLimits")().buffer),
            "lines are lost, and counted",
        ),
        "live_pushes": (
            "unacknowledged pushes",
            f"{MAX_UNACKNOWLEDGED_PUSHES:,}",
            "the oldest is pending again",
        ),
        "remembered_pushes": ("recently pushed messages", f"{MAX_REMEMBERED_PUSHES:,}", forgotten),
        "remembered_events": (
            "recently pushed Decentrl events",
            f"{_constant('decentrl.event_push:_MAX_REMEMBERED_PUSHES'):,}",
            forgotten,
        ),
        "counted_pushes": (
            "push attempts per message, for the event log",
            f"{_constant('observability.event_recorder:_MAX_ATTEMPT_COUNTERS'):,}",
            "the oldest is counted from 1 again",
        ),
        "seen_forwards": ("recent forwards, to detect repeated ones", f"{MAX_RECENT_DIGESTS:,}", forgotten),
        "seen_pickups": ("recent pickup requests, likewise", f"{MAX_RECENT_DIGESTS:,}", forgotten),
        "seen_v1_forwards": ("recent forwards of DIDComm v1, likewise", f"{MAX_RECENT_DIGESTS:,}", forgotten),
        "seen_v1_pickups": ("recent pickup requests of DIDComm v1, likewise", f"{MAX_RECENT_DIGESTS:,}", forgotten),
        "v1_batches": (
            "messages in the last batch of each DIDComm v1 wallet with Message Pickup 1.0",
            f"{MAX_BATCH_IDS:,}",
            "the oldest batch is handed out again",
        ),
        "v1_deliveries": (
            "messages that DIDComm v1 wallets were sent a moment ago on request, and have not acknowledged",
            f"{MAX_DELIVERED_IDS:,}",
            "the oldest may be sent twice",
        ),
        "rate_limits": (
            "senders, addresses and accounts with recent requests",
            f"20,000 and {_constant('ratelimit.rate_limiter:_SHARED_GROUPS'):,} shared groups for each limit",
            "new ones share the allowance of a group",
        ),
        "did_documents": (
            "cached DID documents",
            "4,096 or 32 MiB; of did:web 1,024 or 16 MiB",
            "the least recently used is evicted",
        ),
        "subscriptions": (
            "DIDs with live delivery",
            f"{MAX_DIDS_PER_SOCKET} per socket",
            "`e.m.live-mode-not-supported`",
        ),
        "subscription_backlogs": (
            "ids queued when a socket went live; with several nodes",
            f"{MAX_BACKLOG_IDS:,}; {MAX_BACKLOG_IDS_PER_SUBSCRIPTION:,} per subscription",
            "the oldest may be pushed",
        ),
        "endpoint_deliveries": (
            "messages being delivered to endpoints",
            f"{endpoint_delivery.MAX_PENDING_PER_ACCOUNT} or "
            f"{_size(endpoint_delivery.MAX_PENDING_BYTES_PER_ACCOUNT)} per account, "
            f"{_size(endpoint_delivery.MAX_PENDING_BYTES)} in total",
            queued,
        ),
        "queued_for_endpoints": (
            "accounts of DIDComm v1 whose messages stayed queued",
            f"{_constant('didcomm_v1.endpoint_delivery:MAX_ACCOUNTS'):,}",
            "they are tried again within an hour",
        ),
        "wakeups": (
            "accounts to wake",
            f"{scheduler.MAX_NOTED_ACCOUNTS:,}; of them {scheduler.MAX_WAKEUPS_AT_ONCE:,} at a time",
            "they are found in the store later",
        ),
        "presence_lookups": (
            "messages whose recipient is looked up on other nodes",
            f"{_constant('cluster.remote_delivery:MAX_PENDING'):,} or "
            f"{_size(_constant('cluster.remote_delivery:MAX_PENDING_BYTES'))}",
            queued,
        ),
        "cluster_hints": (
            "pushes for other nodes or workers",
            f"{_constant('cluster.peer_notifications:MAX_QUEUED'):,} per node, "
            f"{_constant('workers.sibling_channel:MAX_OUTSTANDING'):,} per worker, or "
            f"{_size(_constant('cluster.peer_notifications:MAX_QUEUED_BYTES'))} each",
            queued,
        ),
        "late_pushes": (
            "ids from other workers",
            f"{_constant('workers.sibling_channel:MAX_LATE'):,} messages, events and DIDs each",
            queued,
        ),
    }
    return (f"`{name}`, {contents}: {maximum} ({when_full})" for name, (contents, maximum, when_full) in rows.items())
