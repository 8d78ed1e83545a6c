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
    EndpointURL,
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

    keys: SecretPath = _setting(Path("keys.jwks"), "private keys (JWK set, mode 0600)")
    passphrase_file: SecretPath | None = _setting(
        None, "passphrase of an encrypted key file: a file of mode 0600, or credential:NAME of systemd"
    )
    former_dids: tuple[DID, ...] = _setting((), "former DIDs still accepted; each must contain a key of the key file")


class SQLiteSettings(SettingsSection):
    """The SQLite backend."""

    path: Path = _setting(Path("mediator.sqlite3"), "database file; its directory must be writable")
    max_bytes: Size | None = _setting(
        None, "maximum size of the database, above which only reads and deletions succeed (503); null: unlimited"
    )
    min_free_bytes: Size | None = _setting(
        None, "free disk space below which the same applies; null: 5 % (256 MiB to 1 GiB), at most 10 % of the disk"
    )


class MongoDBSettings(SettingsSection):
    """The MongoDB backend."""

    uri: Annotated[MongoURI, Field(repr=False)] = _setting(
        "mongodb://127.0.0.1:27017/mediatord", "URI with replica set, credentials and database name"
    )
    max_bytes: Size | None = _setting(
        None, "maximum size of the database, above which only reads and deletions succeed (503); null: unlimited"
    )
    min_free_bytes: Size | None = _setting(
        None,
        "free disk space of the primary below which the same applies; null: as storage.sqlite.min_free_bytes",
    )


class StorageSettings(SettingsSection):
    """Storage of accounts and messages."""

    backend: Literal["memory", "sqlite", "mongodb"] = _setting(
        "sqlite", "type of store: memory (lost at exit) | sqlite | mongodb"
    )
    sqlite: SQLiteSettings = _setting(SQLiteSettings(), "the SQLite backend")
    mongodb: MongoDBSettings = _setting(MongoDBSettings(), "the MongoDB backend")


class QueueSettings(SettingsSection):
    """Message queues."""

    max_messages: PositiveInteger = _setting(1000, "maximum messages per recipient DID")
    max_bytes: Size = _setting(67_108_864, "maximum bytes per recipient DID")
    when_full: Literal["oldest", "refuse"] = _setting(
        "oldest", "policy for a full queue: oldest (evict the oldest of the largest sender) | refuse (429)"
    )
    sender_share: Fraction = _setting(0.5, "maximum share of a full queue for one sender or network; 1: no limit")
    reserved_for_known: FractionUpToThird = _setting(
        0.25, "share of a full queue reserved for each rank of senders (known, authenticated, anonymous); 0: no ranks"
    )
    ttl: Annotated[Duration, Field(gt=0)] = _setting(259_200.0, "time to live of a queued message")
    delivered_timeout: Annotated[Duration, Field(gt=0)] = _setting(
        60.0, "time after which an unacknowledged push is pending again"
    )


class LimitSettings(SettingsSection):
    """Rate limits and resource limits."""

    did_per_minute: PositiveInteger = _setting(60, "forwards and outgoing Decentrl commands per sender DID")
    ip_per_minute: PositiveInteger = _setting(
        120, "forwards, invalid requests and requests without an account per address"
    )
    account_per_minute: PositiveInteger = _setting(
        600, "mediation and pickup requests and other Decentrl commands per account"
    )
    max_message_bytes: Size = _setting(1_048_576, "maximum size of a request body or WebSocket message")
    max_connections_per_ip: PositiveInteger = _setting(64, "open WebSockets per address and process")
    accounts_per_address_per_day: PositiveInteger = _setting(
        1000, "new accounts and Decentrl registrations per address in 24 hours"
    )
    registration_bytes_per_address_per_day: PositiveInteger = _setting(
        4_194_304, "new bytes of DIDs and registrations per address in 24 hours"
    )
    accounts: PositiveInteger = _setting(1_000_000, "total accounts; further mediation requests get 503")
    registration_bytes: Size = _setting(1_073_741_824, "total bytes of DIDs and registrations")
    trusted_peers: tuple[CIDRNetwork, ...] = _setting(
        (), "networks of other mediators; each counts as one address, with the trusted limits"
    )
    trusted_per_minute: PositiveInteger = _setting(6000, "forwards and other requests per trusted network")
    trusted_connections: PositiveInteger = _setting(1024, "open WebSockets per trusted network")
    max_outbox_bytes: Size = _setting(1_048_576, "unsent bytes per WebSocket; further messages stay queued")
    max_unread_bytes: Size = _setting(
        268_435_456, "unsent bytes of all HTTP responses; at most an eighth of them per address"
    )


