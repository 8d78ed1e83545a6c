"""
Every setting with its default and its one line of explanation.

The models are the one declaration: the reader checks against them, and `etc/mediator.yaml` is written from them.
Nothing past the wiring sees them; classes receive plain values.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mediatord.config.values import (
    DID,
    DIDURL,
    Count,
    DIDs,
    Duration,
    HostPort,
    MongoURI,
    Natural,
    Network,
    NodeName,
    OriginPattern,
    PublicURL,
    ServerEndpoint,
    Share,
    Size,
    Switch,
    Third,
    URLOrDID,
    client_endpoint,
)
from mediatord.credentials import placed
from mediatord.endpoint_strings import with_absolute_paths


def _explain(text: str) -> Any:
    """A field's explanation, in the place where the template looks for it."""
    return Field(description=text)


_Some = TypeVar("_Some", bound="Section")


class Section(BaseModel):
    """Keys that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """A section of which only comments are left reads as null."""
        return {} if value is None else value


class Identity(Section):
    """Who the mediator is."""

    keys: Annotated[Path, _explain("private keys (JWK set, mode 0600), relative to this file")] = Path("keys.jwks")
    passphrase_file: Annotated[
        Path | None, _explain("opens keys that `mediatord keys encrypt` has encrypted; mode 0600, or credential:NAME")
    ] = None
    former_dids: Annotated[
        tuple[DID, ...], _explain("earlier DIDs of this mediator, still accepted; each with a key of ours")
    ] = ()


class SQLite(Section):
    """Where SQLite keeps its file."""

    path: Annotated[Path, _explain("the database file; its directory must be writable")] = Path("mediator.sqlite3")
    max_bytes: Annotated[
        Size | None, _explain("beyond it nothing more is stored (503), only deleted; null: as the disk allows")
    ] = None
    min_free_bytes: Annotated[
        Size | None,
        _explain("left free on its disk in the same way; null: 5 % of it, 256 MiB to 1 GiB, at most a tenth"),
    ] = None


class MongoDB(Section):
    """Where MongoDB is."""

    uri: Annotated[MongoURI, _explain("server, credentials and database name"), Field(repr=False)] = (
        "mongodb://127.0.0.1:27017/mediatord"
    )
    max_bytes: Annotated[
        Size | None, _explain("beyond it nothing more is stored (503), only deleted; null: as the disk allows")
    ] = None
    min_free_bytes: Annotated[
        Size | None,
        _explain(
            "left free on the disk of the primary in the same way; null: 5 % of it, 256 MiB to 1 GiB, at most a tenth"
        ),
    ] = None


class Storage(Section):
    """Where accounts and messages are kept."""

    backend: Annotated[
        Literal["memory", "sqlite", "mongodb"], _explain("memory (lost at stop) | sqlite | mongodb")
    ] = "sqlite"
    sqlite: Annotated[SQLite, _explain("used when backend is sqlite")] = SQLite()
    mongodb: Annotated[MongoDB, _explain("used when backend is mongodb")] = MongoDB()


class Queue(Section):
    """What waits for its recipients."""

    max_messages: Annotated[Count, _explain("per recipient DID; the oldest goes first")] = 1000
    max_bytes: Annotated[Size, _explain("per recipient DID; the oldest goes first")] = 67_108_864
    when_full: Annotated[
        Literal["oldest", "refuse"],
        _explain("what makes room: oldest (of whoever has most) | refuse (senders get 429)"),
    ] = "oldest"
    sender_share: Annotated[
        Share, _explain("part of a full queue that one sender or one network may have; 1: no such rule")
    ] = 0.5
    reserved_for_known: Annotated[
        Third,
        _explain("part of a full queue kept for senders the recipient acknowledged before; 0: no ranks of senders"),
    ] = 0.25
    ttl: Annotated[Duration, Field(gt=0), _explain("a message not fetched by then is dropped")] = 259_200.0
    delivered_timeout: Annotated[
        Duration, Field(gt=0), _explain("a push not acknowledged by then is pending again")
    ] = 60.0


class Limits(Section):
    """How much is taken from whom."""

    did_per_minute: Annotated[Count, _explain("forwards and commands of one sender DID")] = 60
    ip_per_minute: Annotated[Count, _explain("forwards and undecryptable posts of one address")] = 120
    account_per_minute: Annotated[Count, _explain("coordination and pickup requests of one account")] = 600
    max_message_bytes: Annotated[Size, _explain("larger bodies and frames are refused")] = 1_048_576
    max_connections_per_ip: Annotated[Count, _explain("open sockets of one address")] = 64
    accounts_per_address_per_day: Annotated[
        Count, _explain("accounts and Decentrl registrations that one address may make")
    ] = 1000
    registration_bytes_per_address_per_day: Annotated[
        Count, _explain("bytes of DIDs and registrations that one address may have stored")
    ] = 4_194_304
    accounts: Annotated[Count, _explain("accounts in all; beyond that nobody is granted mediation")] = 1_000_000
    registration_bytes: Annotated[Size, _explain("bytes of DIDs and registrations in all")] = 1_073_741_824
    trusted_peers: Annotated[
        tuple[Network, ...], _explain("networks of other mediators; each counts as one address, with these limits:")
    ] = ()
    trusted_per_minute: Annotated[Count, _explain("forwards and other requests of one of them")] = 6000
    trusted_connections: Annotated[Count, _explain("open sockets of one of them")] = 1024
    max_outbox_bytes: Annotated[Size, _explain("pushes that wait for one socket which is not read")] = 1_048_576
    max_unread_bytes: Annotated[
        Size, _explain("answers over HTTP that are not read, in all; an eighth of that for one address")
    ] = 268_435_456


class Didcomm(Section):
    """The DIDComm v2 side."""

    delivery_form: Annotated[
        Literal["as-received", "json", "base64"], _explain("attachments of a delivery: as-received | json | base64")
    ] = "as-received"
    live_push: Annotated[
        Literal["delivery", "raw"], _explain("live mode sends a pickup delivery | the raw envelope")
    ] = "delivery"
    live_default_on: Annotated[Switch, _explain("a socket is live without asking for it")] = False
    max_delay: Annotated[Duration, _explain("delay_milli is capped here; 0 delivers at once")] = 86_400.0
    legacy_draft03: Annotated[Switch, _explain("understand ECDH-1PU draft 3, which old wallets use")] = False
    registration: Annotated[
        Literal["open", "allow-list"], _explain("who is granted mediation: open (anyone) | allow-list")
    ] = "open"
    allow: Annotated[
        tuple[DIDs, ...], _explain("the DIDs that registration: allow-list grants; did:web:a.example:* for all below")
    ] = ()
    deny: Annotated[
        tuple[DIDs, ...],
        _explain("DIDs that get no grant, and are refused what they authenticate; goes before allow"),
    ] = ()
    require_ownership: Annotated[
        Switch, _explain("register recipient DIDs other than the account's own only with a proof made by them")
    ] = False
    require_registered_sender: Annotated[
        Switch, _explain("take forwards only from authenticated senders with mediation here")
    ] = False
    require_encrypted_payload: Annotated[
        Switch, _explain("refuse to queue an attachment that is not an encrypted envelope")
    ] = True
    problem_codes: Annotated[
        Literal["uc021", "identus"],
        _explain("for unknown recipients: uc021 (e.p.me.res.not-found) | identus (e.p.req.not_enroll)"),
    ] = "uc021"
    problem_report_ack: Annotated[
        Switch, _explain("name the refused message in ack, which didcomm-jvm cannot parse; pthid names its thread")
    ] = False
    max_recipients: Annotated[Count, _explain("recipient DIDs per account")] = 1000
    unused_account_ttl: Annotated[
        Duration, _explain("an account that was never used after its first day goes after that; 0: never")
    ] = 604_800.0
    idle_account_ttl: Annotated[
        Duration, _explain("an account goes after so long without authenticated contact; 0: never")
    ] = 0.0
    delivery_limit: Annotated[Count, _explain("messages in one delivery at most, whatever was asked for")] = 100
    failover: Annotated[
        Literal["none", "configured", "account-did"],
        _explain("POST to wallets without a socket: none | configured (endpoints) | account-did (its services)"),
    ] = "none"
    endpoints: Annotated[Mapping[DID, URLOrDID], _explain("account DID to URL or DID, for failover: configured")] = (
        Field(default_factory=dict)
    )
    routing_keys: Annotated[
        Mapping[DID, tuple[DIDURL, ...]], _explain("recipient DID to keys that its messages are wrapped for as well")
    ] = Field(default_factory=dict)
    rewrap: Annotated[Switch, _explain("deliver inside a fresh forward to the recipient")] = False


class Decentrl(Section):
    """The Decentrl side."""

    timestamp_window: Annotated[
        Duration, Field(gt=0, le=86_400), _explain("how far the clock of a command may be off, either way")
    ] = 300.0
    contract_lifetime: Annotated[
        Duration, Field(gt=0), _explain("a registration counts no longer than this, whatever its contract says")
    ] = 31_536_000.0
    registration: Annotated[
        Literal["open", "own", "allow-list"],
        _explain("who may register: open | own (DIDs that name this mediator) | allow-list"),
    ] = "open"
    allow: Annotated[tuple[DIDs, ...], _explain("the DIDs of registration: allow-list")] = ()
    deny: Annotated[
        tuple[DIDs, ...], _explain("DIDs that may not register, and are refused every command; goes before allow")
    ] = ()
    raw_keys: Annotated[Switch, _explain("write the keys of the did:web document without multicodec prefix")] = False
    max_contract_requests: Annotated[Count, _explain("requests for a contract that may wait for one DID")] = 1000
    max_contract_requests_per_sender: Annotated[Count, _explain("those of one and the same sender")] = 10
    max_contracts: Annotated[Count, _explain("contracts that one DID may keep")] = 10_000
    max_contracts_per_peer: Annotated[Count, _explain("those with one and the same DID")] = 100
    max_pending_events: Annotated[Count, _explain("events that may wait for one DID")] = 10_000
    max_pending_bytes: Annotated[
        Size, _explain("and their bytes; a page with more than 16 MiB is refused, so more could get stuck")
    ] = 16_777_216
    max_stored_events: Annotated[Count, _explain("stored and public events that one DID may keep")] = 1_000_000
    max_stored_bytes: Annotated[Size, _explain("and their bytes")] = 1_073_741_824

    @model_validator(mode="after")
    def _allow_goes_with_the_list(self) -> Decentrl:
        if (self.registration == "allow-list") != bool(self.allow):
            raise ValueError("expected DIDs in allow with registration: allow-list, and none without")
        return self


class Outbound(Section):
    """Requests that the mediator makes itself: did:web, replies, delivery to endpoints."""

    allow_private: Annotated[
        tuple[Network, ...], _explain("loopback and private networks that may be reached all the same")
    ] = ()


class Rotation(Section):
    """When a log segment is closed, and what becomes of it."""

    bytes: Annotated[Size, Field(ge=65_536), _explain("a segment of this size is closed")] = 67_108_864
    keep: Annotated[Count, _explain("newest closed segments that are kept whatever their age")] = 24
    compress: Annotated[Switch, _explain("gzip closed segments")] = True


class Retention(Section):
    """How long closed log segments are kept."""

    age: Annotated[
        Duration, Field(gt=0), _explain("older closed segments are deleted once the nightly analysis has read them")
    ] = 432_000.0
    bytes: Annotated[
        Size, _explain("of all closed segments; beyond it the oldest are deleted once they were read")
    ] = 4_294_967_296
    unread_bytes: Annotated[
        Size, _explain("of all closed segments; beyond it also unread ones are deleted, with an alert")
    ] = 8_589_934_592

    @model_validator(mode="after")
    def _unread_is_the_outer_bound(self) -> Retention:
        if self.unread_bytes < self.bytes:
            raise ValueError("expected unread_bytes to be at least bytes")
        return self


class Log(Section):
    """Events as JSON lines, for operators and analytics."""

    directory: Annotated[Path, _explain("relative to this file; one daemon per directory")] = Path("log")
    rotate: Annotated[Rotation, _explain("besides at every full hour UTC, on SIGUSR1 and at stop")] = Rotation()
    retention: Annotated[
        Retention, _explain("when closed segments are deleted; without a nightly analysis all count as read")
    ] = Retention()
    level: Annotated[
        Literal["debug", "info", "warn", "error"], _explain("debug | info | warn | error; analytics needs info")
    ] = "info"
    dids: Annotated[
        Literal["plain", "keyed"], _explain("plain | keyed (pseudonyms; recommended): DIDs and message ids")
    ] = "plain"
    key_file: Annotated[
        Path | None, _explain("keys of pseudonyms, which the daemon adds to; null: log.key beside identity.keys")
    ] = None
    key_days: Annotated[Natural, _explain("pseudonyms are made with a new key after so many days; 0: never")] = 90


class MetricsAccess(Section):
    """Who may read GET /metrics, and how much of it there is."""

    allow: Annotated[tuple[Network, ...], _explain("networks that /metrics is answered to")] = Field(
        default_factory=lambda: ("127.0.0.0/8", "::1/128"), validate_default=True
    )
    queue_size_top: Annotated[Natural, _explain("series of mediator_message_queue_size; the rest is summed up")] = 100


class Readiness(Section):
    """How often messages are sent through the daemon while somebody asks GET /ready."""

    interval: Annotated[
        Duration, Field(gt=0, le=3), _explain("from the end of one message's way to the next; at most 3 seconds")
    ] = 3.0


class Admin(Section):
    """The status page for operators."""

    listen: Annotated[
        ServerEndpoint | None, _explain("where GET /admin is served, apart from everything else; null: nowhere")
    ] = None
    token_file: Annotated[
        Path | None, _explain("file (mode 0600) with the token that it wants, 32 characters or more")
    ] = None
    reports: Annotated[
        Path | None, _explain("directory with the reports of the nightly analysis, to be shown there")
    ] = None

    @model_validator(mode="after")
    def _listening_needs_a_token(self) -> Admin:
        if self.listen is not None and self.token_file is None:
            raise ValueError("expected a token_file beside listen")
        return self


class Cluster(Section):
    """Several nodes on one store."""

    listen: Annotated[ServerEndpoint | None, _explain("node-to-node address; null: a single node")] = None
    advertise: Annotated[
        HostPort | None, _explain("host:port where other nodes reach that; null: the interface and port of listen")
    ] = None
    secret_file: Annotated[
        Path | None, _explain("file (mode 0600) with the secret that the nodes share, 32 bytes or more")
    ] = None

    @model_validator(mode="after")
    def _listening_needs_a_secret(self) -> Cluster:
        if self.listen is not None and self.secret_file is None:
            raise ValueError("expected a secret_file beside listen")
        return self

    @model_validator(mode="after")
    def _others_can_reach_it(self) -> Cluster:
        if self.listen is not None and self.address is None:
            raise ValueError("expected an interface in listen that other nodes can reach, or advertise beside it")
        return self

    @property
    def address(self) -> str | None:
        """What other nodes connect to, as a Twisted client endpoint string."""
        return None if self.listen is None else client_endpoint(self.listen, self.advertise)


class Config(Section):
    """A whole configuration. Paths are as written until :meth:`resolved`; durations are seconds."""

    public_url: Annotated[PublicURL, _explain("what DIDs and documents name, without the path of any service")] = (
        "http://127.0.0.1:8080"
    )
    listen: Annotated[
        tuple[ServerEndpoint, ...], Field(min_length=1), _explain("Twisted endpoint strings; ssl:... for TLS")
    ] = ("tcp:8080:interface=127.0.0.1",)
    node: Annotated[NodeName | None, _explain("name in logs and in a cluster; null: the host name")] = None
    trusted_proxies: Annotated[
        tuple[Network, ...], _explain("networks whose X-Forwarded-For names the real client")
    ] = ()
    websocket_origins: Annotated[
        tuple[OriginPattern, ...],
        _explain("origins of the pages that may open WebSockets: *, https://app.example, https://*.example, null"),
    ] = ("*",)
    drain_timeout: Annotated[
        Duration, Field(lt=10), _explain("how long stopping waits for open sockets; under 10 seconds")
    ] = 8.0
    identity: Annotated[Identity, _explain("the mediator's own DIDs")] = Identity()
    storage: Annotated[Storage, _explain("where accounts and messages are kept")] = Storage()
    queue: Annotated[Queue, _explain("messages waiting for their recipients")] = Queue()
    limits: Annotated[Limits, _explain("what is over is refused with 429, or 413 for size")] = Limits()
    didcomm: Annotated[Didcomm, _explain("the DIDComm v2 side")] = Didcomm()
    decentrl: Annotated[Decentrl, _explain("the Decentrl side")] = Decentrl()
    outbound: Annotated[Outbound, _explain("requests that the mediator makes itself")] = Outbound()
    log: Annotated[Log, _explain("events as JSON lines, rotated")] = Log()
    metrics: Annotated[MetricsAccess, _explain("GET /metrics")] = MetricsAccess()
    readiness: Annotated[Readiness, _explain("GET /ready, which sends a message through the daemon")] = Readiness()
    admin: Annotated[Admin, _explain("the status page for operators, GET /admin")] = Admin()
    cluster: Annotated[Cluster, _explain("several nodes on one store")] = Cluster()
    workers: Annotated[
        Count, _explain("processes sharing listeners and store; more than 1 needs sqlite or mongodb")
    ] = 1

    @field_validator("workers")
    @classmethod
    def _workers_share_a_store(cls, workers: int, info: ValidationInfo) -> int:
        storage = info.data.get("storage")
        if workers > 1 and isinstance(storage, Storage) and storage.backend == "memory":
            raise ValueError("expected 1 with storage.backend memory, which processes cannot share")
        cluster = info.data.get("cluster")
        if workers > 1 and isinstance(cluster, Cluster) and cluster.listen is not None:
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
        return _with(
            self,
            listen=tuple(with_absolute_paths(one, base) for one in self.listen),
            identity=_with(
                self.identity,
                keys=placed(base, self.identity.keys),
                passphrase_file=passphrase and placed(base, passphrase),
            ),
            storage=_with(self.storage, sqlite=_with(sqlite, path=base / sqlite.path)),
            log=_with(log, directory=base / log.directory, key_file=log.key_file and base / log.key_file),
            admin=_with(
                admin,
                listen=endpoint and with_absolute_paths(endpoint, base),
                token_file=admin.token_file and placed(base, admin.token_file),
                reports=admin.reports and base / admin.reports,
            ),
            cluster=_with(
                self.cluster,
                listen=cluster_endpoint and with_absolute_paths(cluster_endpoint, base),
                secret_file=secret and placed(base, secret),
            ),
        )


def _with(model: _Some, **values: Any) -> _Some:
    """The same with other values; what nobody had set still counts as not set."""
    return model.model_construct(model.model_fields_set, **{**{name: value for name, value in model}, **values})
