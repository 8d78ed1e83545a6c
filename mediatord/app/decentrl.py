"""The Decentrl half."""

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
    The Decentrl half; it has no services of its own.

    :param converse: begins to speak Decentrl on a socket.
    """

    mediator: DecentrlDispatcher
    event_pusher: EventPusher
    converse: Callable[[WebSocketSession], DecentrlSocketProtocol]


def build_decentrl(base: CoreServices, config: Config) -> DecentrlServices:
    """Make the use cases."""
    clock, recorder, store = base.reactor, base.recorder, base.store
    identity = base.identity
    key_directory = KeyDirectory(
        identity.decentrl_dids, lambda: (identity.now.signing_key, *identity.now.former_signing_keys)
    )
    remote_delivery, pickup_recorder, reader = None, None, None
    if base.cluster:
        remote_delivery, pickup_recorder = (
            base.cluster.remote_delivery,
            PickupRecorder(store.cluster, config.queue.delivered_timeout),
        )
        reader = BacklogReader(
            clock,
            base.connections,
            lambda dids, window, limit: store.decentrl.find_pending_arrivals(dids, window, limit=limit),
        )
    event_pusher = EventPusher(base.connections, recorder, remote_delivery, pickup_recorder)
    base.late.events = event_pusher.resolve_pushes
    recorder.metrics.register_buffer("remembered_events", lambda: (event_pusher.remembered, None))
    context = DecentrlContext(
        clock=clock,
        store=store.decentrl,
        key_directory=key_directory,
        event_pusher=event_pusher,
        recorder=recorder,
        new_id=new_stored_message_id,
    )
    access = _build_access_list(base, config)
    authentication = CommandAuthenticator(
        clock, store.decentrl, key_directory, recorder, config.decentrl.timestamp_window
    )
    handlers = CommandHandlers(
        registration=RegistrationHandler(
            context, _build_registration_settings(base, config, access), base.registrations
        ),
        contracts=ContractHandler(context),
        delivery=PendingEventHandler(context),
        archive=StoredEventHandler(context),
        channels=PublicEventHandler(context),
        access=access,
    )
    socket_context = DecentrlSocketContext(
        clock, store, base.gate, base.connections, base.admission, authentication, recorder, access, reader
    )
    mediator = DecentrlDispatcher(context, base.admission, authentication, handlers)
    return DecentrlServices(mediator, event_pusher, lambda session: DecentrlSocketProtocol(session, socket_context))


def _build_access_list(base: CoreServices, config: Config) -> AccessList:
    """Goes by the lists as they are at any time; sockets of who is denied from now on are closed."""
    access = AccessList()

    def follow(new: Config) -> None:
        allow = new.decentrl.allow if new.decentrl.registration == "allow-list" else None
        access.set_lists(allow, new.decentrl.deny)
        base.connections.close_denied(access.denies, lambda reader: reader is None)

    follow(config)
    base.reloading.follow(follow)
    return access


def _build_registration_settings(
    base: CoreServices, config: Config, access: AccessList
) -> DecentrlRegistrationSettings:
    settings = config.decentrl
    return DecentrlRegistrationSettings(
        seed=lambda: base.identity.now.signing_seed,
        prekeys=lambda: base.identity.now.prekeys_private,
        lifetime=settings.contract_lifetime,
        own_only=lambda: base.reloading.config.decentrl.registration == "own",
        access=access,
    )