class DIDCommSettings(SettingsSection):
    """The DIDComm v2 protocols."""

    delivery_form: Literal["as-received", "json", "base64"] = _setting(
        "as-received", "attachments in a delivery: as-received | json | base64"
    )
    live_push: Literal["delivery", "raw"] = _setting(
        "delivery", "what live delivery sends: delivery (a pickup delivery message) | raw (the envelope itself)"
    )
    live_default_on: Boolean = _setting(False, "enable live delivery on every authenticated socket without a request")
    max_delay: Duration = _setting(86_400.0, "maximum delay_milli of a forward; 0: deliver at once")
    legacy_draft03: Boolean = _setting(False, "accept ECDH-1PU draft 3, used by old wallets")
    registration: Literal["open", "allow-list"] = _setting(
        "open", "who is granted mediation: open (everyone) | allow-list"
    )
    allow: tuple[DIDPattern, ...] = _setting(
        (), "DIDs granted mediation by allow-list; did:web:a.example:* matches all DIDs below that one, not itself"
    )
    deny: tuple[DIDPattern, ...] = _setting(
        (), "DIDs that are denied mediation and every authenticated request; overrides allow"
    )
    require_ownership: Boolean = _setting(
        False,
        "require an ownership proof for recipient DIDs other than the account's own; wallets of DIDComm v1, which "
        "has no such proof, are denied mediation",
    )
    require_registered_sender: Boolean = _setting(
        False, "accept forwards only from authenticated senders that have an account"
    )
    require_encrypted_payload: Boolean = _setting(
        True, "reject forwarded attachments that are not encrypted envelopes"
    )
    problem_codes: Literal["uc021", "identus"] = _setting(
        "uc021", "problem code for unknown recipients: uc021 (e.p.me.res.not-found) | identus (e.p.req.not_enroll)"
    )
    problem_report_ack: Boolean = _setting(
        False, "set ack in problem reports, which didcomm-jvm cannot parse; pthid is always set"
    )
    max_recipients: PositiveInteger = _setting(1000, "maximum recipient DIDs per account")
    unused_account_ttl: Duration = _setting(
        604_800.0, "time after which an account never used after its first day is removed; 0: never"
    )
    idle_account_ttl: Duration = _setting(
        0.0, "time without authenticated contact after which an account is removed; 0: never"
    )
    delivery_limit: PositiveInteger = _setting(100, "maximum messages in one delivery, also when pushed")
    failover: Literal["none", "configured", "account-did"] = _setting(
        "none",
        "POST messages to wallets without a socket: none | configured (endpoints) | account-did (its DID document)",
    )
    endpoints: Mapping[DID, URLOrDID] = Field(
        description="endpoint (URL or DID) of each account DID, for failover: configured", default_factory=dict
    )
    routing_keys: Mapping[DID, tuple[DIDURL, ...]] = Field(
        description="keys for which messages to a recipient DID are additionally wrapped, by recipient DID",
        default_factory=dict,
    )
    rewrap: Boolean = _setting(False, "wrap every message in a new forward to its recipient")


