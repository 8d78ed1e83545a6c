"""Builds the services of both protocols, DIDComm and Decentrl."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from mediatord.app.core_services import CoreServices
from mediatord.app.didcomm_v1_services import DIDCommV1Services
from mediatord.app.metrics_collection import ReactorLagMonitor, record_gauges
from mediatord.cluster.duplicate_push_prevention import record_backlog, record_pickups
from mediatord.cluster.leases import LeaderLease
from mediatord.config.settings import Config
from mediatord.decentrl.authentication import CommandAuthenticator, KeyDirectory
from mediatord.decentrl.context import DecentrlContext
from mediatord.decentrl.dispatcher import DecentrlDispatcher
from mediatord.decentrl.event_push import EventPusher
from mediatord.decentrl.socket_protocol import DecentrlSocketProtocol
from mediatord.delivery.connections import LiveDispatcher, WebSocketSession
from mediatord.didcomm.context import DIDCommContext
from mediatord.didcomm.dispatcher import DIDCommDispatcher
from mediatord.didcomm.endpoint_delivery import V1_ACCOUNT_PREFIX, EndpointDelivery, EndpointResolver
from mediatord.didcomm.fast_paths import AcknowledgementFastPath, ForwardFastPath
from mediatord.didcomm.forward_router import ForwardRouter
from mediatord.didcomm.housekeeping import DelayedMessageScheduler, Housekeeping
from mediatord.didcomm.messages import ForwardWrapper, MessagePacker, MessageUnpacker
from mediatord.didcomm.pickup import LiveDelivery, Pickup, QueuePickup
from mediatord.didcomm.utility_protocols import UtilityProtocols
from mediatord.net.did_resolver import DIDResolver, DIDWebResolver
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.forward import FastForwardParser
from mediatord.push.registry import DeviceRegistry
from mediatord.ratelimit.registration import AccessList
from mediatord.store.interfaces.messages import new_didcomm_message_id, new_stored_message_id


class DIDCommServices:
    """
    The DIDComm use cases and their periodic tasks.

    :param devices: for push notifications; by default those of the core services.
    :ivar v1: the use cases of v1; None if it is disabled.
    :ivar receive: serves a message of any version, as :meth:`DIDCommDispatcher.receive`.
    """

    def __init__(self, core: CoreServices, config: Config, devices: DeviceRegistry | None = None) -> None:
        reactor, store, recorder, identity = core.reactor, core.store, core.recorder, core.identity
        settings, queue = config.didcomm, config.queue
        access = _build_access_list(core, config, "didcomm", lambda recipient: recipient is not None)
        wake = core.push.scheduler.note if core.push else None
        web_resolver = DIDWebResolver(
            reactor,
            core.outbound.get,
            core.rate_limiter.charge_did_lookup,
            allow_private=config.outbound.allow_private,
        )
        resolver = DIDResolver(web_resolver, store.remember_did, store.recall_did)
        context = DIDCommContext(
            clock=reactor,
            store=store,
            recorder=recorder,
            connections=core.connections,
            rate_limiter=core.rate_limiter,
            registrations=core.registrations,
            access=access,
            unpacker=MessageUnpacker(resolver, identity.agreement_keys, draft03=settings.legacy_draft03),
            packer=MessagePacker(
                reactor,
                new_didcomm_message_id,
                lambda kid: identity.now.find_signing_key(kid),
                codes=settings.problem_codes,
                ack=settings.problem_report_ack,
            ),
            own_dids=identity.own_dids,
            owns=lambda did: identity.now.owns(did),
            owns_v1_key=lambda did: identity.v1.find_constant_key(did) is not None,
            routing_did=lambda addressed: identity.now.routing_did(addressed),
            new_stored_id=new_stored_message_id,
            ttl=queue.ttl,
            max_delay=settings.max_delay,
            routing_keys={canonicalize_did(did): keys for did, keys in settings.routing_keys.items()},
            rewrap=settings.rewrap,
            registered_senders_only=settings.require_registered_sender,
            encrypted_only=settings.require_encrypted_payload,
            max_payload=queue.max_bytes,
            max_recipients=settings.max_recipients,
            with_proof=settings.require_ownership,
            delivery_limit=settings.delivery_limit,
            delivery_form=settings.delivery_form,
            push_mode=settings.live_push,
            live_by_default=settings.live_default_on,
            push_timeout=queue.delivered_timeout,
            node=get_marking_node(core, config),
            devices=devices or (core.push.registry if core.push else None),
            wake=wake,
            note_poll=core.push.scheduler.note_poll if core.push else None,
        )
        backlog_recorder, pickup_recorder, push_elsewhere = None, None, None
        if core.cluster:
            push_elsewhere = core.cluster.links.remote_delivery.deliver_message
            backlog_recorder = partial(record_backlog, reactor, core.connections, store.find_arrivals)
            pickup_recorder = partial(record_pickups, store.cluster, queue.delivered_timeout)
        siblings = core.cluster.siblings if core.cluster else None
        resolve_elsewhere = siblings.remote_delivery.resolve_push if siblings else None
        self.live = LiveDelivery(context, backlog_recorder, resolve_elsewhere)
        forward_wrapper = ForwardWrapper(resolver, reactor, new_didcomm_message_id)
        targets = EndpointResolver(
            resolver,
            forward_wrapper,
            context.owns,
            access,
            source=settings.failover,
            endpoints={canonicalize_did(did): endpoint for did, endpoint in settings.endpoints.items()},
            own_uris=list_own_uris(config),
        )
        self.endpoints = EndpointDelivery(reactor, store, targets, core.outbound, recorder)
        # Without failover of v2, only accounts of v1 may have endpoints.
        has_failover = settings.failover != "none"
        has_v1 = config.didcomm_v1.enabled and config.didcomm_v1.deliver_to_endpoints
        dispatcher = LiveDispatcher(
            self.live.push,
            push_elsewhere,
            self.endpoints.enqueue if has_failover or has_v1 else None,
            None if wake is None else lambda message: wake(message.account),
            "" if has_failover else V1_ACCOUNT_PREFIX,
        )
        self.due = DelayedMessageScheduler(
            reactor, store, dispatcher.dispatch_all, core.cluster.leader_lease if core.cluster else None
        )
        forward_router = ForwardRouter(
            context,
            forward_wrapper,
            self.live,
            dispatcher,
            self.due.schedule_wakeup,
            core.sender_fingerprints,
            random.SystemRandom().uniform,
        )
        queue_pickup = QueuePickup(context, self.live, pickup_recorder)
        pickup = Pickup(context, self.live, queue_pickup)
        self.dispatcher = DIDCommDispatcher(
            context,
            core.requests,
            forward_router,
            self.live,
            pickup,
            UtilityProtocols(context, lambda: core.reloader.config.limits.max_message_bytes),
            self.endpoints,
        )
        self.receive = self.dispatcher.receive
        self.v1: DIDCommV1Services | None = None
        if config.didcomm_v1.enabled:
            self.v1 = DIDCommV1Services(
                core,
                config,
                context,
                self.live,
                queue_pickup,
                forward_router,
                self.dispatcher,
                self.endpoints,
                list_own_uris(config),
                build_leader_lease(core, config),
            )
            self.receive = self.v1.receive
        parser = FastForwardParser(identity.agreement_keys)
        self.forward_fast_path = ForwardFastPath(context, core.gate, parser, forward_router, core.sender_fingerprints)
        self.acknowledgement_fast_path = AcknowledgementFastPath(
            context, core.gate, core.requests.memory, self.dispatcher, pickup
        )
        self.lag = ReactorLagMonitor(reactor, core.monotonic, recorder.metrics.reactor_lag.observe)
        self.housekeeping = Housekeeping(
            reactor,
            store,
            self.live,
            recorder,
            lambda: record_gauges(core, self.lag),
            build_leader_lease(core, config),
            list_live_accounts=lambda: core.connections.live(lambda reader: reader is not None),
            unused=settings.unused_account_ttl,
            idle=settings.idle_account_ttl,
            pending=config.didcomm_v1.pending_connection_ttl,
        )
        metrics = recorder.metrics
        metrics.register_buffer("live_pushes", lambda: (self.live.unacknowledged_pushes, None))
        metrics.register_buffer("remembered_pushes", lambda: (self.live.remembered, None))
        metrics.register_buffer("seen_forwards", lambda: (forward_router.remembered, None))
        metrics.register_buffer("seen_pickups", lambda: (self.dispatcher.remembered, None))
        metrics.register_buffer("did_documents", lambda: resolver.held)
        metrics.register_buffer("endpoint_deliveries", lambda: self.endpoints.held)


def list_own_uris(config: Config) -> frozenset[str]:
    """The mediator's service URIs."""
    websocket_url = "ws" + config.public_url.removeprefix("http")
    return frozenset(
        (config.public_url, f"{config.public_url}/didcomm", f"{websocket_url}/didcomm", f"{websocket_url}/ws")
    )


