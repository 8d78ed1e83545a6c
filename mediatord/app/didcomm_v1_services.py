"""Builds the DIDComm v1 services on those of v2."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from mediatord.app.core_services import CoreServices
from mediatord.cluster.leases import LeaderLease
from mediatord.config.settings import Config
from mediatord.didcomm.context import DIDCommContext
from mediatord.didcomm.dispatcher import DIDCommDispatcher
from mediatord.didcomm.endpoint_delivery import EndpointDelivery
from mediatord.didcomm.forward_router import ForwardRouter
from mediatord.didcomm.messages import MessageOrigin, UnpackedMessage
from mediatord.didcomm.pickup import LiveDelivery, QueuePickup
from mediatord.didcomm_v1.context import V1Context
from mediatord.didcomm_v1.dispatcher import V1Dispatcher
from mediatord.didcomm_v1.endpoint_delivery import V1EndpointDelivery, V1EndpointResolver
from mediatord.didcomm_v1.forwarding import V1ForwardRouter
from mediatord.didcomm_v1.handshake import Handshake
from mediatord.didcomm_v1.live_delivery import V1LiveDelivery
from mediatord.didcomm_v1.mediation import V1Mediation
from mediatord.didcomm_v1.messages import V1Packer, V1Unpacker
from mediatord.didcomm_v1.pickup import V1Pickup
from mediatord.didcomm_v1.push_notifications import V1PushNotifications
from mediatord.didcomm_v1.utility_protocols import V1UtilityProtocols
from mediatord.protocol.didcomm_v1.envelope import is_v1_envelope
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.messages import new_didcomm_message_id


class DIDCommV1Services:
    """
    The DIDComm v1 use cases.

    :param common: with the others, the use cases of v2.
    :param endpoints: posts to endpoints of wallets, except these own URIs.
    :param lease: of the node that searches for mail that nobody posts; None for a single node.
    :ivar endpoints: a service, which posts what stayed queued for wallets with an endpoint.
    """

    def __init__(
        self,
        core: CoreServices,
        config: Config,
        common: DIDCommContext,
        live: LiveDelivery,
        queue_pickup: QueuePickup,
        router: ForwardRouter,
        dispatcher: DIDCommDispatcher,
        endpoints: EndpointDelivery,
        own_uris: frozenset[str],
        lease: LeaderLease | None,
    ) -> None:
        self._receive_v2 = dispatcher.receive
        settings = config.didcomm_v1
        context = V1Context(
            common=common,
            live=live,
            connections=core.store.v1_connections,
            identity=lambda: core.identity.v1,
            public_url=config.public_url,
            max_pending=settings.max_pending_connections,
        )
        packer = V1Packer(context.identity, new_didcomm_message_id)
        unpacker = V1Unpacker(context.identity, context.connections)
        self.endpoints = V1EndpointDelivery(
            core.reactor,
            core.store,
            context.connections,
            V1EndpointResolver(
                context.connections,
                context.identity,
                common.access,
                own_uris,
                common.owns_v1_key,
                new_didcomm_message_id,
            ),
            endpoints,
            lease,
            delivers_mail=settings.deliver_to_endpoints,
        )
        forward_router = V1ForwardRouter(context, router, unpacker)
        mediation = V1Mediation(context)
        self.live = V1LiveDelivery(context, queue_pickup, packer.pack_to)
        pickup = V1Pickup(context, queue_pickup, self.live)
        handlers = Handshake(context, self.live.end_all).handlers() | mediation.handlers()
        handlers |= V1UtilityProtocols(context, self.live).handlers()
        account_handlers = mediation.account_handlers() | pickup.account_handlers()
        if common.devices is not None:
            account_handlers |= V1PushNotifications(common.devices).account_handlers()
        self._dispatcher = V1Dispatcher(
            context,
            core.requests,
            unpacker,
            packer,
            forward_router,
            self.endpoints,
            handlers,
            account_handlers,
        )
        metrics = core.recorder.metrics
        metrics.register_buffer("seen_v1_forwards", lambda: (forward_router.remembered, None))
        metrics.register_buffer("queued_for_endpoints", lambda: (self.endpoints.remembered, None))
        metrics.register_buffer("seen_v1_pickups", lambda: (self._dispatcher.remembered, None))
        metrics.register_buffer("v1_batches", lambda: (pickup.batches, None))
        metrics.register_buffer("v1_deliveries", lambda: (pickup.delivered, None))

    def receive(
        self, raw: bytes, origin: MessageOrigin, already_opened: UnpackedMessage | None = None
    ) -> Coroutine[Any, Any, RequestReply]:
        """
        Serve one message of either version, as :meth:`mediatord.didcomm.dispatcher.DIDCommDispatcher.receive`.

        A forward of v2 in its common form has been served before, on the fast path.
        """
        if already_opened is None and is_v1_envelope(raw):
            return self._dispatcher.receive(raw, origin)
        return self._receive_v2(raw, origin, already_opened)