class DIDCommV1Settings(SettingsSection):
    """DIDComm v1 (Aries), for wallets that do not speak v2 yet; limits of the didcomm section apply to it too."""

    enabled: Boolean = _setting(True, "serve DIDComm v1 at the same addresses as v2")
    label: str = _setting("mediatord", "name of the mediator in its invitation, which wallets show")
    connections_per_minute: PositiveInteger = _setting(30, "new connections per address")
    max_pending_connections: PositiveInteger = _setting(
        10_000, "total connections that have not requested mediation; further ones replace the oldest"
    )
    pending_connection_ttl: Annotated[Duration, Field(gt=0)] = _setting(
        600.0, "time after which a connection that has not requested mediation is removed"
    )
    deliver_to_endpoints: Boolean = _setting(
        True, "POST messages to wallets with an endpoint of their own, as ACA-Py, which has no other way to get them"
    )


class DecentrlSettings(SettingsSection):
    """The Decentrl protocol."""

    timestamp_window: Annotated[Duration, Field(gt=0, le=86_400)] = _setting(
        300.0, "maximum difference between the timestamp of a command and the clock"
    )
    contract_lifetime: Annotated[Duration, Field(gt=0)] = _setting(
        31_536_000.0, "maximum lifetime of a registration, even if its contract expires later"
    )
    registration: Literal["open", "own", "allow-list"] = _setting(
        "open", "who may register: open (everyone) | own (DIDs that name this mediator) | allow-list"
    )
    allow: tuple[DIDPattern, ...] = _setting((), "DIDs that may register with allow-list")
    deny: tuple[DIDPattern, ...] = _setting(
        (), "DIDs that may not register, and whose commands are refused; overrides allow"
    )
    raw_keys: Boolean = _setting(False, "omit the multicodec prefix of keys in the did:web document")
    max_contract_requests: PositiveInteger = _setting(1000, "pending contract requests per recipient DID")
    max_contract_requests_per_sender: PositiveInteger = _setting(
        10, "pending contract requests per recipient DID and sender"
    )
    max_contracts: PositiveInteger = _setting(10_000, "contracts per DID")
    max_contracts_per_peer: PositiveInteger = _setting(100, "contracts per pair of DIDs")
    max_pending_events: PositiveInteger = _setting(10_000, "pending events per DID")
    max_pending_bytes: Size = _setting(
        16_777_216, "bytes of pending events per DID; keep it at 16 MiB or less, the maximum size of a page"
    )
    max_stored_events: PositiveInteger = _setting(1_000_000, "stored and public events per DID")
    max_stored_bytes: Size = _setting(1_073_741_824, "bytes of stored and public events per DID")

    @model_validator(mode="after")
    def _check_allow(self) -> DecentrlSettings:
        if self.registration == "allow-list" and not self.allow:
            raise ValueError("expected at least one DID in allow, because registration is allow-list")
        if self.allow and self.registration != "allow-list":
            raise ValueError("expected registration: allow-list, because allow is set; or remove allow")
        return self


class OutboundSettings(SettingsSection):
    """Outbound requests: did:web, replies, delivery to endpoints."""

    allow_private: tuple[CIDRNetwork, ...] = _setting((), "loopback and private networks that may be reached")


class FCMSettings(SettingsSection):
    """Firebase Cloud Messaging (HTTP v1)."""

    credentials: SecretPath | None = _setting(
        None, "key file of the service account (JSON, mode 0600), or credential:NAME of systemd; null: no FCM"
    )
    url: PublicURL = _setting("https://fcm.googleapis.com", "base URL of the service")


class APNsSettings(SettingsSection):
    """The Apple Push Notification service."""

    key_file: SecretPath | None = _setting(
        None, "signing key (.p8, mode 0600), or credential:NAME of systemd; null: no APNs"
    )
    key_id: str = _setting("", "id of that key: 10 characters")
    team_id: str = _setting("", "id of the developer team: 10 characters")
    topic: str = _setting("", "bundle id of the app")
    url: PublicURL = _setting(
        "https://api.push.apple.com", "base URL of the service; https://api.sandbox.push.apple.com for development"
    )

    @model_validator(mode="after")
    def _check_key(self) -> APNsSettings:
        if self.key_file is not None and not (self.key_id and self.team_id and self.topic):
            raise ValueError("expected key_id, team_id and topic, because key_file is set")
        if not self.url.startswith("https://"):
            raise ValueError("expected an https:// URL in url, because APNs needs HTTP/2 over TLS")
        return self


