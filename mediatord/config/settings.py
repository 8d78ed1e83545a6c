"""
The kinds of value that a setting can have. Every refusal is a :class:`ValueError` that says what was expected.

Every setting with its default and its one line of explanation.

The models are the one declaration: the reader checks against them, and `etc/mediator.yaml` is written from them.
Nothing past the wiring sees them; classes receive plain values.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from twisted.internet.endpoints import quoteStringArgument, serverFromString

from mediatord.config.endpoint_strings import parse_endpoint_string, resolve_endpoint_paths
from mediatord.config.units import parse_size
from mediatord.private_file import resolve_secret_path
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_MAX_PORT = 65535
# What a database can count to.
_MAX_SIZE = 2**63 - 1
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@,]*")
_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")


@dataclass(frozen=True)
class DurationMarker:
    """Tells the template that a float is written with a unit."""


@dataclass(frozen=True)
class SizeMarker:
    """Tells the template that a whole number is written with a unit."""


@dataclass(frozen=True)
class ValueKind:
    """
    What operators call such a value, in the reference.

    :param example: one, for error messages; empty where there is none worth showing.
    """

    words: str
    example: str = ""


def _parse_duration(value: object) -> float:
    """Seconds, from a number of them or from `72h` and the like."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match[1]) * _DURATION_UNITS[match[2] or "s"]
    else:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("expected a duration such as 72h, 60s, 500ms or a number of seconds")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration; days only from a week on, so that 72h stays 72h."""
    milliseconds = round(seconds * 1000)
    if milliseconds % 1000:
        return f"{milliseconds}ms"
    whole = milliseconds // 1000
    for unit, size, least in (("d", 86400, 7 * 86400), ("h", 3600, 3600), ("m", 60, 600)):
        if whole >= least and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def _parse_size_value(value: object) -> int:
    """Bytes, from a number of them or from `64MiB` and the like."""
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError:
        size = None
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError("expected a size such as 64MiB, 512k or a number of bytes")
    if size > _MAX_SIZE:
        raise ValueError(f"expected at most {_MAX_SIZE} bytes")
    return size


def _parse_network(value: object) -> IPv4Network | IPv6Network:
    """An address or a network in CIDR notation."""
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    try:
        if not isinstance(value, str):
            raise ValueError
        return ip_network(value.strip())
    except ValueError:
        raise ValueError("expected an address or a network such as 10.0.0.0/8 or ::1/128") from None


def _check_server_endpoint(text: str) -> str:
    """A Twisted endpoint string; what it opens is looked at only when the daemon starts."""
    kind, _, arguments = text.partition(":")
    if kind == "systemd" and arguments:
        return text  # Its parser looks for sockets that only systemd hands over.
    try:
        serverFromString(object(), text)
    except Exception as error:  # Each kind of endpoint has a parser of its own, which raises what it likes.
        if not (text.removeprefix("haproxy:").startswith(("ssl:", "tls:")) and _is_file_error(error)):
            raise ValueError("expected a Twisted endpoint string such as tcp:8080:interface=127.0.0.1") from None
    if kind in ("tcp", "tcp6", "ssl") and not 0 <= int(_find_port(arguments)) <= _MAX_PORT:
        raise ValueError("expected a port between 0 and 65535")
    return text


def _is_file_error(error: Exception) -> bool:
    """ssl: and tls: read keys and certificates at once; whether they can be used is not a question of syntax."""
    return not isinstance(error, ValueError | TypeError | LookupError) or "chain file" in str(error)


def _find_port(arguments: str) -> str:
    first = arguments.split(":", 1)[0]
    for argument in arguments.split(":"):
        if argument.startswith("port="):
            first = argument
    return first.removeprefix("port=")


def split_url(text: str) -> SplitResult | None:
    """The parts of an http or https URL with a host; None for anything else."""
    try:
        parts = urlsplit(text)
        if parts.port == 0 or not parts.hostname or parts.scheme not in ("http", "https"):
            return None
    except ValueError:  # a port that is no number, or a bracket that does not close
        return None
    return parts


def _check_public_url(text: str) -> str:
    """The root of all public addresses, without a slash at its end."""
    parts = split_url(text)
    if parts is None or re.search(r"[\s?#@]", text):
        raise ValueError("expected an http:// or https:// URL with a host, without query, fragment or user")
    return text.rstrip("/")


def _check_did(text: str) -> str:
    if not is_did(text):
        raise ValueError("expected a DID such as did:web:example.com")
    return text


def _check_did_pattern(text: str) -> str:
    if not is_did(text.removesuffix(":*")):
        raise ValueError("expected a DID such as did:web:example.com, or did:web:example.com:* for all below it")
    return text


def _check_did_url(text: str) -> str:
    if not is_did(strip_did_url(text)):
        raise ValueError("expected a did:key or a DID URL that names a key")
    return text


def _check_url_or_did(text: str) -> str:
    if split_url(text) is None and not is_did(text):
        raise ValueError("expected an http:// or https:// URL, or a DID")
    return text


def _check_node_name(text: str) -> str:
    if not _NODE.fullmatch(text):
        raise ValueError("expected at most 63 letters, digits, dots, hyphens and underscores")
    return text


def _check_host_port(text: str) -> str:
    """A host and a port; an IPv6 address in brackets."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or not 0 < int(match[3]) <= _MAX_PORT:
        raise ValueError("expected host:port such as 10.0.0.5:7070")
    return text


