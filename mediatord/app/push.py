"""Builds push notifications: the configured services, the registry of devices, and the schedule of wake-ups."""

from __future__ import annotations

import hmac
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from twisted.application.service import Service

from mediatord.config.settings import Config, PushSettings
from mediatord.errors import OperatorError, StartupError
from mediatord.net.name_lookups import NameLookups
from mediatord.net.outbound_http import ConnectionLimits, OutboundHTTPClient
from mediatord.push.apns import APNsCredentials, APNsService, load_apns_credentials
from mediatord.push.devices import DeviceSealer, ServiceName
from mediatord.push.fcm import FCMCredentials, FCMService, load_fcm_credentials
from mediatord.push.registry import DeviceRegistry
from mediatord.push.scheduler import WakeupScheduler
from mediatord.push.sender import IWebhook, PushSender
from mediatord.push.service import IPushService, PushAlert
from mediatord.push.web_push import VAPIDKey, WebPushService, load_vapid_key
from mediatord.push.webhook import WebhookNotifier, load_webhook_secret
from mediatord.runtime.periodic_tasks import PeriodicTasks
from mediatord.store.interfaces.devices import WakeupPolicy

if TYPE_CHECKING:
    from mediatord.app.core_services import CoreServices

# Ids of waiting messages in one wake-up, where they are switched on.
MAX_MESSAGE_IDS = 10
_ID_LENGTH = 32
# Devices that are removed in one step.
_EXPIRY_BATCH_SIZE = 100
# Wallets choose the hosts: a few slow ones must not take all connections, nor may others wait for long.
WEB_PUSH_CONNECTIONS = ConnectionLimits(per_host=32, total=256, wait=2.0)
# Longer than a wake-up waits for its host and is sent, to all devices.
LEASE_SECONDS = 45.0
EXPIRY_INTERVAL = 3_600.0
COUNT_INTERVAL = 60.0
# Former keys may be retired an hour after the rotation.
RESEAL_INTERVAL = 600.0


@dataclass(frozen=True, slots=True)
class PushCredentials:
    """What the configured services are used with; None for those that are not configured."""

    fcm: FCMCredentials | None = field(repr=False)
    apns: APNsCredentials | None = field(repr=False)
    vapid: VAPIDKey | None = field(repr=False)
    webhook_secret: bytes | None = field(repr=False)


def load_push_credentials(settings: PushSettings) -> PushCredentials:
    """
    Read the files of the configured services; nothing is sent.

    :raise StartupError: one cannot be used; names the setting.
    """
    fcm, apns, web_push, webhook = settings.fcm, settings.apns, settings.web_push, settings.webhook
    return PushCredentials(
        _load("fcm.credentials", load_fcm_credentials, fcm.credentials),
        _load("apns.key_file", load_apns_credentials, apns.key_file, apns.key_id, apns.team_id, apns.topic),
        _load("web_push.key_file", load_vapid_key, web_push.key_file),
        _load("webhook.secret_file", load_webhook_secret, None if webhook.url is None else webhook.secret_file),
    )


def _load(setting: str, load: Callable[..., Any], path: object, *others: object) -> Any:
    try:
        return None if path is None else load(path, *others)
    except OperatorError as error:
        text = str(error)
        raise StartupError(text if text.startswith("push.") else f"push.{setting}: {text}") from None