class WebPushSettings(SettingsSection):
    """Web Push, for browsers and UnifiedPush."""

    key_file: SecretPath | None = _setting(
        None, "VAPID private key (PEM, mode 0600), or credential:NAME of systemd; null: no Web Push"
    )
    contact: str | None = _setting(
        None, "how push services can reach you: a mailto: or https: URL; required with key_file"
    )

    @model_validator(mode="after")
    def _check_contact(self) -> WebPushSettings:
        if self.contact is not None and not self.contact.startswith(("mailto:", "https://")):
            raise ValueError("expected a mailto: or https: URL in contact")
        if self.key_file is not None and self.contact is None:
            raise ValueError("expected contact, because key_file is set")
        return self


class WebhookSettings(SettingsSection):
    """An HTTP endpoint of yours that is told which accounts have messages waiting."""

    url: EndpointURL | None = _setting(None, "URL that is POSTed to; null: no webhook")
    secret_file: SecretPath | None = _setting(
        None, "key of the signature (at least 32 bytes, mode 0600), or credential:NAME of systemd; required with url"
    )
    dids: Literal["plain", "keyed"] = _setting(
        "keyed", "how the account is named: plain (its DID) | keyed (HMAC-SHA256 of the DID, with the same key)"
    )

    @model_validator(mode="after")
    def _check_secret_file(self) -> WebhookSettings:
        if self.url is not None and self.secret_file is None:
            raise ValueError("expected secret_file, because url is set")
        return self


class PushAlertSettings(SettingsSection):
    """A visible notification of FCM and APNs; without text or key it wakes the app only."""

    title: str = _setting("", "its title; empty: none")
    body: str = _setting("", "its text; empty: none")
    title_key: str = _setting("", "key of a localised title in the app, instead of title")
    body_key: str = _setting("", "key of a localised text in the app, instead of body")


class PushSettings(SettingsSection):
    """Push notifications, which wake wallets without a socket."""

    fcm: FCMSettings = _setting(FCMSettings(), "Firebase Cloud Messaging")
    apns: APNsSettings = _setting(APNsSettings(), "Apple Push Notification service")
    web_push: WebPushSettings = _setting(WebPushSettings(), "Web Push (RFC 8030), for browsers and UnifiedPush")
    webhook: WebhookSettings = _setting(WebhookSettings(), "an HTTP endpoint of yours")
    decentrl: Boolean = _setting(False, "let Decentrl identities register devices, by a command of ours")
    quiet_after_poll: Duration = _setting(10.0, "time after a poll of an account during which it is not woken")
    min_interval: Annotated[Duration, Field(gt=0)] = _setting(20.0, "minimum time between wake-ups of an account")
    repeat_after: Duration = _setting(
        0.0, "time after which an unanswered wake-up is repeated while messages wait; 0: never"
    )
    message_ids: Boolean = _setting(False, "send the ids of waiting messages, which the push service then sees")
    max_devices: Annotated[PositiveInteger, Field(le=10)] = _setting(10, "devices per account; at most 10")
    alert: PushAlertSettings = _setting(PushAlertSettings(), "visible notification, for FCM and APNs")
    sender_process: Boolean = _setting(
        False, "send from a process of its own (45 MiB each); worth it from about 100 wake-ups a second"
    )

    @model_validator(mode="after")
    def _check_repeat_after(self) -> PushSettings:
        if 0 < self.repeat_after < self.min_interval:
            raise ValueError("expected repeat_after to be 0, or at least min_interval")
        return self


