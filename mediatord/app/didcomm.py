"""The DIDComm half."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mediatord.app.core_services import CoreServices
from mediatord.app.metrics_collection import (
    ReactorLagMonitor,
    record_gauges,
    register_core_buffers,
    register_didcomm_buffers,
)
from mediatord.cluster.anti_entropy import BacklogReader, PickupRecorder
from mediatord.cluster.leases import LeaderLease
from mediatord.config.settings import Config
from mediatord.didcomm.dispatcher import DIDCommContext, DIDCommDispatcher, DIDCommProtocols, SmallProtocols
from mediatord.didcomm.endpoint_delivery import (
    EndpointDelivery,
    EndpointFailoverSettings,
    EndpointResolver,
    ReplyRouter,
)
from mediatord.didcomm.forward_fast_path import ForwardFastPath
from mediatord.didcomm.forward_router import ForwardContext, ForwardRouter, ForwardSettings
from mediatord.didcomm.housekeeping import AccountExpiry, DelayedMessageScheduler, Housekeeping
from mediatord.didcomm.live_delivery import (
    ClusterDeliveryHooks,
    DeliveryDispatcher,
    LiveDelivery,
    LiveDeliverySettings,
)
from mediatord.didcomm.mediation import MediationCoordinator, MediationPolicy, MediatorDIDs, OwnershipVerifier
from mediatord.didcomm.messages import ForwardWrapper, MessagePacker, MessageUnpacker, ProblemReportSettings
from mediatord.didcomm.pickup import Pickup, PickupSettings
from mediatord.net.did_resolver import DIDResolver, DIDWebResolver
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.forward import FastForwardParser
from mediatord.ratelimit.access_control import AccessList
from mediatord.store.interfaces.messages import new_didcomm_message_id, new_stored_message_id


@dataclass(frozen=True, slots=True)
class DIDCommServices:
    """The DIDComm half and its services."""

    mediator: DIDCommDispatcher
    forward_fast_path: ForwardFastPath
    live: LiveDelivery
    due: DelayedMessageScheduler
    housekeeping: Housekeeping
    endpoints: EndpointDelivery
    lag: ReactorLagMonitor


def build_didcomm(base: CoreServices, config: Config) -> DIDCommServices:
    """Make the use cases and what runs by itself."""
    reactor, store, recorder, identity = base.reactor, base.store, base.recorder, base.identity
    settings = config.didcomm
    resolver = _build_resolver(base, config)
    reports = ProblemReportSettings(settings.problem_codes, settings.problem_report_ack)
    packer = MessagePacker(reactor, new_didcomm_message_id, identity.find_signing_key, reports)
    unpacker = MessageUnpacker(resolver, identity.find_agreement_keys, draft03=settings.legacy_draft03)
    live = LiveDelivery(
        reactor,
        store,
        base.connections,
        packer,
        recorder,
        build_live_settings(base, config),
        _build_cluster_hooks(base, config),
    )
    forward_wrapper = ForwardWrapper(resolver, reactor, new_didcomm_message_id)
    access = _build_access_list(base, config)
    targets = EndpointResolver(resolver, _build_failover_settings(config, access), identity.owns)
    endpoints = EndpointDelivery(reactor, store, targets, forward_wrapper, base.outbound, recorder)
    remote_delivery, leader_lease = (
        (base.cluster.remote_delivery.message, base.cluster.leader_lease) if base.cluster else (None, None)
    )
    fail_over = None if settings.failover == "none" else endpoints.enqueue
    dispatcher = DeliveryDispatcher(live.push, remote_delivery, fail_over)
    due = DelayedMessageScheduler(reactor, store, dispatcher.dispatch, leader_lease)
    route = ForwardContext(
        clock=reactor,
        store=store,
        unpacker=unpacker,
        forward_wrapper=forward_wrapper,
        admission=base.admission,
        dispatcher=dispatcher,
        delayed=due,
        live=live,
        recorder=recorder,
        owns=identity.own_dids.__contains__,
        origins=base.origins,
        new_message_id=new_stored_message_id,
        uniform=random.SystemRandom().uniform,
    )
    registration = MediationPolicy(
        access, settings.max_recipients, base.own.identities.is_probe_did, settings.require_ownership
    )
    routing_settings = _build_routing_settings(config, access)
    forward_router = ForwardRouter(route, routing_settings)
    protocols = DIDCommProtocols(
        forward_router=forward_router,
        mediation_coordinator=MediationCoordinator(
            store,
            MediatorDIDs(identity.owns, identity.routing_did),
            registration,
            OwnershipVerifier(reactor, store, base.admission, unpacker, identity.owns),
            base.registrations,
            recorder,
        ),
        pickup=Pickup(
            reactor,
            store,
            base.connections,
            live,
            recorder,
            PickupSettings(settings.delivery_limit, settings.delivery_form),
        ),
        small_protocols=SmallProtocols(reactor, packer, lambda: base.reloading.config.limits.max_message_bytes),
    )
    context = DIDCommContext(
        clock=reactor,
        store=store,
        admission=base.admission,
        registrations=base.registrations,
        unpacker=unpacker,
        packer=packer,
        reply_router=ReplyRouter(packer, targets, endpoints),
        live=live,
        recorder=recorder,
        owns=identity.owns,
        access=access,
    )
    lag = ReactorLagMonitor(reactor, base.steady, recorder.metrics.observe_reactor_lag)
    expiry = AccountExpiry(
        reactor,
        store,
        lambda: base.connections.live(lambda reader: reader is not None),
        recorder,
        unused=settings.unused_account_ttl,
        idle=settings.idle_account_ttl,
    )
    housekeeping = Housekeeping(
        reactor,
        store,
        live,
        recorder,
        lambda: record_gauges(base, lag),
        leader_lease or build_leader_lease(base, config),
        expiry,
    )
    register_core_buffers(base)
    register_didcomm_buffers(base, live, forward_router, resolver, endpoints)
    mediator = DIDCommDispatcher(context, protocols)
    parser = FastForwardParser(identity.find_agreement_keys)
    identity.on_change(parser.forget)
    forward_fast_path = ForwardFastPath(route, routing_settings, base.gate, parser, forward_router, packer)
    return DIDCommServices(mediator, forward_fast_path, live, due, housekeeping, endpoints, lag)


def build_leader_lease(base: CoreServices, config: Config) -> LeaderLease | None:
    """Of a process that is alone: nobody else's, nor its own while its clock is not that of the store's server."""
    alone_on_a_server = config.storage.backend == "mongodb"
    return LeaderLease(base.reactor, base.store.cluster, base.node.boot) if alone_on_a_server else None


def _build_resolver(base: CoreServices, config: Config) -> DIDResolver:
    private = config.outbound.allow_private
    web = DIDWebResolver(base.reactor, base.outbound.get, base.admission.charge_did_lookup, allow_private=private)
    return DIDResolver(web, base.store.remember_did, base.store.recall_did)


def build_live_settings(base: CoreServices, config: Config) -> LiveDeliverySettings:
    """How pushes are made; each is marked as made by this process where others can see the store."""
    settings = config.didcomm
    return LiveDeliverySettings(
        timeout=config.queue.delivered_timeout,
        form=settings.delivery_form,
        mode=settings.live_push,
        by_default=settings.live_default_on,
        node=base.node.boot if base.cluster or config.storage.backend == "mongodb" else "",
    )


def _build_cluster_hooks(base: CoreServices, config: Config) -> ClusterDeliveryHooks | None:
    if base.cluster is None:
        return None
    store = base.store
    reader = BacklogReader(
        base.reactor, base.connections, lambda dids, window, limit: store.find_arrivals(dids, window, limit=limit)
    )
    return ClusterDeliveryHooks(reader, PickupRecorder(store.cluster, config.queue.delivered_timeout))


def _build_access_list(base: CoreServices, config: Config) -> AccessList:
    """Goes by the lists as they are at any time; who is denied from now on is live no longer."""
    access = AccessList()

    def follow(new: Config) -> None:
        allow = new.didcomm.allow if new.didcomm.registration == "allow-list" else None
        access.set_lists(allow, new.didcomm.deny)
        base.connections.close_denied(access.denies, lambda reader: reader is not None)

    follow(config)
    base.reloading.follow(follow)
    return access


def _build_routing_settings(config: Config, access: AccessList) -> ForwardSettings:
    settings = config.didcomm
    return ForwardSettings(
        ttl=config.queue.ttl,
        max_delay=settings.max_delay,
        routing_keys={canonicalize_did(did): keys for did, keys in settings.routing_keys.items()},
        rewrap=settings.rewrap,
        registered_senders_only=settings.require_registered_sender,
        encrypted_only=settings.require_encrypted_payload,
        max_payload=config.queue.max_bytes,
        access=access,
    )


def _build_failover_settings(config: Config, access: AccessList) -> EndpointFailoverSettings:
    web_socket = "ws" + config.public_url.removeprefix("http")
    own = {config.public_url, f"{config.public_url}/didcomm", f"{web_socket}/didcomm", f"{web_socket}/ws"}
    endpoints = {canonicalize_did(did): endpoint for did, endpoint in config.didcomm.endpoints.items()}
    return EndpointFailoverSettings(config.didcomm.failover, endpoints, frozenset(own), access)