def _check_origin_pattern(text: str) -> str:
    """What browsers send as Origin, perhaps with `*` for a part of it."""
    if not _ORIGIN.fullmatch(text):
        raise ValueError("expected an origin such as https://app.example or https://*.example, null, or * for all")
    return text


def make_client_endpoint(listen: str, advertise: str | None) -> str | None:
    """
    The Twisted client endpoint string that reaches a server endpoint; None when others cannot know it.

    :param advertise: host:port, where that is not what `listen` says.
    """
    if advertise is not None:
        match = _HOST_PORT.fullmatch(advertise)
        assert match is not None, "it was checked"
        return _format_tcp_endpoint(match[1] or match[2], match[3])
    kind, given, named = parse_endpoint_string(listen)
    if kind == "unix":
        path = named.get("address") or (given[0] if given else "")
        return f"unix:{quoteStringArgument(path)}" if path else None
    host = named.get("interface", "")
    port = named.get("port") or (given[0] if given else "")
    if kind not in ("tcp", "tcp6") or _is_wildcard_address(host) or port in ("", "0"):
        return None
    return _format_tcp_endpoint(host, port)


def _is_wildcard_address(interface: str) -> bool:
    try:
        return not interface or ip_address(interface).is_unspecified
    except ValueError:  # a name
        return False


def _format_tcp_endpoint(host: str, port: str) -> str:
    return f"tcp:host={quoteStringArgument(host)}:port={port}"


def _check_mongodb_uri(text: str) -> str:
    """Whether the store can do what it asks for is looked at when the store is chosen."""
    if not text.startswith("mongodb://"):
        raise ValueError("expected a mongodb:// URI; mongodb+srv:// is not supported")
    return text


# Part of a whole, more than nothing.
Fraction = Annotated[float, Strict(), Field(gt=0, le=1), ValueKind("number, 1 at most")]
# Part of a whole that is set aside three times.
FractionUpToThird = Annotated[float, Strict(), Field(ge=0, le=1 / 3), ValueKind("number, a third at most")]
Duration = Annotated[float, BeforeValidator(_parse_duration), DurationMarker(), ValueKind("duration")]
Size = Annotated[int, BeforeValidator(_parse_size_value), Field(ge=1), SizeMarker(), ValueKind("size")]
PositiveInteger = Annotated[int, Strict(), Field(ge=1)]
NonNegativeInteger = Annotated[int, Strict(), Field(ge=0)]
Boolean = Annotated[bool, Strict()]
CIDRNetwork = Annotated[
    IPv4Network | IPv6Network, BeforeValidator(_parse_network), ValueKind("address or network", "10.0.0.0/8")
]
ServerEndpoint = Annotated[
    str, AfterValidator(_check_server_endpoint), ValueKind("Twisted endpoint string", "tcp:8080:interface=127.0.0.1")
]
PublicURL = Annotated[str, AfterValidator(_check_public_url), ValueKind("http:// or https:// URL")]
DID = Annotated[str, AfterValidator(_check_did), ValueKind("DID", "did:web:example.com")]
DIDPattern = Annotated[
    str, AfterValidator(_check_did_pattern), ValueKind("DID, or DIDs below one", "did:web:example.com:*")
]
DIDURL = Annotated[
    str, AfterValidator(_check_did_url), ValueKind("did:key or DID URL of a key", "did:web:example.com#key-1")
]
URLOrDID = Annotated[str, AfterValidator(_check_url_or_did), ValueKind("URL or DID", "https://example.com/didcomm")]
HostPort = Annotated[str, AfterValidator(_check_host_port), ValueKind("host:port")]
NodeName = Annotated[str, AfterValidator(_check_node_name), ValueKind("name of at most 63 characters")]
OriginPattern = Annotated[str, AfterValidator(_check_origin_pattern), ValueKind("origin")]
MongoURI = Annotated[str, AfterValidator(_check_mongodb_uri), ValueKind("mongodb:// URI")]


