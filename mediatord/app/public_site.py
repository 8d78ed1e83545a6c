"""Builds the public HTTP site of both protocols."""

from __future__ import annotations

from collections.abc import Callable

from mediatord.app.core_services import CoreServices
from mediatord.app.metrics_collection import StoreMetricsRefresher
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.config.settings import Config
from mediatord.http.client_address import AllowedOrigins, ClientAddressResolver
from mediatord.http.flow_control import RoundRobinScheduler
from mediatord.http.resources import HTTPContext, StaticDocuments, report_no_probe
from mediatord.http.site import MediatorSite, SiteLimits
from mediatord.identity.invitation import V1Invitation, make_v1_invitation
from mediatord.probe.readiness import ReadinessMonitor
from mediatord.runtime.memory_reclaimer import MemoryReclaimer
from mediatord.workers.supervisor_connection import SupervisorConnection


def build_site(
    core: CoreServices,
    didcomm: DIDCommServices,
    decentrl: DecentrlServices,
    config: Config,
    worker: SupervisorConnection | None = None,
    readiness: Callable[[], ReadinessMonitor] | None = None,
) -> MediatorSite:
    """
    Build the site of both protocols.

    :param readiness: gives what answers `/ready`, once the site is served.
    """
    recorder = core.recorder
    token = core.probe_credentials.token
    addresses = ClientAddressResolver(config.trusted_proxies, token, config.limits.trusted_peers)
    origins = AllowedOrigins(config.websocket_origins)
    now = core.identity.now
    documents = StaticDocuments(now.did, now.web_document, config.public_url, _make_v1_invitation(core, config))
    context = HTTPContext(
        clock=core.reactor,
        receive=didcomm.receive,
        command=decentrl.dispatcher.receive,
        public=decentrl.dispatcher.public,
        check_store=core.check_store,
        find_store_problem=lambda: core.store.fault_description,
        find_node_problem=lambda: core.node_health.trouble,
        refresh_store_metrics=StoreMetricsRefresher(core),
        render_metrics=worker.fetch_metrics if worker else core.render_metrics,
        documents=documents,
        recorder=recorder,
        client_addresses=addresses,
        connections=core.connections,
        open_decentrl_socket=decentrl.open_socket,
        origins=origins,
        memory=MemoryReclaimer(core.reactor),
        scheduler=RoundRobinScheduler(core.reactor),
        admits=core.rate_limiter.charge_request,
        metrics_allow=lambda: core.reloader.config.metrics.allow,
        check_readiness=(lambda: readiness().ask()) if readiness else report_no_probe,
        forward_fast_path=didcomm.forward_fast_path.take,
        acknowledgement_fast_path=didcomm.acknowledgement_fast_path.take,
    )
    site = MediatorSite(context, _get_site_limits(config))

    def follow(new: Config) -> None:
        addresses.set_peer_networks(new.limits.trusted_peers)
        origins.allow(new.websocket_origins)
        site.limit(_get_site_limits(new))
        now = core.identity.now
        documents.set_identity(now.did, now.web_document, _make_v1_invitation(core, config))

    core.reloader.follow(follow)
    recorder.metrics.register_buffer("socket_outboxes", site.socket_factory.unsent)
    recorder.metrics.register_buffer("socket_inboxes", site.socket_factory.unserved)
    recorder.metrics.register_buffer("http_requests", site.read_ahead)
    recorder.metrics.register_buffer("http_answers", lambda: site.unread.held)
    return site


def _make_v1_invitation(core: CoreServices, config: Config) -> V1Invitation | None:
    section = config.didcomm_v1
    if not section.enabled:
        return None
    return make_v1_invitation(config.public_url, core.identity.now.root_secret, section.label)


def _get_site_limits(config: Config) -> SiteLimits:
    limits = config.limits
    connections = 4 * limits.max_connections_per_ip, 4 * limits.trusted_connections
    return SiteLimits(limits.max_message_bytes, *connections, limits.max_outbox_bytes, limits.max_unread_bytes)
