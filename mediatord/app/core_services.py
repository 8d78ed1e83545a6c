"""What both protocol halves stand on: identity, log, metrics, store, connections, the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry

from mediatord import __version__
from mediatord.app.cluster import ClusterSubsystem, resolve_node_settings
from mediatord.app.pseudonym_key_rotation import PseudonymKeyRotation, log_failed_renewal, to_utc_day
from mediatord.app.reload import (
    ConfigReloader,
    CurrentIdentity,
    ReloadableEventLog,
    build_segment_limits,
    load_identity,
    parse_identity,
)
from mediatord.cluster.node_health import NodeHealth
from mediatord.config.settings import Config
from mediatord.delivery.connections import ConnectionManager
from mediatord.errors import StartupError
from mediatord.http.client_address import name_peer_network
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.observability.event_log import EventLogWriter, LogOrigin, SegmentSealer
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, renew_pseudonym_key
from mediatord.private_file import PrivateFileError
from mediatord.probe.cycle import ProbeCredentials, derive_probe_credentials
from mediatord.ratelimit.access_control import RegistrationLimits, RegistrationQuota
from mediatord.ratelimit.distributed_limiter import QuotaStore
from mediatord.ratelimit.rate_limiter import RateLimiter, TrustedAddresses
from mediatord.ratelimit.request_gate import RequestGate
from mediatord.ratelimit.sender_fingerprint import SenderFingerprint
from mediatord.store.factory import build_store
from mediatord.store.interfaces.cluster import ClusterNode
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits, RemovedMessage
from mediatord.store.interfaces.store import IStore
from mediatord.store.quotas import SpaceLimits
from mediatord.workers.worker_process import WorkerResources

# Hexadecimal digits that stand for a store.
_STORE_NAME_LENGTH = 12


class LateRemovalRecorder:
    """
    Tells of messages and events that have left their queues although the store had failed to say so.

    :ivar events: told of events that were acknowledged; the Decentrl half's, once there is one.
    """

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder
        self.events: Callable[[Sequence[RemovedMessage]], None] = lambda removed: None

    def tell(self, removed: Sequence[RemovedMessage]) -> None:
        """Messages have."""
        for one in removed:
            if one.reason is None:
                self._recorder.record_acknowledgement(one, "pickup", "didcomm")
            elif one.reason == "ttl":
                self._recorder.record_expiry(one)
            else:
                self._recorder.record_eviction(one)

    def tell_events(self, removed: Sequence[RemovedMessage]) -> None:
        """Events have."""
        self.events(removed)


@dataclass(frozen=True, slots=True)
class CoreServices:
    """
    What everything else stands on.

    :param reloading: has the settings that may change while it runs.
    :param late: what the store tells of when it becomes known late.
    :param node: this process, as others may know it.
    :param cluster: None when this is the only process.
    :param steady: seconds since any time, by a clock that nobody sets.
    :param standing: whether this process should be sent work.
    :param own: what the daemon's requests to itself are known by.
    :param origins: what queues know senders by.
    :param store_name: the same for all processes that use its store, and for no other.
    """

    reactor: Any
    identity: CurrentIdentity
    events: EventLogWriter
    recorder: EventRecorder
    reloading: ConfigReloader
    epochs: PseudonymKeyRotation
    store: IStore
    late: LateRemovalRecorder
    connections: ConnectionManager[Any]
    admission: RateLimiter
    registrations: RegistrationQuota
    gate: RequestGate
    outbound: OutboundHTTPClient
    node: ClusterNode
    cluster: ClusterSubsystem | None
    steady: Callable[[], float]
    node_health: NodeHealth
    own: ProbeCredentials
    origins: SenderFingerprint
    store_name: str


def get_log_key_path(config: Config) -> Path:
    """Where the keys of the event log are."""
    return config.log.key_file or config.identity.keys.with_name("log.key")


def load_pseudonymizer(config: Config, now: float) -> Pseudonymizer:
    """
    What stands for DIDs in the log; its key is made if there is none, or if the last one is too old.

    :raise StartupError: the key cannot be used.
    """
    try:
        key = renew_pseudonym_key(
            get_log_key_path(config), to_utc_day(now), config.log.key_days, log_failed_renewal, make=True
        )
        return Pseudonymizer(config.log.dids, key)
    except PrivateFileError as error:
        raise StartupError(str(error)) from None


def build_core_services(
    reactor: Any,
    config: Config,
    *,
    worker: WorkerResources | None = None,
    store: IStore | None = None,
    create: bool = True,
    steady: Callable[[], float] = monotonic,
) -> CoreServices:
    """
    Make the rooms that everything else uses.

    :param worker: what this process has of its supervisor.
    :param store: instead of the one that the configuration names.
    :param create: whether to make the file of that if it is not there.
    :raise StartupError: keys, identity or log key cannot be used.
    """
    identity = _load_process_identity(config, worker)
    tags = load_pseudonymizer(config, reactor.seconds())
    place = resolve_node_settings(config, worker)
    origin = LogOrigin(config.node_name, __version__, tags.epoch)
    sealer = SegmentSealer(reactor, config.log.rotate.compress)
    events = EventLogWriter(
        config.log.directory,
        reactor,
        origin,
        limits=build_segment_limits(config),
        level=config.log.level,
        seal=sealer,
    )
    metrics = Metrics(CollectorRegistry(), version=__version__, label=lambda did: tags.did(did))
    events.observer = metrics
    seed = worker.seed if worker else identity.root_secret
    itself = derive_probe_credentials(seed, worker.secret if worker else None)
    recorder = EventRecorder(reactor, events, metrics, tags, steady, itself.identities.is_probe_did)
    present = CurrentIdentity(identity)
    reloading = ConfigReloader(config, present, ReloadableEventLog(events, sealer), recorder, steady)
    epochs = PseudonymKeyRotation(
        reactor, get_log_key_path(config), tags, events, lambda: reloading.config.log.key_days
    )
    reloading.refresh_log_key = epochs.rotate_if_due
    late = LateRemovalRecorder(recorder)
    store = store or _open_configured_store(reactor, config, metrics, late, shared=worker is not None, create=create)
    cluster = None
    node = ClusterNode(origin.node, origin.boot, "", b"")
    connections: ConnectionManager[Any] = ConnectionManager(*_build_connection_limits(config))
    if place is not None:
        node = ClusterNode(origin.node, origin.boot, place.address, place.keys.seal, identity.fingerprint)
        cluster = ClusterSubsystem(reactor, store, metrics, node, place)
        connections.set_presence_publisher(cluster.presence_publisher, reactor)
    admission = _build_rate_limiter(reactor, recorder, config, cluster.allowances if cluster else None)
    registrations = RegistrationQuota(
        reactor,
        store,
        recorder.record_rate_limit,
        _build_registration_limits(config),
        cluster.allowances if cluster else None,
    )
    reloading.follow(lambda new: _apply_limits(new, connections, admission))
    reloading.follow(lambda new: registrations.set_limits(_build_registration_limits(new)))
    return CoreServices(
        reactor=reactor,
        identity=present,
        events=events,
        recorder=recorder,
        reloading=reloading,
        epochs=epochs,
        store=store,
        late=late,
        connections=connections,
        admission=admission,
        registrations=registrations,
        gate=RequestGate(reactor),
        outbound=OutboundHTTPClient(reactor, allow_private=config.outbound.allow_private),
        node=node,
        cluster=cluster,
        steady=steady,
        node_health=cluster.node_health if cluster else NodeHealth(reactor),
        own=itself,
        origins=SenderFingerprint(seed),
        store_name=_derive_store_name(config, identity, origin.boot),
    )


def _load_process_identity(config: Config, worker: WorkerResources | None) -> MediatorIdentity:
    """A worker has the keys that its supervisor has, whatever has become of the file meanwhile."""
    return load_identity(config) if worker is None else parse_identity(config, worker.keys.decode("utf-8"))


def _open_configured_store(
    reactor: Any, config: Config, metrics: Metrics, late: LateRemovalRecorder, *, shared: bool, create: bool
) -> IStore:
    try:
        return build_store(
            config.storage.backend,
            reactor,
            _build_queue_limits(config),
            caps=_build_caps(config),
            path=config.storage.sqlite.path,
            shared=shared,
            create=create,
            space_limits=_build_space_limits(config),
            uri=config.storage.mongodb.uri,
            observe=metrics.observe_store_operation,
            on_up=metrics.set_storage_up,
            on_fault=metrics.set_storage_fault,
            tell=late.tell,
            tell_events=late.tell_events,
        )
    except ValueError as error:
        raise StartupError(str(error)) from None


def _build_space_limits(config: Config) -> SpaceLimits:
    section = config.storage.mongodb if config.storage.backend == "mongodb" else config.storage.sqlite
    return SpaceLimits(section.max_bytes, section.min_free_bytes)


def _derive_store_name(config: Config, identity: MediatorIdentity, boot: str) -> str:
    """Nobody shares a store but one mediator, and what is in memory ends with its process."""
    backend = config.storage.backend
    of = f"{backend} {boot}" if backend == "memory" else backend
    return sha256(identity.fingerprint + of.encode()).hexdigest()[:_STORE_NAME_LENGTH]


def _build_queue_limits(config: Config) -> QueueLimits:
    queue = config.queue
    return QueueLimits(
        queue.max_messages, queue.max_bytes, queue.when_full, queue.sender_share, queue.reserved_for_known
    )


def _build_caps(config: Config) -> DecentrlQuotas:
    settings = config.decentrl
    return DecentrlQuotas(
        requests=settings.max_contract_requests,
        requests_of_one=settings.max_contract_requests_per_sender,
        contracts=settings.max_contracts,
        contracts_with_one=settings.max_contracts_per_peer,
        pending=settings.max_pending_events,
        pending_bytes=settings.max_pending_bytes,
        stored=settings.max_stored_events,
        stored_bytes=settings.max_stored_bytes,
    )


def _apply_limits(config: Config, connections: ConnectionManager[Any], admission: RateLimiter) -> None:
    limits = config.limits
    connections.limit(*_build_connection_limits(config))
    admission.set_limits(
        did_per_minute=limits.did_per_minute,
        ip_per_minute=limits.ip_per_minute,
        account_per_minute=limits.account_per_minute,
        trusted=_build_trusted_peers(config),
    )


def _build_registration_limits(config: Config) -> RegistrationLimits:
    limits = config.limits
    return RegistrationLimits(
        limits.accounts_per_address_per_day,
        limits.registration_bytes_per_address_per_day,
        limits.accounts,
        limits.registration_bytes,
        _build_trusted_peers(config).peers,
        max(1, round(limits.trusted_per_minute / limits.ip_per_minute)),
    )


def _build_connection_limits(config: Config) -> tuple[int, dict[str, int]]:
    """Sockets of one address, and of those that may have more."""
    usual = config.limits.max_connections_per_ip
    return usual, dict.fromkeys(_build_trusted_peers(config).peers, max(usual, config.limits.trusted_connections))


def _build_trusted_peers(config: Config) -> TrustedAddresses:
    return TrustedAddresses(
        frozenset(map(name_peer_network, config.limits.trusted_peers)), config.limits.trusted_per_minute
    )


def _build_rate_limiter(
    reactor: Any, recorder: EventRecorder, config: Config, allowances: QuotaStore | None
) -> RateLimiter:
    return RateLimiter(
        reactor,
        recorder.record_rate_limit,
        did_per_minute=config.limits.did_per_minute,
        ip_per_minute=config.limits.ip_per_minute,
        account_per_minute=config.limits.account_per_minute,
        trusted=_build_trusted_peers(config),
        allowances=allowances,
    )
