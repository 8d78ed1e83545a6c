"""What both protocol halves stand on: identity, log, metrics, store, connections, the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from mediatord import __version__
from mediatord.admission import Admission
from mediatord.config import Config
from mediatord.eventlog.logs import EventFile, SegmentLimits
from mediatord.eventlog.logs import Origin as LogOrigin
from mediatord.eventlog.sealing import Sealer
from mediatord.gate import Gate
from mediatord.identity import Identity, IdentityError
from mediatord.interfaces import IStore, QueueLimits
from mediatord.interfaces.decentrl import Caps
from mediatord.journal import Journal
from mediatord.keyfile import load_keys
from mediatord.metrics import Metrics
from mediatord.outbound import Outbound
from mediatord.presence import Connections
from mediatord.private_file import PrivateFileError
from mediatord.service import StartupError
from mediatord.store import open_store
from mediatord.tags import Tags, load_tag_key


@dataclass(frozen=True, slots=True)
class Base:
    """What everything else stands on."""

    reactor: Any
    identity: Identity
    events: EventFile
    journal: Journal
    store: IStore
    connections: Connections[Any]
    admission: Admission
    gate: Gate
    outbound: Outbound


def load_identity(config: Config) -> Identity:
    """
    Our keys and DIDs.

    :raise StartupError: the key file or a former DID cannot be used.
    """
    try:
        return Identity(
            load_keys(config.identity.keys),
            config.public_url,
            config.identity.former_dids,
            raw_keys=config.decentrl.raw_keys,
        )
    except (PrivateFileError, IdentityError) as error:
        raise StartupError(str(error)) from None


def build_base(reactor: Any, config: Config) -> Base:
    """
    Make the rooms that everything else uses.

    :raise StartupError: keys, identity or log key cannot be used.
    """
    identity = load_identity(config)
    try:
        tags = Tags(config.log.dids, load_tag_key(config.identity.keys.with_name("log.key")))
    except PrivateFileError as error:
        raise StartupError(str(error)) from None
    events = EventFile(
        config.log.directory,
        reactor,
        LogOrigin(config.node_name, __version__, tags.epoch),
        limits=SegmentLimits(config.log.rotate.bytes, config.log.rotate.keep),
        level=config.log.level,
        seal=Sealer(reactor, config.log.rotate.compress),
    )
    metrics = Metrics(CollectorRegistry(), version=__version__, label=tags.did)
    journal = Journal(reactor, events, metrics, tags)
    return Base(
        reactor=reactor,
        identity=identity,
        events=events,
        journal=journal,
        store=_store(reactor, config, metrics),
        connections=Connections(config.limits.max_connections_per_ip),
        admission=_admission(reactor, journal, config),
        gate=Gate(),
        outbound=Outbound(reactor, allow_private=config.outbound.allow_private),
    )


def _store(reactor: Any, config: Config, metrics: Metrics) -> IStore:
    try:
        return open_store(
            config.storage.backend,
            reactor,
            QueueLimits(config.queue.max_messages, config.queue.max_bytes),
            caps=_caps(config),
            path=config.storage.sqlite.path,
            observe=metrics.store_took,
        )
    except ValueError as error:
        raise StartupError(str(error)) from None


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


def _admission(reactor: Any, journal: Journal, config: Config) -> Admission:
    return Admission(
        reactor,
        journal.limited,
        did_per_minute=config.limits.did_per_minute,
        ip_per_minute=config.limits.ip_per_minute,
        account_per_minute=config.limits.account_per_minute,
    )
