"""Builds the Decentrl services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mediatord.app.core_services import CoreServices
from mediatord.cluster.anti_entropy import BacklogReader, PickupRecorder
from mediatord.config.settings import Config
from mediatord.decentrl.authentication import CommandAuthenticator
from mediatord.decentrl.context import DecentrlContext, KeyDirectory
from mediatord.decentrl.contracts import ContractHandler, DecentrlRegistrationSettings, RegistrationHandler
from mediatord.decentrl.dispatcher import CommandHandlers, DecentrlDispatcher
from mediatord.decentrl.event_push import EventPusher
from mediatord.decentrl.events import PendingEventHandler, PublicEventHandler, StoredEventHandler
from mediatord.decentrl.socket_protocol import DecentrlSocketContext, DecentrlSocketProtocol
from mediatord.delivery.connections import WebSocketSession
from mediatord.ratelimit.access_control import AccessList
from mediatord.store.interfaces.messages import new_stored_message_id


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
        pickup_recorder = PickupRecorder(store.cluster, config.queue.delivered_timeout)
        backlog_reader = BacklogReader(
            clock,
            core.connections,
            lambda dids, window, limit: store.decentrl.find_pending_arrivals(dids, window, limit=limit),
        )
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
