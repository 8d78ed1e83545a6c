"""The DIDComm half."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mediatord.admission import AccessList
from mediatord.cluster.backlog_reader import BacklogReader
from mediatord.cluster.pickups import PickupRecorder
from mediatord.config import Config
from mediatord.didcomm.account_expiry import AccountExpiry
from mediatord.didcomm.coordination import Coordination, OwnNames, Registration
from mediatord.didcomm.endpoints import EndpointDelivery, FailoverSettings, Targets
from mediatord.didcomm.handover import HandOver
from mediatord.didcomm.housekeeping import DueTimes, Housekeeping
from mediatord.didcomm.live import ClusterHooks, Live, LiveSettings
from mediatord.didcomm.mediator import Desk, Mediator, Protocols
from mediatord.didcomm.ownership import Ownership
from mediatord.didcomm.packing import Packing, ReportSettings
from mediatord.didcomm.pickup import Pickup, PickupSettings
from mediatord.didcomm.replying import Replying
from mediatord.didcomm.routing import Deliveries, Route, Routing, RoutingSettings, Sources
from mediatord.didcomm.short_way import ShortWay, Ways
from mediatord.didcomm.smalltalk import SmallTalk
from mediatord.didcomm.unpacking import Unpacking
from mediatord.didcomm.wrapping import Wrapping
from mediatord.ids import new_id, new_message_id
from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm.usual import UsualForwards
from mediatord.resolver import Resolver, WebDIDs
from mediatord.turns import Turn
from mediatord.wiring.base import Base
from mediatord.wiring.buffers import watch_base, watch_didcomm
from mediatord.wiring.gauges import Lag, gauge


@dataclass(frozen=True, slots=True)
class DIDCommHalf:
    """The DIDComm half and its services."""

    mediator: Mediator
    short_way: ShortWay
    live: Live
    due: DueTimes
    housekeeping: Housekeeping
    endpoints: EndpointDelivery
    lag: Lag


def build_didcomm(base: Base, config: Config) -> DIDCommHalf:
    """Make the use cases and what runs by itself."""
    reactor, store, journal, identity = base.reactor, base.store, base.journal, base.identity
    settings = config.didcomm
    resolver = _resolver(base, config)
    reports = ReportSettings(settings.problem_codes, settings.problem_report_ack)
    packing = Packing(reactor, new_id, identity.signing_key_for, reports)
    unpacking = Unpacking(resolver, identity.keys_for, draft03=settings.legacy_draft03)
    live = Live(
        reactor, store, base.connections, packing, journal, live_settings(base, config), _cluster_hooks(base, config)
    )
    wrapping = Wrapping(resolver, reactor, new_id)
    access = _access(base, config)
    targets = Targets(resolver, _failover_settings(config, access), identity.owns)
    endpoints = EndpointDelivery(reactor, store, targets, wrapping, base.outbound, journal)
    elsewhere, turn = (base.cluster.elsewhere.message, base.cluster.turn) if base.cluster else (None, None)
    hand_over = HandOver(live.push, elsewhere, endpoints.offer)
    due = DueTimes(reactor, store, hand_over, turn)
    route = Route(
        clock=reactor,
        store=store,
        unpacking=unpacking,
        wrapping=wrapping,
        admission=base.admission,
        deliveries=Deliveries(hand_over, due.wait_for, live.settle),
        journal=journal,
        owns=identity.owns,
        origins=base.origins,
        sources=Sources(lambda: new_message_id(reactor.seconds()), random.SystemRandom().uniform),
    )
    registration = Registration(access, settings.max_recipients, base.own.kin.knows, settings.require_ownership)
    routing_settings = _routing_settings(config, access)
    routing = Routing(route, routing_settings)
    protocols = Protocols(
        routing=routing,
        coordination=Coordination(
            store,
            OwnNames(identity.owns, identity.routing_did),
            registration,
            Ownership(reactor, store, base.admission, unpacking, identity.owns),
            base.registrations,
            journal,
        ),
        pickup=Pickup(
            reactor,
            store,
            base.connections,
            live,
            journal,
            PickupSettings(settings.delivery_limit, settings.delivery_form),
        ),
        smalltalk=SmallTalk(reactor, packing, lambda: base.reloading.config.limits.max_message_bytes),
    )
    desk = Desk(
        clock=reactor,
        store=store,
        admission=base.admission,
        registrations=base.registrations,
        unpacking=unpacking,
        packing=packing,
        replying=Replying(packing, targets, endpoints),
        live=live,
        journal=journal,
        owns=identity.owns,
        access=access,
    )
    lag = Lag(reactor, base.steady, journal.metrics.lag)
    expiry = AccountExpiry(
        reactor,
        store,
        lambda: base.connections.live(lambda reader: reader is not None),
        journal,
        unused=settings.unused_account_ttl,
        idle=settings.idle_account_ttl,
    )
    housekeeping = Housekeeping(
        reactor, store, live, journal, lambda: gauge(base, lag), turn or own_turn(base, config), expiry
    )
    watch_base(base)
    watch_didcomm(base, live, routing, resolver, endpoints)
    mediator = Mediator(desk, protocols)
    usual = UsualForwards(identity.keys_for)
    identity.on_change(usual.forget)
    short_way = ShortWay(route, routing_settings, Ways(base.gate, usual.read, routing, packing))
    return DIDCommHalf(mediator, short_way, live, due, housekeeping, endpoints, lag)


def own_turn(base: Base, config: Config) -> Turn | None:
    """Of a process that is alone: nobody else's, nor its own while its clock is not that of the store's server."""
    alone_on_a_server = config.storage.backend == "mongodb"
    return Turn(base.reactor, base.store.cluster, base.node.boot) if alone_on_a_server else None


def _resolver(base: Base, config: Config) -> Resolver:
    private = config.outbound.allow_private
    web = WebDIDs(base.reactor, base.outbound.get, base.admission.lookup, allow_private=private)
    return Resolver(web, base.store.remember_did, base.store.recall_did)


def live_settings(base: Base, config: Config) -> LiveSettings:
    """How pushes are made; each is marked as made by this process where others can see the store."""
    settings = config.didcomm
    return LiveSettings(
        timeout=config.queue.delivered_timeout,
        form=settings.delivery_form,
        mode=settings.live_push,
        by_default=settings.live_default_on,
        node=base.node.boot if base.cluster or config.storage.backend == "mongodb" else "",
    )


def _cluster_hooks(base: Base, config: Config) -> ClusterHooks | None:
    if base.cluster is None:
        return None
    store = base.store
    reader = BacklogReader(
        base.reactor, base.connections, lambda dids, window, limit: store.arrived(dids, window, limit=limit)
    )
    return ClusterHooks(reader, PickupRecorder(store.cluster, config.queue.delivered_timeout))


def _access(base: Base, config: Config) -> AccessList:
    """Goes by the lists as they are at any time; who is denied from now on is live no longer."""
    access = AccessList()

    def follow(new: Config) -> None:
        allow = new.didcomm.allow if new.didcomm.registration == "allow-list" else None
        access.change(allow, new.didcomm.deny)
        base.connections.close_denied(access.denies, lambda reader: reader is not None)

    follow(config)
    base.reloading.follow(follow)
    return access


def _routing_settings(config: Config, access: AccessList) -> RoutingSettings:
    settings = config.didcomm
    return RoutingSettings(
        ttl=config.queue.ttl,
        max_delay=settings.max_delay,
        routing_keys={canonical_did(did): keys for did, keys in settings.routing_keys.items()},
        rewrap=settings.rewrap,
        registered_senders_only=settings.require_registered_sender,
        encrypted_only=settings.require_encrypted_payload,
        max_payload=config.queue.max_bytes,
        access=access,
    )


def _failover_settings(config: Config, access: AccessList) -> FailoverSettings:
    web_socket = "ws" + config.public_url.removeprefix("http")
    own = {config.public_url, f"{config.public_url}/didcomm", f"{web_socket}/didcomm", f"{web_socket}/ws"}
    endpoints = {canonical_did(did): endpoint for did, endpoint in config.didcomm.endpoints.items()}
    return FailoverSettings(config.didcomm.failover, endpoints, frozenset(own), access)
