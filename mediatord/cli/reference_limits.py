"""Tables of the limits and memory buffers of the daemon for docs/reference/limits.md, with the values of the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

from twisted.web.http import HTTPChannel

from mediatord.config.settings import Config
from mediatord.config.value_syntax import format_size
from mediatord.delivery.connections import (
    MAX_BACKLOG_IDS,
    MAX_BACKLOG_IDS_PER_SUBSCRIPTION,
    MAX_DIDS_PER_SOCKET,
)
from mediatord.didcomm import endpoint_delivery
from mediatord.didcomm.forward_router import MAX_REMEMBERED_FORWARDS
from mediatord.didcomm.pickup import MAX_REMEMBERED_PUSHES, MAX_UNACKNOWLEDGED_PUSHES
from mediatord.http.channel import REQUEST_RECEIVE_TIMEOUT
from mediatord.http.flow_control import SMALL_RESPONSE_BYTES
from mediatord.http.resources import HTTPContext
from mediatord.http.websocket import MAX_FRAGMENTS, MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, MAX_UNDECRYPTABLE
from mediatord.net.listeners import TLS_HANDSHAKE_TIMEOUT
from mediatord.protocol.encoding import MAX_VALUES
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


def list_rates() -> Iterator[tuple[str, str, str]]:
    """Limits per minute: what is limited, the default, the setting."""
    limits = _DEFAULTS.limits
    accounts = _constant("ratelimit.rate_limiter:_ACCOUNTS_PER_ADDRESS")
    charges = _constant("ratelimit.rate_limiter:_REQUESTS_PER_CHARGE")
    least = _constant("ratelimit.rate_limiter:_MIN_REQUESTS")
    requests = max(least, accounts * limits.account_per_minute, charges * limits.ip_per_minute)
    lookups = _constant("ratelimit.rate_limiter:_DID_LOOKUPS_PER_MINUTE")
    yield (
        "forwards, invalid requests and requests without an account, per address",
        f"{limits.ip_per_minute}",
        "`limits.ip_per_minute`",
    )
    yield "forwards and outgoing commands, per sender DID", f"{limits.did_per_minute}", "`limits.did_per_minute`"
    yield (
        "mediation and pickup requests and other commands, per account",
        f"{limits.account_per_minute}",
        "`limits.account_per_minute`",
    )
    yield "reads of public channels, per address", f"{limits.account_per_minute}", "`limits.account_per_minute`"
    yield (
        "commands, per address",
        f"{accounts * limits.account_per_minute:,}",
        f"{accounts} × `limits.account_per_minute`",
    )
    yield (
        "requests and WebSocket messages of any kind, per address and process; above it the connection is closed "
        "(WebSocket: 1008)",
        f"{requests:,}",
        f"{charges} × `limits.ip_per_minute` or {accounts} × `limits.account_per_minute`, the larger one, at least "
        f"{least:,}",
    )
    yield (
        "each limit above per address, for a trusted network",
        f"{limits.trusted_per_minute:,}",
        "`limits.trusted_per_minute`",
    )
    yield "did:web documents fetched, per address", f"{lookups}", ""


def list_limits() -> Iterator[tuple[str, str, str]]:
    """Other limits: what is limited, the value, what happens above it."""
    limits, queue, didcomm = _DEFAULTS.limits, _DEFAULTS.queue, _DEFAULTS.didcomm
    yield "message, `limits.max_message_bytes`", _size(limits.max_message_bytes), "413; WebSocket: close code 1009"
    yield "HTTP request head", _size(HTTPChannel.totalHeadersSize), "400, or connection closed"
    yield "fragments of a WebSocket message", f"{MAX_FRAGMENTS:,}", "close code 1009"
    yield "undecryptable messages on a WebSocket", f"{MAX_UNDECRYPTABLE - 1}", "close code 1008"
    yield "JSON values in a message or command", f"{MAX_VALUES:,}", "rejected as unreadable"
    yield (
        "WebSockets per address and process, `limits.max_connections_per_ip`; per trusted network, "
        "`limits.trusted_connections`",
        f"{limits.max_connections_per_ip}; {limits.trusted_connections:,}",
        "429",
    )
    yield (
        "other connections per address, except trusted proxies, 4 × the limit on WebSockets",
        f"{4 * limits.max_connections_per_ip}; {4 * limits.trusted_connections:,}",
        "connection closed",
    )
    yield "TLS handshake", _seconds(TLS_HANDSHAKE_TIMEOUT), "connection closed"
    yield "receiving a request", _seconds(REQUEST_RECEIVE_TIMEOUT), "connection closed"
    yield "processing a request", _seconds(_DEADLINE), "503"
    yield "MongoDB operations of a request", _seconds(REQUEST_TIME_LIMIT), "503"
    yield (
        "messages per recipient DID, `queue.max_messages`, `queue.max_bytes`",
        f"{queue.max_messages:,}; {_size(queue.max_bytes)}",
        "[eviction](#full-queues), or 429",
    )
    yield "age of a message, `queue.ttl`", f"{queue.ttl / 3600:g} h", "dropped"
    yield (
        "new accounts per address in 24 hours, `limits.accounts_per_address_per_day`",
        f"{limits.accounts_per_address_per_day:,}",
        "429 `registration_limited`",
    )
    yield (
        "new bytes of registrations per address in 24 hours, `limits.registration_bytes_per_address_per_day`",
        _size(limits.registration_bytes_per_address_per_day),
        "429 `registration_limited`",
    )
    full = "503 `registrations_full`"
    yield "accounts, `limits.accounts`", f"{limits.accounts:,}", full
    yield "bytes of registrations, `limits.registration_bytes`", _size(limits.registration_bytes), full
    yield "recipient DIDs per account, `didcomm.max_recipients`", f"{didcomm.max_recipients:,}", "`client_error`"
    yield "spellings of a recipient DID", f"{MAX_REGISTERED_SPELLINGS}", "`client_error`"
    yield (
        "items of a Decentrl identity, `decentrl.max_...`",
        "see [configuration](configuration.md)",
        "429 `over_quota`",
    )
    yield (
        "replay digests and nonces; with `memory`",
        f"{_nonces('sqlite_store:SQLiteStore'):,}; {_nonces('memory_store:MemoryStore'):,}",
        "503 `replay_memory_full` for commands, recipient updates and rotations; other messages use a quarter and "
        "are not remembered beyond it",
    )
    yield (
        "database, `storage.*.max_bytes`, and free disk space, `storage.*.min_free_bytes`",
        "unlimited; 5 % of the disk, 256 MiB to 1 GiB, at most a tenth",
        "503 for all that needs space; reads and deletions succeed",
    )
    yield (
        "space reserved for deletions on a full disk (SQLite), each for database and write-ahead log",
        f"{_size(RESERVE_BYTES)}, at most 1/16 of the disk",
        "",
    )
    yield (
        "endpoint deliveries in parallel",
        f"{endpoint_delivery.MAX_CONCURRENT_POSTS}",
        "they wait; an account's beyond "
        f"{endpoint_delivery.MAX_PENDING_PER_ACCOUNT} messages or "
        f"{_size(endpoint_delivery.MAX_PENDING_BYTES_PER_ACCOUNT)} stay queued",
    )
    yield (
        "replies by POST in parallel, per address; in total",
        f"{endpoint_delivery.MAX_REPLIES_PER_PEER}; {endpoint_delivery.MAX_CONCURRENT_POSTS}",
        "reply on the connection",
    )
    fetches = _constant("net.did_resolver:_MAX_CONCURRENT_FETCHES")
    yield "did:web documents fetched in parallel", f"{fetches}", "429"
    yield "connections of the status page, per process", f"{_constant('admin.site:_MAX_CONNECTIONS')}", "closed"
    yield "wrong tokens per address in a minute", f"{_constant('admin.site:_MAX_FAILED_ATTEMPTS')}", "429"


def _nonces(store: str) -> int:
    """Capacity of a store's replay cache."""
    defaults = _constant(f"store.sqlite.{store}").__init__.__kwdefaults__
    number: int = defaults["max_nonces"]
    return number


def list_buffers() -> Iterator[tuple[str, str, str, str]]:
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
        "seen_forwards": ("recent forwards, to detect repeated ones", f"{MAX_REMEMBERED_FORWARDS:,}", forgotten),
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
        "presence_lookups": (
            "messages whose recipient is looked up on other nodes; with several nodes or workers",
            f"{_constant('cluster.remote_delivery:MAX_PENDING'):,} or "
            f"{_size(_constant('cluster.remote_delivery:MAX_PENDING_BYTES'))}",
            f"{queued}, and are retried later",
        ),
        "cluster_hints": (
            "pushes for other nodes; in a cluster",
            f"{_constant('cluster.peer_notifications:MAX_QUEUED'):,} or "
            f"{_size(_constant('cluster.peer_notifications:MAX_QUEUED_BYTES'))} per node",
            f"{queued}, and are retried later",
        ),
    }
    return ((f"`{name}`", contents, maximum, when_full) for name, (contents, maximum, when_full) in rows.items())
