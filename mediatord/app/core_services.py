"""Builds the core services of all protocols: identity, event log, metrics, store, connections, rate limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from time import monotonic as _monotonic
from typing import Any

from prometheus_client import CollectorRegistry

from mediatord import __version__
from mediatord.app.cluster import ClusterSubsystem, resolve_node_settings
from mediatord.app.current_identity import CurrentIdentity, load_identity, parse_identity
from mediatord.app.pseudonym_key_rotation import PseudonymKeyRotation, log_failed_renewal, to_utc_day
from mediatord.app.push import build_push
from mediatord.app.reload import ConfigReloader, build_segment_limits
from mediatord.cluster.membership import NodeHealth
from mediatord.config.settings import Config
from mediatord.delivery.connections import ConnectionManager
from mediatord.didcomm.forward_router import SenderFingerprint
from mediatord.errors import StartupError, StoreUnavailable
from mediatord.http.client_address import name_peer_network
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.observability.event_log import EventLogWriter, LogOrigin, SegmentSealer
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, renew_pseudonym_key
from mediatord.probe.identities_and_recognition import derive_probe_credentials
from mediatord.probe.store_health import StoreHealthMonitor
from mediatord.ratelimit.admission import RequestAdmission, RequestGate
from mediatord.ratelimit.rate_limiter import RateLimiter, RateLimits, make_local_limiter
from mediatord.ratelimit.registration import RegistrationLimits, RegistrationQuota
from mediatord.runtime.secret_files import SecretFileError
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.factory import build_store
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
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


class CoreServices:
    """
    What the protocols, the sites and the cluster are built on.

    :param worker: what a worker has from its supervisor.
    :param store: used instead of the configured one.
    :ivar reloader: has the settings that may change at runtime.
    :ivar late_removals: receives removals that the store confirms late.
    :ivar node: this process as other nodes see it.
    :ivar cluster: None for a single process.
    :ivar monotonic: seconds of a monotonic clock.
    :ivar probe_credentials: identify the daemon's requests to itself.
    :ivar sender_fingerprints: identify senders within a queue.
    :ivar check_store: raises StoreUnavailable, or ShutdownInProgress. A server is asked each time; SQLite may be slow
        as long as it works.
    :ivar push: push notifications; None if no service is configured.
    :ivar store_name: the same for all processes that use the store, and for no other store.
    :raise StartupError: keys, identity or log key cannot be used.
    """

    def __init__(
        self,
        reactor: Any,
        config: Config,
        *,
        worker: WorkerSpec | None = None,
        store: IStore | None = None,
        monotonic: Callable[[], float] = _monotonic,
    ) -> None:
        self.reactor = reactor
        self.monotonic = monotonic
        # A worker uses its supervisor's keys, even if the file has changed since.
        identity = load_identity(config) if worker is None else parse_identity(config, worker.keys.decode("utf-8"))
        self.identity = CurrentIdentity(identity)
        seed = worker.seed if worker else identity.root_secret
        self.probe_credentials = derive_probe_credentials(seed, worker.secret if worker else None)
        self.sender_fingerprints = SenderFingerprint(seed)

        pseudonymizer = load_pseudonymizer(config, reactor.seconds())
        origin = LogOrigin(config.node_name, __version__, pseudonymizer.epoch)
        sealer = SegmentSealer(reactor, config.log.rotate.compress)
        self.events = EventLogWriter(
            config.log.directory,
            reactor,
            origin,
            limits=build_segment_limits(config),
            level=config.log.level,
            seal=sealer,
        )
        metrics = Metrics(CollectorRegistry(), version=__version__, label=lambda did: pseudonymizer.did(did))
        self.events.metrics = metrics
        self.recorder = EventRecorder(
            reactor, self.events, metrics, pseudonymizer, monotonic, self.probe_credentials.identities.is_probe_did
        )
        self.key_rotation = PseudonymKeyRotation(
            reactor, config.log_key_path, pseudonymizer, self.events, lambda: self.reloader.config.log.key_days
        )
        self.reloader = ConfigReloader(
            config,
            self.identity,
            self.events,
            sealer,
            self.recorder,
            monotonic,
            self.key_rotation.rotate_if_due,
        )

        self.late_removals = LateRemovalRecorder(self.recorder)
        if store is None:
            store = _build_configured_store(reactor, config, metrics, self.late_removals, shared=worker is not None)
        self.store = store
        self.store_name = derive_store_name(config, identity, origin.boot)
        self.connections: ConnectionManager[Any] = ConnectionManager(*_build_connection_limits(config))

        node_settings = resolve_node_settings(config, worker)
        self.cluster: ClusterSubsystem | None = None
        self.node = ClusterNode(origin.node, origin.boot, "", b"")
        if node_settings is not None:
            self.node = ClusterNode(
                origin.node, origin.boot, node_settings.address, node_settings.keys.seal, identity.fingerprint
            )
            self.cluster = ClusterSubsystem(reactor, self.store, metrics, self.node, node_settings)
            self.connections.set_presence_publisher(self.cluster.links.publisher, reactor)
        self.node_health = self.cluster.node_health if self.cluster else NodeHealth(reactor)

        make_limiter = self.cluster.quotas.make_limiter if self.cluster else make_local_limiter
        self.rate_limiter = RateLimiter(
            reactor, self.recorder.record_rate_limit, _build_rate_limits(config), make_limiter
        )
        self.registrations = RegistrationQuota(
            reactor, self.store, self.recorder.record_rate_limit, _build_registration_limits(config), make_limiter
        )
        self.reloader.follow(self._apply_limits)
        self.gate = RequestGate(reactor)
        self.requests = RequestAdmission(reactor, self.gate, self.recorder)
        self.store_health = StoreHealthMonitor(
            reactor,
            self._ping_store,
            is_open=lambda: self.gate.is_open,
            failure_count=lambda: metrics.rejected.get("store_unavailable"),
            steady=monotonic,
        )
        self.check_store = self.store_health.ask if config.storage.backend == "sqlite" else self._ping_store
        self.outbound = OutboundHTTPClient(reactor, allow_private=config.outbound.allow_private)
        self.push = build_push(self, config)
        metrics.register_buffer("store_operations", self.store.get_buffered)
        metrics.register_buffer("event_log", lambda: (None, self.events.pending))
        metrics.register_buffer("rate_limits", lambda: (len(self.rate_limiter) + len(self.registrations), None))
        metrics.register_buffer("requests_in_progress", lambda: self.requests.memory.held)
        metrics.register_buffer("counted_pushes", lambda: (self.recorder.attempt_count, None))
        metrics.register_buffer("subscriptions", lambda: (self.connections.subscriptions, None))
        metrics.register_buffer("subscription_backlogs", lambda: (len(self.connections.backlogs), None))

    async def render_metrics(self) -> bytes:
        """The metrics of this process in text format."""
        return self.recorder.metrics.render()

    async def _ping_store(self) -> None:
        metrics = self.recorder.metrics
        try:
            await self.gate.run_request(self.store.ping)
        except StoreUnavailable:
            metrics.set_storage_up(False)
            raise
        metrics.set_storage_up(True)

    def _apply_limits(self, config: Config) -> None:
        self.connections.limit(*_build_connection_limits(config))
        self.rate_limiter.set_limits(_build_rate_limits(config))
        self.registrations.set_limits(_build_registration_limits(config))


def _build_configured_store(
    reactor: Any, config: Config, metrics: Metrics, late_removals: LateRemovalRecorder, *, shared: bool
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
            create=False,  # check_store does, at the start
            space_limits=SpaceLimits(space.max_bytes, space.min_free_bytes),
            uri=config.storage.mongodb.uri,
            observe=metrics.observe_store_operation,
            on_up=metrics.set_storage_up,
            on_fault=metrics.set_storage_fault,
            tell=late_removals.record_messages,
            tell_events=lambda removed: late_removals.resolve_events(removed),
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
        config.didcomm_v1.connections_per_minute,
    )


def _name_trusted_peers(config: Config) -> frozenset[str]:
    return frozenset(map(name_peer_network, config.limits.trusted_peers))