class LogRotationSettings(SettingsSection):
    """Rotation of event log segments."""

    bytes: Annotated[Size, Field(ge=65_536)] = _setting(67_108_864, "size at which a segment is closed")
    keep: PositiveInteger = _setting(24, "number of newest closed segments kept regardless of age")
    compress: Boolean = _setting(True, "compress closed segments with gzip")


class LogRetentionSettings(SettingsSection):
    """Retention of closed log segments."""

    age: Annotated[Duration, Field(gt=0)] = _setting(
        432_000.0, "age at which a closed segment is deleted once the nightly analysis has read it"
    )
    bytes: Size = _setting(
        4_294_967_296, "total size of closed segments, above which the oldest are deleted once read"
    )
    unread_bytes: Size = _setting(
        8_589_934_592, "total size of closed segments, above which unread ones are deleted too; raises an alert"
    )

    @model_validator(mode="after")
    def _check_unread_bytes(self) -> LogRetentionSettings:
        if self.unread_bytes < self.bytes:
            raise ValueError("expected unread_bytes to be at least bytes")
        return self


class LogSettings(SettingsSection):
    """The event log."""

    directory: Path = _setting(Path("log"), "directory of the segments, for one daemon only")
    rotate: LogRotationSettings = _setting(
        LogRotationSettings(), "rotation, in addition to every full hour UTC, SIGUSR1 and exit"
    )
    retention: LogRetentionSettings = _setting(
        LogRetentionSettings(), "deletion of closed segments; without a nightly analysis all count as read"
    )
    level: Literal["debug", "info", "warn", "error"] = _setting(
        "info", "minimum level: debug | info | warn | error; the analysis needs info"
    )
    dids: Literal["plain", "keyed"] = _setting(
        "plain", "how DIDs and message ids are written: plain | keyed (pseudonyms; recommended)"
    )
    key_file: Path | None = _setting(
        None, "keys of the pseudonyms, writable by the daemon; null: log.key beside identity.keys"
    )
    key_days: NonNegativeInteger = _setting(90, "days after which the pseudonym key is rotated; 0: never")


class MetricsSettings(SettingsSection):
    """Access to GET /metrics, and its size."""

    allow: tuple[CIDRNetwork, ...] = Field(
        description="networks that may read /metrics",
        default_factory=lambda: ("127.0.0.0/8", "::1/128"),
        validate_default=True,
    )
    queue_size_top: NonNegativeInteger = _setting(
        100, "number of queues with their own series of mediator_message_queue_size"
    )


class ReadinessSettings(SettingsSection):
    """The end-to-end probe behind GET /ready."""

    interval: Annotated[Duration, Field(gt=0, le=3)] = _setting(3.0, "pause between probe cycles")


class AdminSettings(SettingsSection):
    """The status page."""

    listen: ServerEndpoint | None = _setting(None, "listener of the status page; null: none")
    token_file: SecretPath | None = _setting(
        None, "file (mode 0600) with its token of at least 32 characters; required with listen"
    )
    reports: Path | None = _setting(None, "directory with the reports of the nightly analysis; null: none are shown")

    @model_validator(mode="after")
    def _check_token_file(self) -> AdminSettings:
        if self.listen is not None and self.token_file is None:
            raise ValueError("expected token_file, because listen is set")
        return self


class ClusterSettings(SettingsSection):
    """Clustering of nodes on one store."""

    listen: ServerEndpoint | None = _setting(None, "node-to-node listener; null: a single node")
    advertise: HostPort | None = _setting(
        None, "host:port at which other nodes reach it; null: interface and port of listen"
    )
    secret_file: SecretPath | None = _setting(
        None, "file (mode 0600) with the shared secret of at least 32 bytes; required with listen"
    )

    @model_validator(mode="after")
    def _check_secret_file(self) -> ClusterSettings:
        if self.listen is not None and self.secret_file is None:
            raise ValueError("expected secret_file, because listen is set")
        return self

    @model_validator(mode="after")
    def _check_address(self) -> ClusterSettings:
        if self.listen is not None and self.address is None:
            raise ValueError(
                "expected an address in listen that other nodes can reach, such as tcp:7070:interface=10.0.0.5, "
                "or a value for advertise"
            )
        return self

    @property
    def address(self) -> str | None:
        """Twisted client endpoint string for other nodes."""
        return None if self.listen is None else make_client_endpoint(self.listen, self.advertise)


