"""Builds the services of both protocols, DIDComm and Decentrl."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mediatord.app.core_services import CoreServices
from mediatord.app.metrics_collection import ReactorLagMonitor, record_gauges
from mediatord.cluster.anti_entropy import read_backlog, record_pickups
from mediatord.cluster.leases import LeaderLease
from mediatord.config.settings import Config
from mediatord.decentrl.context import DecentrlContext, KeyDirectory
from mediatord.decentrl.contracts import ContractHandler, DecentrlRegistrationSettings, RegistrationHandler
from mediatord.decentrl.dispatcher import CommandAuthenticator, CommandHandlers, DecentrlDispatcher
from mediatord.decentrl.event_push import EventPusher
from mediatord.decentrl.events import PendingEventHandler, PublicEventHandler, StoredEventHandler
from mediatord.decentrl.socket_protocol import DecentrlSocketContext, DecentrlSocketProtocol
from mediatord.delivery.connections import WebSocketSession
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
    """The DIDComm services."""

    dispatcher: DIDCommDispatcher
    forward_fast_path: ForwardFastPath
    live: LiveDelivery
    due: DelayedMessageScheduler
    housekeeping: Housekeeping
    endpoints: EndpointDelivery
    lag: ReactorLagMonitor


def build_didcomm(core: CoreServices, config: Config) -> DIDCommServices:
    """Build the DIDComm use cases and their periodic tasks."""
    reactor, store, recorder, identity = core.reactor, core.store, core.recorder, core.identity
    settings = config.didcomm
    web_resolver = DIDWebResolver(
        reactor, core.outbound.get, core.rate_limiter.charge_did_lookup, allow_private=config.outbound.allow_private
    )
    resolver = DIDResolver(web_resolver, store.remember_did, store.recall_did)
    reports = ProblemReportSettings(settings.problem_codes, settings.problem_report_ack)
    packer = MessagePacker(reactor, new_didcomm_message_id, identity.find_signing_key, reports)
    unpacker = MessageUnpacker(resolver, identity.find_agreement_keys, draft03=settings.legacy_draft03)
    remote_delivery, cluster_hooks = None, None
    leader_lease = build_leader_lease(core, config)
    if core.cluster:
        remote_delivery = core.cluster.remote_delivery.deliver_message
        cluster_hooks = ClusterDeliveryHooks(
            partial(read_backlog, reactor, core.connections, store.find_arrivals),
            partial(record_pickups, store.cluster, config.queue.delivered_timeout),
        )
    live = LiveDelivery(
        reactor,
        store,
        core.connections,
        packer,
        recorder,
        build_live_settings(core, config),
        cluster_hooks,
    )
    forward_wrapper = ForwardWrapper(resolver, reactor, new_didcomm_message_id)
    access = AccessList()

    def apply_access(new: Config) -> None:
        access.set_lists(new.didcomm.allow if new.didcomm.registration == "allow-list" else None, new.didcomm.deny)
        core.connections.close_denied(access.denies, lambda recipient: recipient is not None)

    apply_access(config)
    core.reloader.follow(apply_access)
    targets = EndpointResolver(resolver, _build_failover_settings(config, access), identity.owns)
    endpoints = EndpointDelivery(reactor, store, targets, forward_wrapper, core.outbound, recorder)
    fail_over = None if settings.failover == "none" else endpoints.enqueue
    delivery_dispatcher = DeliveryDispatcher(live.push, remote_delivery, fail_over)
    due = DelayedMessageScheduler(
        reactor, store, delivery_dispatcher.dispatch, core.cluster.leader_lease if core.cluster else None
    )
    route = ForwardContext(
        clock=reactor,
        store=store,
        unpacker=unpacker,
        forward_wrapper=forward_wrapper,
        admission=core.rate_limiter,
        dispatcher=delivery_dispatcher,
        delayed=due,
        live=live,
        recorder=recorder,
        owns=identity.own_dids.__contains__,
        origins=core.sender_fingerprints,
        new_message_id=new_stored_message_id,
        uniform=random.SystemRandom().uniform,
    )
    registration = MediationPolicy(
        access, settings.max_recipients, core.probe_credentials.identities.is_probe_did, settings.require_ownership
    )
    routing_settings = _build_routing_settings(config, access)
    forward_router = ForwardRouter(route, routing_settings)
    protocols = DIDCommProtocols(
        forward_router=forward_router,
        mediation_coordinator=MediationCoordinator(
            store,
            MediatorDIDs(identity.owns, identity.routing_did),
            registration,
            OwnershipVerifier(reactor, store, core.rate_limiter, unpacker, identity.owns),
            core.registrations,
            recorder,
        ),
        pickup=Pickup(
            reactor,
            store,
            core.connections,
            live,
            recorder,
            PickupSettings(settings.delivery_limit, settings.delivery_form),
        ),
        small_protocols=SmallProtocols(reactor, packer, lambda: core.reloader.config.limits.max_message_bytes),
    )
    context = DIDCommContext(
        clock=reactor,
        store=store,
        admission=core.rate_limiter,
        registrations=core.registrations,
        unpacker=unpacker,
        packer=packer,
        reply_router=ReplyRouter(packer, targets, endpoints),
        live=live,
        recorder=recorder,
        owns=identity.owns,
        access=access,
    )
    lag = ReactorLagMonitor(reactor, core.monotonic, recorder.metrics.observe_reactor_lag)
    expiry = AccountExpiry(
        reactor,
        store,
        lambda: core.connections.live(lambda reader: reader is not None),
        recorder,
        unused=settings.unused_account_ttl,
        idle=settings.idle_account_ttl,
    )
    housekeeping = Housekeeping(
        reactor,
        store,
        live,
        recorder,
        lambda: record_gauges(core, lag),
        leader_lease,
        expiry,
    )
    metrics = recorder.metrics
    metrics.register_buffer("live_pushes", lambda: (live.unacknowledged_pushes, None))
    metrics.register_buffer("remembered_pushes", lambda: (live.remembered, None))
    metrics.register_buffer("seen_forwards", lambda: (forward_router.remembered, None))
    metrics.register_buffer("did_documents", lambda: resolver.held)
    metrics.register_buffer("endpoint_deliveries", lambda: endpoints.held)
    parser = FastForwardParser(identity.find_agreement_keys)
    identity.on_change(parser.forget)
    forward_fast_path = ForwardFastPath(route, routing_settings, core.gate, parser, forward_router, packer)
    return DIDCommServices(
        DIDCommDispatcher(context, protocols), forward_fast_path, live, due, housekeeping, endpoints, lag
    )


def build_leader_lease(core: CoreServices, config: Config) -> LeaderLease | None:
    """The lease on housekeeping; a single process on MongoDB needs it too, as its clock may be wrong."""
    if core.cluster:
        return core.cluster.leader_lease
    if config.storage.backend == "mongodb":
        return LeaderLease(core.reactor, core.store.cluster, core.node.boot)
    return None


def build_live_settings(core: CoreServices, config: Config) -> LiveDeliverySettings:
    """Settings of live delivery; pushes are marked with this process if others may use the store."""
    settings = config.didcomm
    return LiveDeliverySettings(
        timeout=config.queue.delivered_timeout,
        form=settings.delivery_form,
        mode=settings.live_push,
        by_default=settings.live_default_on,
        node=core.node.boot if core.cluster or config.storage.backend == "mongodb" else "",
    )


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
    websocket_url = "ws" + config.public_url.removeprefix("http")
    own = {config.public_url, f"{config.public_url}/didcomm", f"{websocket_url}/didcomm", f"{websocket_url}/ws"}
    endpoints = {canonicalize_did(did): endpoint for did, endpoint in config.didcomm.endpoints.items()}
    return EndpointFailoverSettings(config.didcomm.failover, endpoints, frozenset(own), access)


@dataclass(frozen=True, slots=True)
class DecentrlServices:
    """
    The Decentrl services.

    :param open_socket: starts the Decentrl protocol on a socket.
    """

    dispatcher: DecentrlDispatcher
    event_pusher: EventPusher
    open_socket: Callable[[WebSocketSession], DecentrlSocketProtocol]


def build_decentrl(core: CoreServices, config: Config) -> DecentrlServices:
    """Build the Decentrl use cases."""
    clock, recorder, store = core.reactor, core.recorder, core.store
    identity, settings = core.identity, config.decentrl
    key_directory = KeyDirectory(
        identity.decentrl_dids, lambda: (identity.now.signing_key, *identity.now.former_signing_keys)
    )
    remote_delivery, pickup_recorder, backlog_reader = None, None, None
    if core.cluster:
        remote_delivery = core.cluster.remote_delivery
        pickup_recorder = partial(record_pickups, store.cluster, config.queue.delivered_timeout)
        backlog_reader = partial(read_backlog, clock, core.connections, store.decentrl.find_pending_arrivals)
    event_pusher = EventPusher(core.connections, recorder, remote_delivery, pickup_recorder)
    core.late_removals.resolve_events = event_pusher.resolve_pushes
    recorder.metrics.register_buffer("remembered_events", lambda: (event_pusher.remembered, None))
    context = DecentrlContext(
        clock=clock,
        store=store.decentrl,
        key_directory=key_directory,
        event_pusher=event_pusher,
        recorder=recorder,
        new_id=new_stored_message_id,
    )
    access = AccessList()

    def apply_access(new: Config) -> None:
        access.set_lists(new.decentrl.allow if new.decentrl.registration == "allow-list" else None, new.decentrl.deny)
        core.connections.close_denied(access.denies, lambda recipient: recipient is None)

    apply_access(config)
    core.reloader.follow(apply_access)
    authentication = CommandAuthenticator(clock, store.decentrl, key_directory, recorder, settings.timestamp_window)
    handlers = CommandHandlers(
        registration=RegistrationHandler(
            context,
            DecentrlRegistrationSettings(
                seed=lambda: identity.now.signing_seed,
                prekeys=lambda: identity.now.prekeys_private,
                lifetime=settings.contract_lifetime,
                own_only=lambda: core.reloader.config.decentrl.registration == "own",
                access=access,
            ),
            core.registrations,
        ),
        contracts=ContractHandler(context),
        delivery=PendingEventHandler(context),
        archive=StoredEventHandler(context),
        channels=PublicEventHandler(context),
        access=access,
    )
    socket_context = DecentrlSocketContext(
        clock, store, core.gate, core.connections, core.rate_limiter, authentication, recorder, access, backlog_reader
    )
    dispatcher = DecentrlDispatcher(context, core.rate_limiter, authentication, handlers)
    return DecentrlServices(dispatcher, event_pusher, lambda session: DecentrlSocketProtocol(session, socket_context))
