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
from mediatord.admission import Admission, Allowances, Origins, RegistrationLimits, RegistrationQuota, Trusted
from mediatord.cluster.standing import Standing
from mediatord.config import Config
from mediatord.eventlog.logs import EventFile
from mediatord.eventlog.logs import Origin as LogOrigin
from mediatord.eventlog.sealing import Sealer
from mediatord.gate import Gate
from mediatord.identity import Identity
from mediatord.interfaces import IStore, Node, QueueLimits, Removed
from mediatord.interfaces.decentrl import Caps
from mediatord.journal import Journal
from mediatord.metrics import Metrics
from mediatord.outbound import Outbound
from mediatord.presence import Connections
from mediatord.private_file import PrivateFileError
from mediatord.readiness import Own, own
from mediatord.service import StartupError
from mediatord.store import open_store
from mediatord.store.disk_space import SpaceLimits
from mediatord.tag_keys import renewed_tag_key
from mediatord.tags import Tags
from mediatord.web.peers import community
from mediatord.wiring.cluster import ClusterSide, place_of
from mediatord.wiring.epochs import Epochs, day_of
from mediatord.wiring.identities import PresentIdentity, load_identity, told_identity
from mediatord.wiring.reloading import LogFiles, Reloading, segment_limits
from mediatord.workers import WorkerPlace

# Hexadecimal digits that stand for a store.
_NAME_LENGTH = 12


