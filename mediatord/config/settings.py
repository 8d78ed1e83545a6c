"""
All settings: types, defaults, descriptions and validation.

These models validate configuration files and are the source of `etc/mediator.yaml`. Validators raise
:class:`ValueError` with a text of the form "expected ...". Only the composition root uses the models; classes receive
plain values.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from mediatord.config.value_types import (
    DID,
    DIDURL,
    Boolean,
    CIDRNetwork,
    DIDPattern,
    Duration,
    Fraction,
    FractionUpToThird,
    HostPort,
    MongoURI,
    NodeName,
    NonNegativeInteger,
    OriginPattern,
    PositiveInteger,
    PublicURL,
    SecretPath,
    ServerEndpoint,
    Size,
    URLOrDID,
    find_value_kind,
    make_client_endpoint,
)


def _setting(default: Any, description: str) -> Any:
    """A setting with its default and its line in the configuration template."""
    return Field(default, description=description)


class SettingsSection(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _use_defaults_if_empty(cls, value: Any) -> Any:
        """A section with nothing but comments reads as null."""
        return {} if value is None else value

    def resolved(self, base: Path) -> Self:
        """A copy with all relative paths, also in endpoints, resolved against `base`; unset fields stay unset."""
        values = {name: _resolve_value(value, type(self).model_fields[name], base) for name, value in self}
        return self.model_construct(self.model_fields_set, **values)


def _resolve_value(value: Any, field: FieldInfo, base: Path) -> Any:
    if isinstance(value, SettingsSection):
        return value.resolved(base)
    kind = find_value_kind(field.annotation, field.metadata)
    if kind is None or kind.resolve is None:
        return base / value if isinstance(value, Path) else value
    if isinstance(value, tuple):
        return tuple(kind.resolve(base, one) for one in value)
    return value and kind.resolve(base, value)


class IdentitySettings(SettingsSection):
    """Keys and former DIDs."""

    keys: SecretPath = _setting(Path("keys.jwks"), "private keys (JWK set, mode 0600), relative to this file")
    passphrase_file: SecretPath | None = _setting(
        None, "opens keys that `mediatord keys encrypt` has encrypted; mode 0600, or credential:NAME"
    )
    former_dids: tuple[DID, ...] = _setting(
        (), "earlier DIDs of this mediator, still accepted; each with a key of ours"
    )


class SQLiteSettings(SettingsSection):
    """The SQLite backend."""

    path: Path = _setting(Path("mediator.sqlite3"), "the database file; its directory must be writable")
    max_bytes: Size | None = _setting(
        None, "beyond it nothing more is stored (503), only deleted; null: as the disk allows"
    )
    min_free_bytes: Size | None = _setting(
        None, "left free on its disk in the same way; null: 5 % of it, 256 MiB to 1 GiB, at most a tenth"
    )


class MongoDBSettings(SettingsSection):
    """The MongoDB backend."""

    uri: Annotated[MongoURI, Field(repr=False)] = _setting(
        "mongodb://127.0.0.1:27017/mediatord", "server, credentials and database name"
    )
    max_bytes: Size | None = _setting(
        None, "beyond it nothing more is stored (503), only deleted; null: as the disk allows"
    )
    min_free_bytes: Size | None = _setting(
        None,
        "left free on the disk of the primary in the same way; null: 5 % of it, 256 MiB to 1 GiB, at most a tenth",
    )


class StorageSettings(SettingsSection):
    """Storage of accounts and messages."""

    backend: Literal["memory", "sqlite", "mongodb"] = _setting("sqlite", "memory (lost at stop) | sqlite | mongodb")
    sqlite: SQLiteSettings = _setting(SQLiteSettings(), "used when backend is sqlite")
    mongodb: MongoDBSettings = _setting(MongoDBSettings(), "used when backend is mongodb")


class QueueSettings(SettingsSection):
    """Message queues."""

    max_messages: PositiveInteger = _setting(1000, "per recipient DID; the oldest goes first")
    max_bytes: Size = _setting(67_108_864, "per recipient DID; the oldest goes first")
    when_full: Literal["oldest", "refuse"] = _setting(
        "oldest", "what makes room: oldest (of whoever has most) | refuse (senders get 429)"
    )
    sender_share: Fraction = _setting(
        0.5, "part of a full queue that one sender or one network may have; 1: no such rule"
    )
    reserved_for_known: FractionUpToThird = _setting(
        0.25, "part of a full queue kept for senders the recipient acknowledged before; 0: no ranks of senders"
    )
    ttl: Annotated[Duration, Field(gt=0)] = _setting(259_200.0, "a message not fetched by then is dropped")
    delivered_timeout: Annotated[Duration, Field(gt=0)] = _setting(
        60.0, "a push not acknowledged by then is pending again"
    )


class LimitSettings(SettingsSection):
    """Rate limits and resource limits."""

    did_per_minute: PositiveInteger = _setting(60, "forwards and commands of one sender DID")
    ip_per_minute: PositiveInteger = _setting(120, "forwards and undecryptable posts of one address")
    account_per_minute: PositiveInteger = _setting(600, "coordination and pickup requests of one account")
    max_message_bytes: Size = _setting(1_048_576, "larger bodies and frames are refused")
    max_connections_per_ip: PositiveInteger = _setting(64, "open sockets of one address")
    accounts_per_address_per_day: PositiveInteger = _setting(
        1000, "accounts and Decentrl registrations that one address may make"
    )
    registration_bytes_per_address_per_day: PositiveInteger = _setting(
        4_194_304, "bytes of DIDs and registrations that one address may have stored"
    )
    accounts: PositiveInteger = _setting(1_000_000, "accounts in all; beyond that nobody is granted mediation")
    registration_bytes: Size = _setting(1_073_741_824, "bytes of DIDs and registrations in all")
    trusted_peers: tuple[CIDRNetwork, ...] = _setting(
        (), "networks of other mediators; each counts as one address, with these limits:"
    )
    trusted_per_minute: PositiveInteger = _setting(6000, "forwards and other requests of one of them")
    trusted_connections: PositiveInteger = _setting(1024, "open sockets of one of them")
    max_outbox_bytes: Size = _setting(1_048_576, "pushes that wait for one socket which is not read")
    max_unread_bytes: Size = _setting(
        268_435_456, "answers over HTTP that are not read, in all; an eighth of that for one address"
    )


class DIDCommSettings(SettingsSection):
    """The DIDComm v2 protocols."""

    delivery_form: Literal["as-received", "json", "base64"] = _setting(
        "as-received", "attachments of a delivery: as-received | json | base64"
    )
    live_push: Literal["delivery", "raw"] = _setting(
        "delivery", "live mode sends a pickup delivery | the raw envelope"
    )
    live_default_on: Boolean = _setting(False, "a socket is live without asking for it")
    max_delay: Duration = _setting(86_400.0, "delay_milli is capped here; 0 delivers at once")
    legacy_draft03: Boolean = _setting(False, "understand ECDH-1PU draft 3, which old wallets use")
    registration: Literal["open", "allow-list"] = _setting(
        "open", "who is granted mediation: open (anyone) | allow-list"
    )
    allow: tuple[DIDPattern, ...] = _setting(
        (), "the DIDs that registration: allow-list grants; did:web:a.example:* for all below"
    )
    deny: tuple[DIDPattern, ...] = _setting(
        (), "DIDs that get no grant, and are refused what they authenticate; goes before allow"
    )
    require_ownership: Boolean = _setting(
        False, "register recipient DIDs other than the account's own only with a proof made by them"
    )
    require_registered_sender: Boolean = _setting(
        False, "take forwards only from authenticated senders with mediation here"
    )
    require_encrypted_payload: Boolean = _setting(
        True, "refuse to queue an attachment that is not an encrypted envelope"
    )
    problem_codes: Literal["uc021", "identus"] = _setting(
        "uc021", "for unknown recipients: uc021 (e.p.me.res.not-found) | identus (e.p.req.not_enroll)"
    )
    problem_report_ack: Boolean = _setting(
        False, "name the refused message in ack, which didcomm-jvm cannot parse; pthid names its thread"
    )
    max_recipients: PositiveInteger = _setting(1000, "recipient DIDs per account")
    unused_account_ttl: Duration = _setting(
        604_800.0, "an account that was never used after its first day goes after that; 0: never"
    )
    idle_account_ttl: Duration = _setting(
        0.0, "an account goes after so long without authenticated contact; 0: never"
    )
    delivery_limit: PositiveInteger = _setting(100, "messages in one delivery at most, whatever was asked for")
    failover: Literal["none", "configured", "account-did"] = _setting(
        "none", "POST to wallets without a socket: none | configured (endpoints) | account-did (its services)"
    )
    endpoints: Mapping[DID, URLOrDID] = Field(
        description="account DID to URL or DID, for failover: configured", default_factory=dict
    )
    routing_keys: Mapping[DID, tuple[DIDURL, ...]] = Field(
        description="recipient DID to keys that its messages are wrapped for as well", default_factory=dict
    )
    rewrap: Boolean = _setting(False, "deliver inside a fresh forward to the recipient")


class DecentrlSettings(SettingsSection):
    """The Decentrl protocol."""

    timestamp_window: Annotated[Duration, Field(gt=0, le=86_400)] = _setting(
        300.0, "how far the clock of a command may be off, either way"
    )
    contract_lifetime: Annotated[Duration, Field(gt=0)] = _setting(
        31_536_000.0, "a registration counts no longer than this, whatever its contract says"
    )
    registration: Literal["open", "own", "allow-list"] = _setting(
        "open", "who may register: open | own (DIDs that name this mediator) | allow-list"
    )
    allow: tuple[DIDPattern, ...] = _setting((), "the DIDs of registration: allow-list")
    deny: tuple[DIDPattern, ...] = _setting(
        (), "DIDs that may not register, and are refused every command; goes before allow"
    )
    raw_keys: Boolean = _setting(False, "write the keys of the did:web document without multicodec prefix")
    max_contract_requests: PositiveInteger = _setting(1000, "requests for a contract that may wait for one DID")
    max_contract_requests_per_sender: PositiveInteger = _setting(10, "those of one and the same sender")
    max_contracts: PositiveInteger = _setting(10_000, "contracts that one DID may keep")
    max_contracts_per_peer: PositiveInteger = _setting(100, "those with one and the same DID")
    max_pending_events: PositiveInteger = _setting(10_000, "events that may wait for one DID")
    max_pending_bytes: Size = _setting(
        16_777_216, "and their bytes; a page with more than 16 MiB is refused, so more could get stuck"
    )
    max_stored_events: PositiveInteger = _setting(1_000_000, "stored and public events that one DID may keep")
    max_stored_bytes: Size = _setting(1_073_741_824, "and their bytes")

    @model_validator(mode="after")
    def _check_allow(self) -> DecentrlSettings:
        if (self.registration == "allow-list") != bool(self.allow):
            raise ValueError("expected DIDs in allow with registration: allow-list, and none without")
        return self


class OutboundSettings(SettingsSection):
    """Outbound requests: did:web, replies, delivery to endpoints."""

    allow_private: tuple[CIDRNetwork, ...] = _setting(
        (), "loopback and private networks that may be reached all the same"
    )


class LogRotationSettings(SettingsSection):
    """Rotation of event log segments."""

    bytes: Annotated[Size, Field(ge=65_536)] = _setting(67_108_864, "a segment of this size is closed")
    keep: PositiveInteger = _setting(24, "newest closed segments that are kept whatever their age")
    compress: Boolean = _setting(True, "gzip closed segments")


class LogRetentionSettings(SettingsSection):
    """Retention of closed log segments."""

    age: Annotated[Duration, Field(gt=0)] = _setting(
        432_000.0, "older closed segments are deleted once the nightly analysis has read them"
    )
    bytes: Size = _setting(
        4_294_967_296, "of all closed segments; beyond it the oldest are deleted once they were read"
    )
    unread_bytes: Size = _setting(
        8_589_934_592, "of all closed segments; beyond it also unread ones are deleted, with an alert"
    )

    @model_validator(mode="after")
    def _check_unread_bytes(self) -> LogRetentionSettings:
        if self.unread_bytes < self.bytes:
            raise ValueError("expected unread_bytes to be at least bytes")
        return self


class LogSettings(SettingsSection):
    """The event log."""

    directory: Path = _setting(Path("log"), "relative to this file; one daemon per directory")
    rotate: LogRotationSettings = _setting(
        LogRotationSettings(), "besides at every full hour UTC, on SIGUSR1 and at stop"
    )
    retention: LogRetentionSettings = _setting(
        LogRetentionSettings(), "when closed segments are deleted; without a nightly analysis all count as read"
    )
    level: Literal["debug", "info", "warn", "error"] = _setting(
        "info", "debug | info | warn | error; analytics needs info"
    )
    dids: Literal["plain", "keyed"] = _setting(
        "plain", "plain | keyed (pseudonyms; recommended): DIDs and message ids"
    )
    key_file: Path | None = _setting(
        None, "keys of pseudonyms, which the daemon adds to; null: log.key beside identity.keys"
    )
    key_days: NonNegativeInteger = _setting(90, "pseudonyms are made with a new key after so many days; 0: never")


class MetricsSettings(SettingsSection):
    """Access to GET /metrics, and its size."""

    allow: tuple[CIDRNetwork, ...] = Field(
        description="networks that /metrics is answered to",
        default_factory=lambda: ("127.0.0.0/8", "::1/128"),
        validate_default=True,
    )
    queue_size_top: NonNegativeInteger = _setting(100, "series of mediator_message_queue_size; the rest is summed up")


class ReadinessSettings(SettingsSection):
    """The end-to-end probe behind GET /ready."""

    interval: Annotated[Duration, Field(gt=0, le=3)] = _setting(
        3.0, "from the end of one message's way to the next; at most 3 seconds"
    )


class AdminSettings(SettingsSection):
    """The status page."""

    listen: ServerEndpoint | None = _setting(
        None, "where GET /admin is served, apart from everything else; null: nowhere"
    )
    token_file: SecretPath | None = _setting(
        None, "file (mode 0600) with the token that it wants, 32 characters or more"
    )
    reports: Path | None = _setting(None, "directory with the reports of the nightly analysis, to be shown there")

    @model_validator(mode="after")
    def _check_token_file(self) -> AdminSettings:
        if self.listen is not None and self.token_file is None:
            raise ValueError("expected a token_file beside listen")
        return self


class ClusterSettings(SettingsSection):
    """Clustering of nodes on one store."""

    listen: ServerEndpoint | None = _setting(None, "node-to-node address; null: a single node")
    advertise: HostPort | None = _setting(
        None, "host:port where other nodes reach that; null: the interface and port of listen"
    )
    secret_file: SecretPath | None = _setting(
        None, "file (mode 0600) with the secret that the nodes share, 32 bytes or more"
    )

    @model_validator(mode="after")
    def _check_secret_file(self) -> ClusterSettings:
        if self.listen is not None and self.secret_file is None:
            raise ValueError("expected a secret_file beside listen")
        return self

    @model_validator(mode="after")
    def _check_address(self) -> ClusterSettings:
        if self.listen is not None and self.address is None:
            raise ValueError("expected an interface in listen that other nodes can reach, or advertise beside it")
        return self

    @property
    def address(self) -> str | None:
        """Twisted client endpoint string for other nodes."""
        return None if self.listen is None else make_client_endpoint(self.listen, self.advertise)


class Config(SettingsSection):
    """The complete configuration. Paths are as written until :meth:`resolved`; durations are in seconds."""

    public_url: PublicURL = _setting(
        "http://127.0.0.1:8080", "what DIDs and documents name, without the path of any service"
    )
    listen: Annotated[tuple[ServerEndpoint, ...], Field(min_length=1)] = _setting(
        ("tcp:8080:interface=127.0.0.1",), "Twisted endpoint strings; ssl:... for TLS"
    )
    node: NodeName | None = _setting(None, "name in logs and in a cluster; null: the host name")
    trusted_proxies: tuple[CIDRNetwork, ...] = _setting((), "networks whose X-Forwarded-For names the real client")
    websocket_origins: tuple[OriginPattern, ...] = _setting(
        ("*",), "origins of the pages that may open WebSockets: *, https://app.example, https://*.example, null"
    )
    drain_timeout: Annotated[Duration, Field(lt=10)] = _setting(
        8.0, "how long stopping waits for open sockets; under 10 seconds"
    )
    control_socket: Path | None = _setting(
        Path("control.sock"), "UNIX socket, mode 0600, by which commands reach the running daemon; null: none"
    )
    identity: IdentitySettings = _setting(IdentitySettings(), "the mediator's own DIDs")
    storage: StorageSettings = _setting(StorageSettings(), "where accounts and messages are kept")
    queue: QueueSettings = _setting(QueueSettings(), "messages waiting for their recipients")
    limits: LimitSettings = _setting(LimitSettings(), "what is over is refused with 429, or 413 for size")
    didcomm: DIDCommSettings = _setting(DIDCommSettings(), "the DIDComm v2 side")
    decentrl: DecentrlSettings = _setting(DecentrlSettings(), "the Decentrl side")
    outbound: OutboundSettings = _setting(OutboundSettings(), "requests that the mediator makes itself")
    log: LogSettings = _setting(LogSettings(), "events as JSON lines, rotated")
    metrics: MetricsSettings = _setting(MetricsSettings(), "GET /metrics")
    readiness: ReadinessSettings = _setting(
        ReadinessSettings(), "GET /ready, which sends a message through the daemon"
    )
    admin: AdminSettings = _setting(AdminSettings(), "the status page for operators, GET /admin")
    cluster: ClusterSettings = _setting(ClusterSettings(), "several nodes on one store")
    workers: PositiveInteger = _setting(
        1, "processes sharing listeners and store; more than 1 needs sqlite or mongodb"
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, workers: int, info: ValidationInfo) -> int:
        storage = info.data.get("storage")
        if workers > 1 and isinstance(storage, StorageSettings) and storage.backend == "memory":
            raise ValueError("expected 1 with storage.backend memory, which processes cannot share")
        cluster = info.data.get("cluster")
        if workers > 1 and isinstance(cluster, ClusterSettings) and cluster.listen is not None:
            raise ValueError("expected 1 with cluster.listen; run a node for each core instead")
        return workers

    @property
    def node_name(self) -> str:
        """`node`, or the host name with characters replaced that file names must not contain."""
        return self.node or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63].strip("-._") or "node"

    @property
    def log_key_path(self) -> Path:
        """Path of the file with the pseudonym keys of the event log."""
        return self.log.key_file or self.identity.keys.with_name("log.key")