class Config(SettingsSection):
    """The complete configuration. Paths are as written until :meth:`resolved`; durations are in seconds."""

    public_url: PublicURL = _setting(
        "http://127.0.0.1:8080", "base URL in DIDs and documents, without the path of a service"
    )
    listen: Annotated[tuple[ServerEndpoint, ...], Field(min_length=1)] = _setting(
        ("tcp:8080:interface=127.0.0.1",), "public listeners, as Twisted endpoint strings; ssl:... for TLS"
    )
    node: NodeName | None = _setting(None, "node name in logs and in a cluster; null: the host name")
    trusted_proxies: tuple[CIDRNetwork, ...] = _setting(
        (), "networks of reverse proxies, whose X-Forwarded-For is trusted"
    )
    websocket_origins: tuple[OriginPattern, ...] = _setting(
        ("*",), "Origin headers allowed to open WebSockets: *, https://app.example, https://*.example, null"
    )
    drain_timeout: Annotated[Duration, Field(lt=10)] = _setting(
        8.0, "maximum time to drain open connections at exit; 0 closes them at once"
    )
    control_socket: Path | None = _setting(
        Path("control.sock"), "UNIX socket (mode 0600) for commands to the running daemon; null: none"
    )
    identity: IdentitySettings = _setting(IdentitySettings(), "keys and DIDs of the mediator")
    storage: StorageSettings = _setting(StorageSettings(), "the store for accounts and messages")
    queue: QueueSettings = _setting(QueueSettings(), "message queues")
    limits: LimitSettings = _setting(
        LimitSettings(), "rate and resource limits; requests above them get 429, too large ones 413"
    )
    didcomm: DIDCommSettings = _setting(DIDCommSettings(), "the DIDComm v2 protocols")
    didcomm_v1: DIDCommV1Settings = _setting(DIDCommV1Settings(), "DIDComm v1 (Aries)")
    decentrl: DecentrlSettings = _setting(DecentrlSettings(), "the Decentrl protocol")
    outbound: OutboundSettings = _setting(
        OutboundSettings(), "outbound requests: did:web, replies, delivery to endpoints"
    )
    push: PushSettings = _setting(PushSettings(), "push notifications: waking wallets without a socket")
    log: LogSettings = _setting(LogSettings(), "the event log (JSON lines)")
    metrics: MetricsSettings = _setting(MetricsSettings(), "GET /metrics")
    readiness: ReadinessSettings = _setting(ReadinessSettings(), "GET /ready, the end-to-end probe")
    admin: AdminSettings = _setting(AdminSettings(), "the status page, GET /admin")
    cluster: ClusterSettings = _setting(ClusterSettings(), "several nodes sharing one store")
    workers: PositiveInteger = _setting(1, "worker processes; more than 1 needs sqlite or mongodb")

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, workers: int, info: ValidationInfo) -> int:
        storage = info.data.get("storage")
        if workers > 1 and isinstance(storage, StorageSettings) and storage.backend == "memory":
            raise ValueError("expected 1, because processes cannot share storage.backend: memory")
        cluster = info.data.get("cluster")
        if workers > 1 and isinstance(cluster, ClusterSettings) and cluster.listen is not None:
            raise ValueError("expected 1, because cluster.listen is set; run one node per core instead")
        return workers

    @property
    def node_name(self) -> str:
        """`node`, or the host name with characters replaced that file names must not contain."""
        return self.node or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63].strip("-._") or "node"

    @property
    def log_key_path(self) -> Path:
        """Path of the file with the pseudonym keys of the event log."""
        return self.log.key_file or self.identity.keys.with_name("log.key")