class LateNews:
    """
    Tells of messages and events that have left their queues although the store had failed to say so.

    :ivar events: told of events that were acknowledged; the Decentrl half's, once there is one.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.events: Callable[[Sequence[Removed]], None] = lambda removed: None

    def tell(self, removed: Sequence[Removed]) -> None:
        """Messages have."""
        for one in removed:
            if one.reason is None:
                self._journal.acknowledged(one, "pickup", "didcomm")
            elif one.reason == "ttl":
                self._journal.expired(one)
            else:
                self._journal.evicted(one)

    def tell_events(self, removed: Sequence[Removed]) -> None:
        """Events have."""
        self.events(removed)


@dataclass(frozen=True, slots=True)
class Base:
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
    identity: PresentIdentity
    events: EventFile
    journal: Journal
    reloading: Reloading
    epochs: Epochs
    store: IStore
    late: LateNews
    connections: Connections[Any]
    admission: Admission
    registrations: RegistrationQuota
    gate: Gate
    outbound: Outbound
    node: Node
    cluster: ClusterSide | None
    steady: Callable[[], float]
    standing: Standing
    own: Own
    origins: Origins
    store_name: str


def log_key(config: Config) -> Path:
    """Where the keys of the event log are."""
    return config.log.key_file or config.identity.keys.with_name("log.key")


def load_tags(config: Config, now: float) -> Tags:
    """
    What stands for DIDs in the log; its key is made if there is none, or if the last one is too old.

    :raise StartupError: the key cannot be used.
    """
    try:
        key = renewed_tag_key(log_key(config), day_of(now), config.log.key_days, make=True)
        return Tags(config.log.dids, key)
    except PrivateFileError as error:
        raise StartupError(str(error)) from None


def build_base(
    reactor: Any,
    config: Config,
    *,
    worker: WorkerPlace | None = None,
    store: IStore | None = None,
    create: bool = True,
    steady: Callable[[], float] = monotonic,
) -> Base:
    """
    Make the rooms that everything else uses.

    :param worker: what this process has of its supervisor.
    :param store: instead of the one that the configuration names.
    :param create: whether to make the file of that if it is not there.
    :raise StartupError: keys, identity or log key cannot be used.
    """
    identity = _identity(config, worker)
    tags = load_tags(config, reactor.seconds())
    place = place_of(config, worker)
    origin = LogOrigin(config.node_name, __version__, tags.epoch)
    sealer = Sealer(reactor, config.log.rotate.compress)
    events = EventFile(
        config.log.directory, reactor, origin, limits=segment_limits(config), level=config.log.level, seal=sealer
    )
    metrics = Metrics(CollectorRegistry(), version=__version__, label=lambda did: tags.did(did))
    events.told = metrics
    seed = worker.seed if worker else identity.secret
    itself = own(seed, worker.secret if worker else None)
    journal = Journal(reactor, events, metrics, tags, steady, itself.kin.knows)
    present = PresentIdentity(identity)
    reloading = Reloading(config, present, LogFiles(events, sealer), journal, steady)
    epochs = Epochs(reactor, log_key(config), tags, events, lambda: reloading.config.log.key_days)
    reloading.look_for_key = epochs.look
    late = LateNews(journal)
    store = store or _store(reactor, config, metrics, late, shared=worker is not None, create=create)
    cluster = None
    node = Node(origin.node, origin.boot, "", b"")
    connections: Connections[Any] = Connections(*_connection_limits(config))
    if place is not None:
        node = Node(origin.node, origin.boot, place.address, place.keys.seal, identity.digest)
        cluster = ClusterSide(reactor, store, metrics, node, place)
        connections.announce_to(cluster.announcer, reactor)
    admission = _admission(reactor, journal, config, cluster.allowances if cluster else None)
    registrations = RegistrationQuota(
        reactor, store, journal.limited, _registration_limits(config), cluster.allowances if cluster else None
    )
    reloading.follow(lambda new: _limit(new, connections, admission))
    reloading.follow(lambda new: registrations.change(_registration_limits(new)))
    return Base(
        reactor=reactor,
        identity=present,
        events=events,
        journal=journal,
        reloading=reloading,
        epochs=epochs,
        store=store,
        late=late,
        connections=connections,
        admission=admission,
        registrations=registrations,
        gate=Gate(reactor),
        outbound=Outbound(reactor, allow_private=config.outbound.allow_private),
        node=node,
        cluster=cluster,
        steady=steady,
        standing=cluster.standing if cluster else Standing(reactor),
        own=itself,
        origins=Origins(seed),
        store_name=_store_name(config, identity, origin.boot),
    )


def _identity(config: Config, worker: WorkerPlace | None) -> Identity:
    """A worker has the keys that its supervisor has, whatever has become of the file meanwhile."""
    return load_identity(config) if worker is None else told_identity(config, worker.keys.decode("utf-8"))


def _store(reactor: Any, config: Config, metrics: Metrics, late: LateNews, *, shared: bool, create: bool) -> IStore:
    try:
        return open_store(
            config.storage.backend,
            reactor,
            _queue_limits(config),
            caps=_caps(config),
            path=config.storage.sqlite.path,
            shared=shared,
            create=create,
            space_limits=_space_limits(config),
            uri=config.storage.mongodb.uri,
            observe=metrics.store_took,
            on_up=metrics.storage_up,
            on_fault=metrics.storage_fault,
            tell=late.tell,
            tell_events=late.tell_events,
        )
    except ValueError as error:
        raise StartupError(str(error)) from None


def _space_limits(config: Config) -> SpaceLimits:
    section = config.storage.mongodb if config.storage.backend == "mongodb" else config.storage.sqlite
    return SpaceLimits(section.max_bytes, section.min_free_bytes)


def _store_name(config: Config, identity: Identity, boot: str) -> str:
    """Nobody shares a store but one mediator, and what is in memory ends with its process."""
    backend = config.storage.backend
    of = f"{backend} {boot}" if backend == "memory" else backend
    return sha256(identity.digest + of.encode()).hexdigest()[:_NAME_LENGTH]


def _queue_limits(config: Config) -> QueueLimits:
    queue = config.queue
    return QueueLimits(
        queue.max_messages, queue.max_bytes, queue.when_full, queue.sender_share, queue.reserved_for_known
    )


def _caps(config: Config) -> Caps:
    settings = config.decentrl
    return Caps(
        requests=settings.max_contract_requests,
        requests_of_one=settings.max_contract_requests_per_sender,
        contracts=settings.max_contracts,
        contracts_with_one=settings.max_contracts_per_peer,
        pending=settings.max_pending_events,
        pending_bytes=settings.max_pending_bytes,
        stored=settings.max_stored_events,
        stored_bytes=settings.max_stored_bytes,
    )


def _limit(config: Config, connections: Connections[Any], admission: Admission) -> None:
    limits = config.limits
    connections.limit(*_connection_limits(config))
    admission.change(
        did_per_minute=limits.did_per_minute,
        ip_per_minute=limits.ip_per_minute,
        account_per_minute=limits.account_per_minute,
        trusted=_trusted(config),
    )


def _registration_limits(config: Config) -> RegistrationLimits:
    limits = config.limits
    return RegistrationLimits(
        limits.accounts_per_address_per_day,
        limits.registration_bytes_per_address_per_day,
        limits.accounts,
        limits.registration_bytes,
        _trusted(config).peers,
        max(1, round(limits.trusted_per_minute / limits.ip_per_minute)),
    )


def _connection_limits(config: Config) -> tuple[int, dict[str, int]]:
    """Sockets of one address, and of those that may have more."""
    usual = config.limits.max_connections_per_ip
    return usual, dict.fromkeys(_trusted(config).peers, max(usual, config.limits.trusted_connections))


def _trusted(config: Config) -> Trusted:
    return Trusted(frozenset(map(community, config.limits.trusted_peers)), config.limits.trusted_per_minute)


def _admission(reactor: Any, journal: Journal, config: Config, allowances: Allowances | None) -> Admission:
    return Admission(
        reactor,
        journal.limited,
        did_per_minute=config.limits.did_per_minute,
        ip_per_minute=config.limits.ip_per_minute,
        account_per_minute=config.limits.account_per_minute,
        trusted=_trusted(config),
        allowances=allowances,
    )
