"""The Decentrl half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mediatord.admission import AccessList
from mediatord.cluster.backlog_reader import BacklogReader
from mediatord.cluster.pickups import PickupRecorder
from mediatord.config import Config
from mediatord.decentrl.archive import Archive
from mediatord.decentrl.authentication import Authentication
from mediatord.decentrl.channels import Channels
from mediatord.decentrl.contracts import Contracts
from mediatord.decentrl.conversation import Conversation, Switchboard
from mediatord.decentrl.delivery import Delivery
from mediatord.decentrl.desk import Desk
from mediatord.decentrl.directory import Directory
from mediatord.decentrl.mediator import Mediator, Uses
from mediatord.decentrl.pushing import Pushing
from mediatord.decentrl.registration import Registration, RegistrationSettings
from mediatord.ids import new_message_id
from mediatord.presence import Session
from mediatord.wiring.base import Base


@dataclass(frozen=True, slots=True)
class DecentrlHalf:
    """
    The Decentrl half; it has no services of its own.

    :param converse: begins to speak Decentrl on a socket.
    """

    mediator: Mediator
    pushing: Pushing
    converse: Callable[[Session], Conversation]


def build_decentrl(base: Base, config: Config) -> DecentrlHalf:
    """Make the use cases."""
    clock, journal, store = base.reactor, base.journal, base.store
    identity = base.identity
    directory = Directory(
        lambda: identity.now.decentrl_dids, lambda: (identity.now.signing_key, *identity.now.former_signing_keys)
    )
    elsewhere, recorder, reader = None, None, None
    if base.cluster:
        elsewhere, recorder = base.cluster.elsewhere, PickupRecorder(store.cluster, config.queue.delivered_timeout)
        reader = BacklogReader(
            clock,
            base.connections,
            lambda dids, window, limit: store.decentrl.arrived_pending(dids, window, limit=limit),
        )
    pushing = Pushing(base.connections, journal, elsewhere, recorder)
    base.late.events = pushing.settled
    journal.metrics.watch("remembered_events", lambda: (pushing.remembered, None))
    desk = Desk(
        clock=clock,
        store=store.decentrl,
        directory=directory,
        pushing=pushing,
        journal=journal,
        new_id=lambda: new_message_id(clock.seconds()),
    )
    access = _access(base, config)
    authentication = Authentication(clock, store.decentrl, directory, journal, config.decentrl.timestamp_window)
    uses = Uses(
        registration=Registration(desk, _registration_settings(base, config, access), base.registrations),
        contracts=Contracts(desk),
        delivery=Delivery(desk),
        archive=Archive(desk),
        channels=Channels(desk),
        access=access,
    )
    switchboard = Switchboard(
        clock, store, base.gate, base.connections, base.admission, authentication, journal, access, reader
    )
    mediator = Mediator(desk, base.admission, authentication, uses)
    return DecentrlHalf(mediator, pushing, lambda session: Conversation(session, switchboard))


def _access(base: Base, config: Config) -> AccessList:
    """Goes by the lists as they are at any time; sockets of who is denied from now on are closed."""
    access = AccessList()

    def follow(new: Config) -> None:
        allow = new.decentrl.allow if new.decentrl.registration == "allow-list" else None
        access.change(allow, new.decentrl.deny)
        base.connections.close_denied(access.denies, lambda reader: reader is None)

    follow(config)
    base.reloading.follow(follow)
    return access


def _registration_settings(base: Base, config: Config, access: AccessList) -> RegistrationSettings:
    settings = config.decentrl
    return RegistrationSettings(
        seed=lambda: base.identity.now.signing_seed,
        prekeys=lambda: base.identity.now.prekeys_private,
        lifetime=settings.contract_lifetime,
        own_only=lambda: base.reloading.config.decentrl.registration == "own",
        access=access,
    )