def _describe(text: str) -> Any:
    """A field's explanation, in the place where the template looks for it."""
    return Field(description=text)


_SectionT = TypeVar("_SectionT", bound="SettingsSection")


class SettingsSection(BaseModel):
    """Keys that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """A section of which only comments are left reads as null."""
        return {} if value is None else value


class IdentitySettings(SettingsSection):
    """Who the mediator is."""

    keys: Annotated[Path, _describe("private keys (JWK set, mode 0600), relative to this file")] = Path("keys.jwks")
    passphrase_file: Annotated[
        Path | None,
        _describe("opens keys that `mediatord keys encrypt` has encrypted; mode 0600, or credential:NAME"),
    ] = None
    former_dids: Annotated[
        tuple[DID, ...], _describe("earlier DIDs of this mediator, still accepted; each with a key of ours")
    ] = ()


class SQLiteSettings(SettingsSection):
    """Where SQLite keeps its file."""

    path: Annotated[Path, _describe("the database file; its directory must be writable")] = Path("mediator.sqlite3")
    max_bytes: Annotated[
        Size | None, _describe("beyond it nothing more is stored (503), only deleted; null: as the disk allows")
    ] = None
    min_free_bytes: Annotated[
        Size | None,
        _describe("left free on its disk in the same way; null: 5 % of it, 256 MiB to 1 GiB, at most a tenth"),
    ] = None


class MongoDBSettings(SettingsSection):
    """Where MongoDB is."""

    uri: Annotated[MongoURI, _describe("server, credentials and database name"), Field(repr=False)] = (
        "mongodb://127.0.0.1:27017/mediatord"
    )
    max_bytes: Annotated[
        Size | None, _describe("beyond it nothing more is stored (503), only deleted; null: as the disk allows")
    ] = None
    min_free_bytes: Annotated[
        Size | None,
        _describe(
            "left free on the disk of the primary in the same way; null: 5 % of it, 256 MiB to 1 GiB, at most a tenth"
        ),
    ] = None


class StorageSettings(SettingsSection):
    """Where accounts and messages are kept."""

    backend: Annotated[
        Literal["memory", "sqlite", "mongodb"], _describe("memory (lost at stop) | sqlite | mongodb")
    ] = "sqlite"
    sqlite: Annotated[SQLiteSettings, _describe("used when backend is sqlite")] = SQLiteSettings()
    mongodb: Annotated[MongoDBSettings, _describe("used when backend is mongodb")] = MongoDBSettings()


class QueueSettings(SettingsSection):
    """What waits for its recipients."""

    max_messages: Annotated[PositiveInteger, _describe("per recipient DID; the oldest goes first")] = 1000
    max_bytes: Annotated[Size, _describe("per recipient DID; the oldest goes first")] = 67_108_864
    when_full: Annotated[
        Literal["oldest", "refuse"],
        _describe("what makes room: oldest (of whoever has most) | refuse (senders get 429)"),
    ] = "oldest"
    sender_share: Annotated[
        Fraction, _describe("part of a full queue that one sender or one network may have; 1: no such rule")
    ] = 0.5
    reserved_for_known: Annotated[
        FractionUpToThird,
        _describe("part of a full queue kept for senders the recipient acknowledged before; 0: no ranks of senders"),
    ] = 0.25
    ttl: Annotated[Duration, Field(gt=0), _describe("a message not fetched by then is dropped")] = 259_200.0
    delivered_timeout: Annotated[
        Duration, Field(gt=0), _describe("a push not acknowledged by then is pending again")
    ] = 60.0


class LimitSettings(SettingsSection):
    """How much is taken from whom."""

    did_per_minute: Annotated[PositiveInteger, _describe("forwards and commands of one sender DID")] = 60
    ip_per_minute: Annotated[PositiveInteger, _describe("forwards and undecryptable posts of one address")] = 120
    account_per_minute: Annotated[PositiveInteger, _describe("coordination and pickup requests of one account")] = 600
    max_message_bytes: Annotated[Size, _describe("larger bodies and frames are refused")] = 1_048_576
    max_connections_per_ip: Annotated[PositiveInteger, _describe("open sockets of one address")] = 64
    accounts_per_address_per_day: Annotated[
        PositiveInteger, _describe("accounts and Decentrl registrations that one address may make")
    ] = 1000
    registration_bytes_per_address_per_day: Annotated[
        PositiveInteger, _describe("bytes of DIDs and registrations that one address may have stored")
    ] = 4_194_304
    accounts: Annotated[PositiveInteger, _describe("accounts in all; beyond that nobody is granted mediation")] = (
        1_000_000
    )
    registration_bytes: Annotated[Size, _describe("bytes of DIDs and registrations in all")] = 1_073_741_824
    trusted_peers: Annotated[
        tuple[CIDRNetwork, ...],
        _describe("networks of other mediators; each counts as one address, with these limits:"),
    ] = ()
    trusted_per_minute: Annotated[PositiveInteger, _describe("forwards and other requests of one of them")] = 6000
    trusted_connections: Annotated[PositiveInteger, _describe("open sockets of one of them")] = 1024
    max_outbox_bytes: Annotated[Size, _describe("pushes that wait for one socket which is not read")] = 1_048_576
    max_unread_bytes: Annotated[
        Size, _describe("answers over HTTP that are not read, in all; an eighth of that for one address")
    ] = 268_435_456


class DIDCommSettings(SettingsSection):
    """The DIDComm v2 side."""

    delivery_form: Annotated[
        Literal["as-received", "json", "base64"], _describe("attachments of a delivery: as-received | json | base64")
    ] = "as-received"
    live_push: Annotated[
        Literal["delivery", "raw"], _describe("live mode sends a pickup delivery | the raw envelope")
    ] = "delivery"
    live_default_on: Annotated[Boolean, _describe("a socket is live without asking for it")] = False
    max_delay: Annotated[Duration, _describe("delay_milli is capped here; 0 delivers at once")] = 86_400.0
    legacy_draft03: Annotated[Boolean, _describe("understand ECDH-1PU draft 3, which old wallets use")] = False
    registration: Annotated[
        Literal["open", "allow-list"], _describe("who is granted mediation: open (anyone) | allow-list")
    ] = "open"
    allow: Annotated[
        tuple[DIDPattern, ...],
        _describe("the DIDs that registration: allow-list grants; did:web:a.example:* for all below"),
    ] = ()
    deny: Annotated[
        tuple[DIDPattern, ...],
        _describe("DIDs that get no grant, and are refused what they authenticate; goes before allow"),
    ] = ()
    require_ownership: Annotated[
        Boolean, _describe("register recipient DIDs other than the account's own only with a proof made by them")
    ] = False
    require_registered_sender: Annotated[
        Boolean, _describe("take forwards only from authenticated senders with mediation here")
    ] = False
    require_encrypted_payload: Annotated[
        Boolean, _describe("refuse to queue an attachment that is not an encrypted envelope")
    ] = True
    problem_codes: Annotated[
        Literal["uc021", "identus"],
        _describe("for unknown recipients: uc021 (e.p.me.res.not-found) | identus (e.p.req.not_enroll)"),
    ] = "uc021"
    problem_report_ack: Annotated[
        Boolean, _describe("name the refused message in ack, which didcomm-jvm cannot parse; pthid names its thread")
    ] = False
    max_recipients: Annotated[PositiveInteger, _describe("recipient DIDs per account")] = 1000
    unused_account_ttl: Annotated[
        Duration, _describe("an account that was never used after its first day goes after that; 0: never")
    ] = 604_800.0
    idle_account_ttl: Annotated[
        Duration, _describe("an account goes after so long without authenticated contact; 0: never")
    ] = 0.0
    delivery_limit: Annotated[
        PositiveInteger, _describe("messages in one delivery at most, whatever was asked for")
    ] = 100
    failover: Annotated[
        Literal["none", "configured", "account-did"],
        _describe("POST to wallets without a socket: none | configured (endpoints) | account-did (its services)"),
    ] = "none"
    endpoints: Annotated[Mapping[DID, URLOrDID], _describe("account DID to URL or DID, for failover: configured")] = (
        Field(default_factory=dict)
    )
    routing_keys: Annotated[
        Mapping[DID, tuple[DIDURL, ...]], _describe("recipient DID to keys that its messages are wrapped for as well")
    ] = Field(default_factory=dict)
    rewrap: Annotated[Boolean, _describe("deliver inside a fresh forward to the recipient")] = False


class DecentrlSettings(SettingsSection):
    """The Decentrl side."""

    timestamp_window: Annotated[
        Duration, Field(gt=0, le=86_400), _describe("how far the clock of a command may be off, either way")
    ] = 300.0
    contract_lifetime: Annotated[
        Duration, Field(gt=0), _describe("a registration counts no longer than this, whatever its contract says")
    ] = 31_536_000.0
    registration: Annotated[
        Literal["open", "own", "allow-list"],
        _describe("who may register: open | own (DIDs that name this mediator) | allow-list"),
    ] = "open"
    allow: Annotated[tuple[DIDPattern, ...], _describe("the DIDs of registration: allow-list")] = ()
    deny: Annotated[
        tuple[DIDPattern, ...],
        _describe("DIDs that may not register, and are refused every command; goes before allow"),
    ] = ()
    raw_keys: Annotated[Boolean, _describe("write the keys of the did:web document without multicodec prefix")] = (
        False
    )
    max_contract_requests: Annotated[
        PositiveInteger, _describe("requests for a contract that may wait for one DID")
    ] = 1000
    max_contract_requests_per_sender: Annotated[PositiveInteger, _describe("those of one and the same sender")] = 10
    max_contracts: Annotated[PositiveInteger, _describe("contracts that one DID may keep")] = 10_000
    max_contracts_per_peer: Annotated[PositiveInteger, _describe("those with one and the same DID")] = 100
    max_pending_events: Annotated[PositiveInteger, _describe("events that may wait for one DID")] = 10_000
    max_pending_bytes: Annotated[
        Size, _describe("and their bytes; a page with more than 16 MiB is refused, so more could get stuck")
    ] = 16_777_216
    max_stored_events: Annotated[PositiveInteger, _describe("stored and public events that one DID may keep")] = (
        1_000_000
    )
    max_stored_bytes: Annotated[Size, _describe("and their bytes")] = 1_073_741_824

    @model_validator(mode="after")
    def _allow_goes_with_the_list(self) -> DecentrlSettings:
        if (self.registration == "allow-list") != bool(self.allow):
            raise ValueError("expected DIDs in allow with registration: allow-list, and none without")
        return self


class OutboundSettings(SettingsSection):
    """Requests that the mediator makes itself: did:web, replies, delivery to endpoints."""

    allow_private: Annotated[
        tuple[CIDRNetwork, ...], _describe("loopback and private networks that may be reached all the same")
    ] = ()


class LogRotationSettings(SettingsSection):
    """When a log segment is closed, and what becomes of it."""

    bytes: Annotated[Size, Field(ge=65_536), _describe("a segment of this size is closed")] = 67_108_864
    keep: Annotated[PositiveInteger, _describe("newest closed segments that are kept whatever their age")] = 24
    compress: Annotated[Boolean, _describe("gzip closed segments")] = True


class LogRetentionSettings(SettingsSection):
    """How long closed log segments are kept."""

    age: Annotated[
        Duration, Field(gt=0), _describe("older closed segments are deleted once the nightly analysis has read them")
    ] = 432_000.0
    bytes: Annotated[
        Size, _describe("of all closed segments; beyond it the oldest are deleted once they were read")
    ] = 4_294_967_296
    unread_bytes: Annotated[
        Size, _describe("of all closed segments; beyond it also unread ones are deleted, with an alert")
    ] = 8_589_934_592

    @model_validator(mode="after")
    def _unread_is_the_outer_bound(self) -> LogRetentionSettings:
        if self.unread_bytes < self.bytes:
            raise ValueError("expected unread_bytes to be at least bytes")
        return self


class LogSettings(SettingsSection):
    """Events as JSON lines, for operators and analytics."""

    directory: Annotated[Path, _describe("relative to this file; one daemon per directory")] = Path("log")
    rotate: Annotated[LogRotationSettings, _describe("besides at every full hour UTC, on SIGUSR1 and at stop")] = (
        LogRotationSettings()
    )
    retention: Annotated[
        LogRetentionSettings,
        _describe("when closed segments are deleted; without a nightly analysis all count as read"),
    ] = LogRetentionSettings()
    level: Annotated[
        Literal["debug", "info", "warn", "error"], _describe("debug | info | warn | error; analytics needs info")
    ] = "info"
    dids: Annotated[
        Literal["plain", "keyed"], _describe("plain | keyed (pseudonyms; recommended): DIDs and message ids")
    ] = "plain"
    key_file: Annotated[
        Path | None, _describe("keys of pseudonyms, which the daemon adds to; null: log.key beside identity.keys")
    ] = None
    key_days: Annotated[
        NonNegativeInteger, _describe("pseudonyms are made with a new key after so many days; 0: never")
    ] = 90


class MetricsSettings(SettingsSection):
    """Who may read GET /metrics, and how much of it there is."""

    allow: Annotated[tuple[CIDRNetwork, ...], _describe("networks that /metrics is answered to")] = Field(
        default_factory=lambda: ("127.0.0.0/8", "::1/128"), validate_default=True
    )
    queue_size_top: Annotated[
        NonNegativeInteger, _describe("series of mediator_message_queue_size; the rest is summed up")
    ] = 100


class ReadinessSettings(SettingsSection):
    """How often messages are sent through the daemon while somebody asks GET /ready."""

    interval: Annotated[
        Duration, Field(gt=0, le=3), _describe("from the end of one message's way to the next; at most 3 seconds")
    ] = 3.0


class AdminSettings(SettingsSection):
    """The status page for operators."""

    listen: Annotated[
        ServerEndpoint | None, _describe("where GET /admin is served, apart from everything else; null: nowhere")
    ] = None
    token_file: Annotated[
        Path | None, _describe("file (mode 0600) with the token that it wants, 32 characters or more")
    ] = None
    reports: Annotated[
        Path | None, _describe("directory with the reports of the nightly analysis, to be shown there")
    ] = None

    @model_validator(mode="after")
    def _listening_needs_a_token(self) -> AdminSettings:
        if self.listen is not None and self.token_file is None:
            raise ValueError("expected a token_file beside listen")
        return self


class ClusterSettings(SettingsSection):
    """Several nodes on one store."""

    listen: Annotated[ServerEndpoint | None, _describe("node-to-node address; null: a single node")] = None
    advertise: Annotated[
        HostPort | None, _describe("host:port where other nodes reach that; null: the interface and port of listen")
    ] = None
    secret_file: Annotated[
        Path | None, _describe("file (mode 0600) with the secret that the nodes share, 32 bytes or more")
    ] = None

    @model_validator(mode="after")
    def _listening_needs_a_secret(self) -> ClusterSettings:
        if self.listen is not None and self.secret_file is None:
            raise ValueError("expected a secret_file beside listen")
        return self

    @model_validator(mode="after")
    def _others_can_reach_it(self) -> ClusterSettings:
        if self.listen is not None and self.address is None:
            raise ValueError("expected an interface in listen that other nodes can reach, or advertise beside it")
        return self

    @property
    def address(self) -> str | None:
        """What other nodes connect to, as a Twisted client endpoint string."""
        return None if self.listen is None else make_client_endpoint(self.listen, self.advertise)


class Config(SettingsSection):
    """A whole configuration. Paths are as written until :meth:`resolved`; durations are seconds."""

    public_url: Annotated[PublicURL, _describe("what DIDs and documents name, without the path of any service")] = (
        "http://127.0.0.1:8080"
    )
    listen: Annotated[
        tuple[ServerEndpoint, ...], Field(min_length=1), _describe("Twisted endpoint strings; ssl:... for TLS")
    ] = ("tcp:8080:interface=127.0.0.1",)
    node: Annotated[NodeName | None, _describe("name in logs and in a cluster; null: the host name")] = None
    trusted_proxies: Annotated[
        tuple[CIDRNetwork, ...], _describe("networks whose X-Forwarded-For names the real client")
    ] = ()
    websocket_origins: Annotated[
        tuple[OriginPattern, ...],
        _describe("origins of the pages that may open WebSockets: *, https://app.example, https://*.example, null"),
    ] = ("*",)
    drain_timeout: Annotated[
        Duration, Field(lt=10), _describe("how long stopping waits for open sockets; under 10 seconds")
    ] = 8.0
    control_socket: Annotated[
        Path | None,
        _describe("UNIX socket, mode 0600, by which commands reach the running daemon; null: none"),
    ] = Path("control.sock")
    identity: Annotated[IdentitySettings, _describe("the mediator's own DIDs")] = IdentitySettings()
    storage: Annotated[StorageSettings, _describe("where accounts and messages are kept")] = StorageSettings()
    queue: Annotated[QueueSettings, _describe("messages waiting for their recipients")] = QueueSettings()
    limits: Annotated[LimitSettings, _describe("what is over is refused with 429, or 413 for size")] = LimitSettings()
    didcomm: Annotated[DIDCommSettings, _describe("the DIDComm v2 side")] = DIDCommSettings()
    decentrl: Annotated[DecentrlSettings, _describe("the Decentrl side")] = DecentrlSettings()
    outbound: Annotated[OutboundSettings, _describe("requests that the mediator makes itself")] = OutboundSettings()
    log: Annotated[LogSettings, _describe("events as JSON lines, rotated")] = LogSettings()
    metrics: Annotated[MetricsSettings, _describe("GET /metrics")] = MetricsSettings()
    readiness: Annotated[ReadinessSettings, _describe("GET /ready, which sends a message through the daemon")] = (
        ReadinessSettings()
    )
    admin: Annotated[AdminSettings, _describe("the status page for operators, GET /admin")] = AdminSettings()
    cluster: Annotated[ClusterSettings, _describe("several nodes on one store")] = ClusterSettings()
    workers: Annotated[
        PositiveInteger, _describe("processes sharing listeners and store; more than 1 needs sqlite or mongodb")
    ] = 1

    @field_validator("workers")
    @classmethod
    def _workers_share_a_store(cls, workers: int, info: ValidationInfo) -> int:
        storage = info.data.get("storage")
        if workers > 1 and isinstance(storage, StorageSettings) and storage.backend == "memory":
            raise ValueError("expected 1 with storage.backend memory, which processes cannot share")
        cluster = info.data.get("cluster")
        if workers > 1 and isinstance(cluster, ClusterSettings) and cluster.listen is not None:
            raise ValueError("expected 1 with cluster.listen; run a node for each core instead")
        return workers

    @property
    def node_name(self) -> str:
        """`node`, or the host name as far as it can stand in a file name."""
        return self.node or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63].strip("-._") or "node"

    def resolved(self, base: Path) -> Config:
        """The same with every relative path, those in endpoints included, taken to be relative to `base`."""
        sqlite, secret, admin, log = self.storage.sqlite, self.cluster.secret_file, self.admin, self.log
        endpoint, cluster_endpoint = admin.listen, self.cluster.listen
        passphrase = self.identity.passphrase_file
        return _replace_fields(
            self,
            listen=tuple(resolve_endpoint_paths(one, base) for one in self.listen),
            control_socket=self.control_socket and base / self.control_socket,
            identity=_replace_fields(
                self.identity,
                keys=resolve_secret_path(base, self.identity.keys),
                passphrase_file=passphrase and resolve_secret_path(base, passphrase),
            ),
            storage=_replace_fields(self.storage, sqlite=_replace_fields(sqlite, path=base / sqlite.path)),
            log=_replace_fields(log, directory=base / log.directory, key_file=log.key_file and base / log.key_file),
            admin=_replace_fields(
                admin,
                listen=endpoint and resolve_endpoint_paths(endpoint, base),
                token_file=admin.token_file and resolve_secret_path(base, admin.token_file),
                reports=admin.reports and base / admin.reports,
            ),
            cluster=_replace_fields(
                self.cluster,
                listen=cluster_endpoint and resolve_endpoint_paths(cluster_endpoint, base),
                secret_file=secret and resolve_secret_path(base, secret),
            ),
        )


def _replace_fields(model: _SectionT, **values: Any) -> _SectionT:
    """The same with other values; what nobody had set still counts as not set."""
    return model.model_construct(model.model_fields_set, **{**{name: value for name, value in model}, **values})
