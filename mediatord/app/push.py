"""Builds push notifications: the configured services, the registry of devices, and the schedule of wake-ups."""

from __future__ import annotations

import os
import random
from hashlib import sha256
from typing import Any

from mediatord.app.core_services import CoreServices
from mediatord.cluster.leases import LeaderLease
from mediatord.config.settings import Config, PushSettings
from mediatord.errors import StoreUnavailable
from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.push.devices import DeviceSealer, ServiceName
from mediatord.push.registry import DeviceRegistry
from mediatord.push.scheduler import WakeupScheduler
from mediatord.push.sender import IWebhook, PushSender
from mediatord.push.service import IPushService, PushAlert
from mediatord.runtime.periodic_tasks import PeriodicTasks
from mediatord.store.interfaces.devices import WakeupPolicy

# Ids of waiting messages in one wake-up, where they are switched on.
MAX_MESSAGE_IDS = 10
_MEDIATOR_ID_LENGTH = 32
# Devices that are removed in one step.
_EXPIRY_BATCH_SIZE = 100
EXPIRY_INTERVAL = 3_600.0
GAUGE_INTERVAL = 60.0


class PushSubsystem:
    """
    Push notifications of one process.

    :ivar services: the configured services, by name.
    :ivar registry: registers devices; None if only the webhook is configured.
    :ivar housekeeping: removes expired devices, and counts the others.
    """

    def __init__(
        self,
        core: CoreServices,
        config: Config,
        services: dict[str, IPushService[Any]],
        webhook: IWebhook | None,
        vapid_public_key: str | None,
        lease: LeaderLease | None,
    ) -> None:
        settings, store = config.push, core.store.devices
        self._core = core
        self._lease = lease
        self._store = store
        self.services = services
        sealer = DeviceSealer(lambda: core.identity.now.prekeys_private, os.urandom)
        self.mediator_id = derive_mediator_id(core.identity.now.fingerprint)
        self.registry: DeviceRegistry | None = None
        if services:
            names: list[ServiceName] = [service.name for service in services.values()]
            self.registry = DeviceRegistry(
                store,
                sealer,
                names,
                settings.max_devices,
                vapid_public_key=vapid_public_key,
                allow_http=bool(config.outbound.allow_private),
            )
        uniform = random.SystemRandom().uniform
        self.sender = PushSender(
            core.reactor, services, webhook, sealer, store, core.recorder, self.mediator_id, uniform
        )
        policy = WakeupPolicy(
            settings.min_interval,
            settings.quiet_after_poll,
            without_devices=webhook is not None,
            max_message_ids=MAX_MESSAGE_IDS if settings.message_ids else 0,
        )
        self.scheduler = WakeupScheduler(core.reactor, store, self.sender, policy, settings.repeat_after)
        tasks = [(self._expire_devices, EXPIRY_INTERVAL), (self._count_devices, GAUGE_INTERVAL)]
        self.housekeeping = PeriodicTasks(core.reactor, tasks, "housekeeping of push devices")
        metrics = core.recorder.metrics
        metrics.register_buffer("wakeups", lambda: (self.scheduler.waiting, None))
        metrics.count_push_hosts_backing_off = self.sender.count_backing_off
        for name in (*services, *(["webhook"] if webhook else [])):
            for outcome in ("sent", "retry"):
                metrics.push_requests.inc(name, outcome, by=0)

    def store_opened(self) -> None:
        """Look for wake-ups that are owed since before the start."""
        self.scheduler.recover()

    async def _expire_devices(self) -> None:
        while self._lease is None or await self._lease.is_leader():
            if await self._store.expire_devices(_EXPIRY_BATCH_SIZE) < _EXPIRY_BATCH_SIZE:
                break

    async def _count_devices(self) -> None:
        numbers = dict.fromkeys(self.services, 0) | await self._store.count_devices()
        self._core.recorder.metrics.push_devices = numbers


def derive_mediator_id(fingerprint: bytes) -> str:
    """An opaque id of a mediator, by which wallets know which of theirs has something: 32 hexadecimal digits."""
    return sha256(b"mediatord push " + fingerprint).hexdigest()[:_MEDIATOR_ID_LENGTH]


def build_push(core: CoreServices, config: Config, lease: LeaderLease | None) -> PushSubsystem | None:
    """
    Build push notifications; None if no service is configured.

    :param lease: of the node that removes expired devices; None for a single node.
    :raise StartupError: credentials cannot be used.
    """
    settings = config.push
    http_client = OutboundHTTPClient(core.reactor, allow_private=config.outbound.allow_private)