def _build_access_list(
    core: CoreServices, config: Config, protocol: ProtocolName, has_protocol: Callable[[Any], bool]
) -> AccessList:
    """
    The access list of a protocol, which follows the configuration; sockets of denied DIDs are closed.

    :param has_protocol: whether the recipient of a subscription is one of this protocol.
    """
    access = AccessList()

    def apply(new: Config) -> None:
        section = getattr(new, protocol)
        access.set_lists(section.allow if section.registration == "allow-list" else None, section.deny)
        core.connections.close_denied(access.denies, has_protocol)

    apply(config)
    core.reloader.follow(apply)
    return access


def build_leader_lease(core: CoreServices, config: Config) -> LeaderLease | None:
    """The lease on housekeeping; a single process on MongoDB needs it too, as its clock may be wrong."""
    if core.cluster:
        return core.cluster.leader_lease
    if config.storage.backend == "mongodb":
        return LeaderLease(core.reactor, core.store.cluster, core.node.boot)
    return None


def get_marking_node(core: CoreServices, config: Config) -> str:
    """What pushes are marked with: this process if others may use the store, otherwise nothing."""
    return core.node.boot if core.cluster or config.storage.backend == "mongodb" else ""


class DecentrlServices:
    """
    The Decentrl use cases.

    :param devices: for push notifications; None if no push service is configured, or not for Decentrl.
    """

    def __init__(self, core: CoreServices, config: Config, devices: DeviceRegistry | None = None) -> None:
        clock, recorder, store = core.reactor, core.recorder, core.store
        identity, settings = core.identity, config.decentrl
        key_directory = KeyDirectory(
            identity.decentrl_dids, lambda: (identity.now.signing_key, *identity.now.former_signing_keys)
        )
        remote_delivery, pickup_recorder, backlog_recorder = None, None, None
        if core.cluster:
            remote_delivery = core.cluster.links.remote_delivery
            pickup_recorder = partial(record_pickups, store.cluster, config.queue.delivered_timeout)
            backlog_recorder = partial(record_backlog, clock, core.connections, store.decentrl.find_pending_arrivals)
        push = core.push if config.push.decentrl or config.push.webhook.url else None
        self.event_pusher = EventPusher(
            core.connections, recorder, remote_delivery, push.scheduler.note if push else None
        )
        core.late_removals.resolve_events = self.event_pusher.resolve_pushes
        recorder.metrics.register_buffer("remembered_events", lambda: (self.event_pusher.remembered, None))
        access = _build_access_list(core, config, "decentrl", lambda recipient: recipient is None)
        self._context = DecentrlContext(
            clock=clock,
            store=store.decentrl,
            key_directory=key_directory,
            authenticator=CommandAuthenticator(clock, key_directory, recorder, settings.timestamp_window),
            event_pusher=self.event_pusher,
            recorder=recorder,
            access=access,
            quota=core.registrations,
            rate_limiter=core.rate_limiter,
            gate=core.gate,
            connections=core.connections,
            record_backlog=backlog_recorder,
            record_pickups=pickup_recorder,
            new_id=new_stored_message_id,
            get_signing_seed=lambda: identity.now.signing_seed,
            get_prekeys=lambda: identity.now.prekeys_private,
            registration_lifetime=settings.contract_lifetime,
            own_only=lambda: core.reloader.config.decentrl.registration == "own",
            devices=devices or (push.registry if push and config.push.decentrl else None),
            note_poll=push.scheduler.note_poll if push else None,
        )
        self.dispatcher = DecentrlDispatcher(self._context, core.requests)

    def open_socket(self, session: WebSocketSession) -> DecentrlSocketProtocol:
        """Start the Decentrl protocol on a socket."""
        return DecentrlSocketProtocol(session, self._context)
