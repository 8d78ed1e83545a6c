"""Builds the core services of all protocols: identity, event log, metrics, store, connections, rate limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic as _monotonic
from typing import Any

from prometheus_client import CollectorRegistry

from mediatord import __version__
from mediatord.app.cluster import ClusterSubsystem, resolve_node_settings
from mediatord.app.reload import (
    ConfigReloader,
    CurrentIdentity,
    PseudonymKeyRotation,
    build_segment_limits,
    load_identity,
    log_failed_renewal,
    parse_identity,
    to_utc_day,
)
from mediatord.cluster.membership import NodeHealth
from mediatord.config.settings import Config
from mediatord.delivery.connections import ConnectionManager
from mediatord.didcomm.forward_router import SenderFingerprint
from mediatord.errors import StartupError
from mediatord.http.client_address import name_peer_network
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.observability.event_log import EventLogWriter, LogOrigin, SegmentSealer
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, renew_pseudonym_key
from mediatord.probe.identities import ProbeCredentials, derive_probe_credentials
from mediatord.ratelimit.admission import RequestAdmission, RequestGate
from mediatord.ratelimit.rate_limiter import RateLimiter, RateLimits, make_local_limiter
from mediatord.ratelimit.registration import RegistrationLimits, RegistrationQuota
from mediatord.secret_files import SecretFileError
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.factory import build_store
from mediatord.store.interfaces.cluster import ClusterNode
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits, RemovedMessage
from mediatord.store.interfaces.store import IStore
from mediatord.workers.supervised_worker import WorkerSpec

# Hexadecimal digits that identify a store in the ledger.
_STORE_NAME_LENGTH = 12


class LateRemovalRecorder:
    """
    Records messages and events whose removal the store could confirm only later.

    :ivar resolve_events: records acknowledged events; set once the Decentrl services exist.
    """

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder
        self.resolve_events: Callable[[Sequence[RemovedMessage]], None] = lambda removed: None

    def record_messages(self, removed: Sequence[RemovedMessage]) -> None:
        """Record removed messages."""
        for one in removed:
            if one.reason is None:
                self._recorder.record_acknowledgement(one, "pickup", "didcomm")
            elif one.reason == "ttl":
                self._recorder.record_expiry(one)
            else:
                self._recorder.record_eviction(one)

    def record_events(self, removed: Sequence[RemovedMessage]) -> None:
        """Record removed events."""
        self.resolve_events(removed)


@dataclass(frozen=True, slots=True)
class CoreServices:
    """
    What the protocols, the sites and the cluster are built on.

    :param reloader: has the settings that may change at runtime.
    :param late_removals: receives removals that the store confirms late.
    :param node: this process as other nodes see it.
    :param cluster: None for a single process.
    :param monotonic: seconds of a monotonic clock.
    :param probe_credentials: identify the daemon's requests to itself.
    :param sender_fingerprints: identify senders within a queue.
    :param store_name: the same for all processes that use the store, and for no other store.
    """

    reactor: Any
    identity: CurrentIdentity
    events: EventLogWriter
    recorder: EventRecorder
    reloader: ConfigReloader
    key_rotation: PseudonymKeyRotation
    store: IStore
    late_removals: LateRemovalRecorder
    connections: ConnectionManager[Any]
    rate_limiter: RateLimiter
    registrations: RegistrationQuota
    gate: RequestGate
    requests: RequestAdmission
    outbound: OutboundHTTPClient
    node: ClusterNode
    cluster: ClusterSubsystem | None
    monotonic: Callable[[], float]
    node_health: NodeHealth
    probe_credentials: ProbeCredentials
    sender_fingerprints: SenderFingerprint
    store_name: str


def load_pseudonymizer(config: Config, now: float) -> Pseudonymizer:
    """
    The pseudonymizer of the event log; a new key is created if there is none for the current epoch.

    :raise StartupError: the key file cannot be used.
    """
    try:
        key = renew_pseudonym_key(
            config.log_key_path, to_utc_day(now), config.log.key_days, log_failed_renewal, make=True
        )
        return Pseudonymizer(config.log.dids, key)
    except SecretFileError as error:
        raise StartupError(str(error)) from None


def build_core_services(
    reactor: Any,
    config: Config,
    *,
    worker: WorkerSpec | None = None,
    store: IStore | None = None,
    create: bool = True,
    monotonic: Callable[[], float] = _monotonic,
) -> CoreServices:
    """
    Build the core services.

    :param worker: what a worker has from its supervisor.
    :param store: used instead of the configured one.
    :param create: whether to create the database file if it does not exist.
    :raise StartupError: keys, identity or log key cannot be used.
    """
    # A worker uses its supervisor's keys, even if the file has changed since.
    first_identity = load_identity(config) if worker is None else parse_identity(config, worker.keys.decode("utf-8"))
    identity = CurrentIdentity(first_identity)
    seed = worker.seed if worker else first_identity.root_secret
    probe_credentials = derive_probe_credentials(seed, worker.secret if worker else None)

    pseudonymizer = load_pseudonymizer(config, reactor.seconds())
    origin = LogOrigin(config.node_name, __version__, pseudonymizer.epoch)
    sealer = SegmentSealer(reactor, config.log.rotate.compress)
    events = EventLogWriter(
        config.log.directory,
        reactor,
        origin,
        limits=build_segment_limits(config),
        level=config.log.level,
        seal=sealer,
    )
    metrics = Metrics(CollectorRegistry(), version=__version__, label=lambda did: pseudonymizer.did(did))
    events.metrics = metrics
    recorder = EventRecorder(
        reactor, events, metrics, pseudonymizer, monotonic, probe_credentials.identities.is_probe_did
    )
    key_rotation = PseudonymKeyRotation(
        reactor, config.log_key_path, pseudonymizer, events, lambda: reloader.config.log.key_days
    )
    reloader = ConfigReloader(config, identity, events, sealer, recorder, monotonic, key_rotation.rotate_if_due)

    late_removals = LateRemovalRecorder(recorder)
    if store is None:
        store = _build_configured_store(
            reactor, config, metrics, late_removals, shared=worker is not None, create=create
        )
    connections: ConnectionManager[Any] = ConnectionManager(*_build_connection_limits(config))

    node_settings = resolve_node_settings(config, worker)
    cluster = None
    node = ClusterNode(origin.node, origin.boot, "", b"")
    if node_settings is not None:
        node = ClusterNode(
            origin.node, origin.boot, node_settings.address, node_settings.keys.seal, first_identity.fingerprint
        )
        cluster = ClusterSubsystem(reactor, store, metrics, node, node_settings)
        connections.set_presence_publisher(cluster.presence_publisher, reactor)

    make_limiter = cluster.quotas.make_limiter if cluster else make_local_limiter
    rate_limiter = RateLimiter(reactor, recorder.record_rate_limit, _build_rate_limits(config), make_limiter)
    registrations = RegistrationQuota(
        reactor, store, recorder.record_rate_limit, _build_registration_limits(config), make_limiter
    )

    def apply_limits(new: Config) -> None:
        connections.limit(*_build_connection_limits(new))
        rate_limiter.set_limits(_build_rate_limits(new))
        registrations.set_limits(_build_registration_limits(new))

    reloader.follow(apply_limits)
    gate = RequestGate(reactor)
    requests = RequestAdmission(reactor, gate, recorder)
    metrics.register_buffer("store_operations", store.get_buffered)
    metrics.register_buffer("event_log", lambda: (None, events.pending))
    metrics.register_buffer("rate_limits", lambda: (len(rate_limiter) + len(registrations), None))
    metrics.register_buffer("requests_in_progress", lambda: requests.memory.held)
    metrics.register_buffer("counted_pushes", lambda: (recorder.attempt_count, None))
    metrics.register_buffer("subscriptions", lambda: (connections.subscriptions, None))
    metrics.register_buffer("subscription_backlogs", lambda: (len(connections.backlogs), None))
    return CoreServices(
        reactor=reactor,
        identity=identity,
        events=events,
        recorder=recorder,
        reloader=reloader,
        key_rotation=key_rotation,
        store=store,
        late_removals=late_removals,
        connections=connections,
        rate_limiter=rate_limiter,
        registrations=registrations,
        gate=gate,
        requests=requests,
        outbound=OutboundHTTPClient(reactor, allow_private=config.outbound.allow_private),
        node=node,
        cluster=cluster,
        monotonic=monotonic,
        node_health=cluster.node_health if cluster else NodeHealth(reactor),
        probe_credentials=probe_credentials,
        sender_fingerprints=SenderFingerprint(seed),
        store_name=derive_store_name(config, first_identity, origin.boot),
    )


def _build_configured_store(
    reactor: Any, config: Config, metrics: Metrics, late_removals: LateRemovalRecorder, *, shared: bool, create: bool
) -> IStore:
    queue, decentrl = config.queue, config.decentrl
    space = config.storage.mongodb if config.storage.backend == "mongodb" else config.storage.sqlite
    try:
        return build_store(
            config.storage.backend,
            reactor,
            QueueLimits(
                queue.max_messages, queue.max_bytes, queue.when_full, queue.sender_share, queue.reserved_for_known
            ),
            caps=DecentrlQuotas(
                requests=decentrl.max_contract_requests,
                requests_of_one=decentrl.max_contract_requests_per_sender,
                contracts=decentrl.max_contracts,
                contracts_with_one=decentrl.max_contracts_per_peer,
                pending=decentrl.max_pending_events,
                pending_bytes=decentrl.max_pending_bytes,
                stored=decentrl.max_stored_events,
                stored_bytes=decentrl.max_stored_bytes,
            ),
            path=config.storage.sqlite.path,
            shared=shared,
            create=create,
            space_limits=SpaceLimits(space.max_bytes, space.min_free_bytes),
            uri=config.storage.mongodb.uri,
            observe=metrics.observe_store_operation,
            on_up=metrics.set_storage_up,
            on_fault=metrics.set_storage_fault,
            tell=late_removals.record_messages,
            tell_events=late_removals.record_events,
        )
    except ValueError as error:
        raise StartupError(str(error)) from None


def derive_store_name(config: Config, identity: MediatorIdentity, boot: str) -> str:
    """Name of the store in the ledger; a memory store gets a new one at each start."""
    backend = config.storage.backend
    scope = f"{backend} {boot}" if backend == "memory" else backend
    return sha256(identity.fingerprint + scope.encode()).hexdigest()[:_STORE_NAME_LENGTH]


def _build_registration_limits(config: Config) -> RegistrationLimits:
    limits = config.limits
    return RegistrationLimits(
        limits.accounts_per_address_per_day,
        limits.registration_bytes_per_address_per_day,
        limits.accounts,
        limits.registration_bytes,
        _name_trusted_peers(config),
        max(1, round(limits.trusted_per_minute / limits.ip_per_minute)),
    )


def _build_connection_limits(config: Config) -> tuple[int, dict[str, int]]:
    """The limit on sockets per address, and the larger one of each trusted peer."""
    default = config.limits.max_connections_per_ip
    return default, dict.fromkeys(_name_trusted_peers(config), max(default, config.limits.trusted_connections))


def _build_rate_limits(config: Config) -> RateLimits:
    limits = config.limits
    return RateLimits(
        limits.did_per_minute,
        limits.ip_per_minute,
        limits.account_per_minute,
        _name_trusted_peers(config),
        limits.trusted_per_minute,
    )


def _name_trusted_peers(config: Config) -> frozenset[str]:
    return frozenset(map(name_peer_network, config.limits.trusted_peers))
