"""How full everything is that grows with what peers do or leave undone, for the metrics (docs/limits.md)."""

from __future__ import annotations

from mediatord.didcomm.endpoints import EndpointDelivery
from mediatord.didcomm.live import Live
from mediatord.didcomm.routing import Routing
from mediatord.resolver import Resolver
from mediatord.web.site import MediatorSite
from mediatord.web.socket_factory import SocketFactory
from mediatord.wiring.base import Base


def watch_base(base: Base) -> None:
    """What both halves stand on."""
    metrics, journal, connections = base.journal.metrics, base.journal, base.connections
    metrics.watch("store_operations", base.store.held)
    metrics.watch("event_log", lambda: (None, base.events.pending))
    metrics.watch("rate_limits", lambda: (len(base.admission) + len(base.registrations), None))
    metrics.watch("requests_in_progress", lambda: base.admission.memory.held)
    metrics.watch("counted_pushes", lambda: (journal.remembered, None))
    metrics.watch("subscriptions", lambda: (connections.subscriptions, None))
    metrics.watch("subscription_backlogs", lambda: (len(connections.backlogs), None))


def watch_didcomm(base: Base, live: Live, routing: Routing, resolver: Resolver, endpoints: EndpointDelivery) -> None:
    """The DIDComm half."""
    metrics = base.journal.metrics
    metrics.watch("live_pushes", lambda: (live.on_their_way, None))
    metrics.watch("remembered_pushes", lambda: (live.remembered, None))
    metrics.watch("seen_forwards", lambda: (routing.remembered, None))
    metrics.watch("did_documents", lambda: resolver.held)
    metrics.watch("endpoint_deliveries", lambda: endpoints.held)


def watch_web(base: Base, sockets: SocketFactory, site: MediatorSite) -> None:
    """The listeners."""
    metrics = base.journal.metrics
    metrics.watch("socket_outboxes", sockets.unsent)
    metrics.watch("socket_inboxes", sockets.unserved)
    metrics.watch("http_requests", site.read_ahead)
    metrics.watch("http_answers", lambda: site.unread.held)