class PushSubsystem:
    """
    Push notifications of one process.

    :param services: the configured services, by name.
    :param webhook: None if there is none.
    :param vapid_public_key: as of :class:`~mediatord.push.registry.DeviceRegistry`.
    :ivar registry: registers devices; None if only the webhook is configured.
    :ivar housekeeping: removes expired devices, counts the others, and seals them again after a rotation of keys.
    """

    def __init__(
        self,
        core: CoreServices,
        config: Config,
        services: Mapping[ServiceName, IPushService[Any]],
        webhook: IWebhook | None,
        vapid_public_key: str | None,
    ) -> None:
        settings = config.push
        self._store = core.store.devices
        self._metrics = core.recorder.metrics
        self.services = services
        self.mediator_id = derive_mediator_id(core.identity.now.fingerprint)
        sealer = DeviceSealer(lambda: core.identity.now.sealing_secrets, os.urandom)
        self.registry: DeviceRegistry | None = None
        if services:
            self.registry = DeviceRegistry(
                self._store,
                sealer,
                core.registrations,
                tuple(services),
                settings.max_devices,
                self.mediator_id,
                vapid_public_key=vapid_public_key,
                allow_http=bool(config.outbound.allow_private),
            )
        self.sender = PushSender(
            core.reactor,
            {name: service for name, service in services.items()},
            webhook,
            sealer,
            self._store,
            core.recorder,
            self.mediator_id,
            random.SystemRandom().uniform,
        )
        wakes_decentrl = settings.decentrl or webhook is not None
        policy = WakeupPolicy(
            settings.min_interval,
            settings.quiet_after_poll,
            LEASE_SECONDS,
            without_devices=webhook is not None,
            max_message_ids=MAX_MESSAGE_IDS if settings.message_ids else 0,
        )
        self.scheduler = WakeupScheduler(
            core.reactor, self._store, self.sender, policy, settings.repeat_after, core.monotonic, wakes_decentrl
        )
        tasks = [
            (self._expire_devices, EXPIRY_INTERVAL),
            (self._count_devices, COUNT_INTERVAL),
            (self._reseal_devices, RESEAL_INTERVAL),
        ]
        self.housekeeping = PeriodicTasks(core.reactor, tasks, "housekeeping of devices")
        self._metrics.register_buffer("wakeups", lambda: (self.scheduler.waiting, None))
        self._metrics.count_push_hosts_backing_off = self.sender.count_backing_off
        for name in (*services, *(("webhook",) if webhook is not None else ())):
            for outcome in ("sent", "rejected", "retry"):
                self._metrics.push_requests.inc(name, outcome, by=0)
        # Without a series at the start, Prometheus would not see the first increase.
        for service in services:
            self._metrics.push_devices_forgotten.inc(service, by=0)

    async def _expire_devices(self) -> None:
        while await self._store.expire_devices(_EXPIRY_BATCH_SIZE) == _EXPIRY_BATCH_SIZE:
            pass

    async def _reseal_devices(self) -> None:
        while self.registry is not None and self.housekeeping.running and await self.registry.reseal_devices():
            pass

    async def _count_devices(self) -> None:
        self._metrics.push_devices = dict.fromkeys(self.services, 0) | await self._store.count_devices()


def list_push_services(core: CoreServices) -> list[Service]:
    """The services to start with the daemon, in their order."""
    return [] if core.push is None else [core.push.scheduler, core.push.housekeeping]


def derive_mediator_id(fingerprint: bytes) -> str:
    """An opaque id of a mediator, by which a wallet knows which of its own woke it: 32 hexadecimal digits."""
    return sha256(b"mediatord push " + fingerprint).hexdigest()[:_ID_LENGTH]


def build_push(core: CoreServices, config: Config) -> PushSubsystem | None:
    """
    Build push notifications; None if nothing is configured.

    :raise StartupError: credentials cannot be used.
    """
    settings, credentials = config.push, load_push_credentials(config.push)

    def make_client(**options: Any) -> OutboundHTTPClient:
        """One for each service, so that none takes the connections of another."""
        options = {"keep": ConnectionLimits(), **options}
        return OutboundHTTPClient(core.reactor, allow_private=config.outbound.allow_private, **options)

    alert = PushAlert(**dict(settings.alert))
    services: dict[ServiceName, IPushService[Any]] = {}
    if credentials.fcm is not None:
        services["fcm"] = FCMService(credentials.fcm, make_client(), url=settings.fcm.url, alert=alert)
    if credentials.apns is not None:
        services["apns"] = APNsService(make_client(), credentials.apns, settings.apns.url, alert)
    if credentials.vapid is not None:
        client = make_client(keep=WEB_PUSH_CONNECTIONS, resolve=NameLookups(core.reactor).resolve)
        services["webpush"] = WebPushService(credentials.vapid, settings.web_push.contact or "", client)
    webhook, secret = None, credentials.webhook_secret
    if settings.webhook.url is not None and secret is not None:
        name_account = str if settings.webhook.dids == "plain" else _make_pseudonymizer(secret)
        webhook = WebhookNotifier(settings.webhook.url, secret, make_client(), name_account)
    if not services and webhook is None:
        return None
    vapid_public_key = credentials.vapid.public if credentials.vapid is not None else None
    return PushSubsystem(core, config, services, webhook, vapid_public_key)


def _make_pseudonymizer(secret: bytes) -> Callable[[str], str]:
    """Names accounts for the webhook: whoever has its key can compute the pseudonyms of the DIDs that it knows."""

    def name_account(did: str) -> str:
        return hmac.digest(secret, b"account " + did.encode("utf-8", "surrogatepass"), "sha256").hex()[:_ID_LENGTH]

    return name_account
