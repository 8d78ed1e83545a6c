"""Builds push notifications: the configured services, the registry of devices, and the schedule of wake-ups."""

from __future__ import annotations

import hmac
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson
from twisted.application.service import Service
from twisted.internet.protocol import ProcessProtocol

from mediatord.config.settings import Config, OutboundSettings, PushSettings
from mediatord.errors import OperatorError, StartupError
from mediatord.net.name_lookups import NameLookups
from mediatord.net.outbound_http import ConnectionLimits, OutboundHTTPClient
from mediatord.push.apns import APNsCredentials, APNsService, load_apns_credentials
from mediatord.push.devices import DeviceSealer, ServiceName
from mediatord.push.fcm import FCMCredentials, FCMService, load_fcm_credentials
from mediatord.push.registry import DeviceRegistry
from mediatord.push.requester import IPushRequester, IWebhook, PushRequester
from mediatord.push.scheduler import WakeupScheduler
from mediatord.push.sender import PushSender
from mediatord.push.sender_process import COMMAND_FD, REPORT_FD, SENDER_SUBCOMMAND, SenderProcess
from mediatord.push.service import IPushService, PushAlert
from mediatord.push.web_push import VAPIDKey, WebPushService, load_vapid_key
from mediatord.push.webhook import WebhookNotifier, load_webhook_secret
from mediatord.runtime.periodic_tasks import PeriodicTasks
from mediatord.store.interfaces.devices import WakeupPolicy
from mediatord.workers.supervised_worker import SPEC_FD, spawn_subcommand

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

    @property
    def services(self) -> tuple[ServiceName, ...]:
        """Names of the services that they are for, without the webhook."""
        names: tuple[tuple[ServiceName, object], ...] = (
            ("fcm", self.fcm),
            ("apns", self.apns),
            ("web_push", self.vapid),
        )
        return tuple(name for name, credentials in names if credentials is not None)

    @property
    def has_webhook(self) -> bool:
        """Whether a webhook is configured."""
        return self.webhook_secret is not None


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

    :param services: names of the configured services.
    :param vapid_public_key: as of :class:`~mediatord.push.registry.DeviceRegistry`.
    :param has_webhook: whether a webhook is configured.
    :ivar registry: registers devices; None if only the webhook is configured.
    :ivar housekeeping: removes expired devices, counts the others, and seals them again after a rotation of keys.
    """

    def __init__(
        self,
        core: CoreServices,
        config: Config,
        services: Sequence[ServiceName],
        requester: IPushRequester,
        vapid_public_key: str | None = None,
        *,
        has_webhook: bool = False,
    ) -> None:
        settings = config.push
        self._store = core.store.devices
        self._metrics = core.recorder.metrics
        self.services = services
        self.mediator_id = derive_mediator_id(core.identity.now.fingerprint)
        self.registry: DeviceRegistry | None = None
        if self.services:
            self.registry = DeviceRegistry(
                self._store,
                DeviceSealer(partial(_get_secrets, core), os.urandom),
                core.registrations,
                self.services,
                settings.max_devices,
                self.mediator_id,
                vapid_public_key=vapid_public_key,
                allow_http=bool(config.outbound.allow_private),
            )
        self.sender = PushSender(
            requester,
            self._store,
            core.recorder,
            random.SystemRandom().uniform,
            has_webhook=has_webhook,
        )
        wakes_decentrl = settings.decentrl or has_webhook
        policy = WakeupPolicy(
            settings.min_interval,
            settings.quiet_after_poll,
            LEASE_SECONDS,
            without_devices=has_webhook,
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
        for name in (*self.services, *(("webhook",) if has_webhook else ())):
            for outcome in ("sent", "rejected", "retry"):
                self._metrics.push_requests.inc(name, outcome, by=0)
        # Without a series at the start, Prometheus would not see the first increase.
        for service in self.services:
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
    credentials = load_push_credentials(config.push)
    if not credentials.services and not credentials.has_webhook:
        return None
    spec = SenderSpec(config.push, config.outbound, derive_mediator_id(core.identity.now.fingerprint))
    get_secrets = partial(_get_secrets, core)
    requester: IPushRequester
    if config.push.sender_process:
        spawn = partial(_spawn_sender, core.reactor, spec)
        has_webhook = credentials.has_webhook
        requester = SenderProcess(core.reactor, spawn, get_secrets, core.monotonic, tells_owner=has_webhook)
    else:
        requester = build_requester(core.reactor, spec, credentials, get_secrets, core.monotonic)
    return PushSubsystem(
        core,
        config,
        credentials.services,
        requester,
        None if credentials.vapid is None else credentials.vapid.public,
        has_webhook=credentials.has_webhook,
    )


def _get_secrets(core: CoreServices) -> Sequence[bytes]:
    return core.identity.now.sealing_secrets


@dataclass(frozen=True, slots=True)
class SenderSpec:
    """
    What requests to push services depend on, without secrets.

    :param mediator: opaque id of this mediator.
    """

    push: PushSettings
    outbound: OutboundSettings
    mediator: str

    def to_bytes(self) -> bytes:
        """Serialize for :meth:`from_bytes`."""
        return orjson.dumps([self.push.model_dump_json(), self.outbound.model_dump_json(), self.mediator])

    @classmethod
    def from_bytes(cls, raw: bytes) -> SenderSpec:
        """
        Parse what :meth:`to_bytes` made.

        :raise ValueError: it is incomplete.
        """
        push, outbound, mediator = orjson.loads(raw)
        return cls(PushSettings.model_validate_json(push), OutboundSettings.model_validate_json(outbound), mediator)


def build_services(
    reactor: Any, spec: SenderSpec, credentials: PushCredentials
) -> tuple[dict[str, IPushService[Any]], IWebhook | None]:
    """The configured services by name, and the webhook."""
    settings, alert = spec.push, PushAlert(**dict(spec.push.alert))

    def make_client(**options: Any) -> OutboundHTTPClient:
        """One for each service, so that none takes the connections of another."""
        options = {"keep": ConnectionLimits(), **options}
        return OutboundHTTPClient(reactor, allow_private=spec.outbound.allow_private, **options)

    services: dict[str, IPushService[Any]] = {}
    if credentials.fcm is not None:
        services["fcm"] = FCMService(credentials.fcm, make_client(), url=settings.fcm.url, alert=alert)
    if credentials.apns is not None:
        services["apns"] = APNsService(make_client(), credentials.apns, settings.apns.url, alert)
    if credentials.vapid is not None:
        client = make_client(keep=WEB_PUSH_CONNECTIONS, resolve=NameLookups(reactor).resolve)
        services["web_push"] = WebPushService(credentials.vapid, settings.web_push.contact or "", client)
    secret = credentials.webhook_secret
    if settings.webhook.url is None or secret is None:
        return services, None
    name_account = str if settings.webhook.dids == "plain" else _make_pseudonymizer(secret)
    return services, WebhookNotifier(settings.webhook.url, secret, make_client(), name_account)


def build_requester(
    reactor: Any,
    spec: SenderSpec,
    credentials: PushCredentials,
    secrets: Callable[[], Sequence[bytes]],
    monotonic: Callable[[], float],
) -> PushRequester:
    """Build what makes requests to the configured services. :param secrets: return what opens devices."""
    services, webhook = build_services(reactor, spec, credentials)
    sealer = DeviceSealer(secrets, os.urandom)
    uniform = random.SystemRandom().uniform
    return PushRequester(reactor, services, webhook, sealer, spec.mediator, uniform, monotonic)


def _spawn_sender(reactor: Any, spec: SenderSpec, protocol: ProcessProtocol) -> None:
    """:raise OSError: it could not be started."""
    spawn_subcommand(reactor, protocol, [SENDER_SUBCOMMAND], {COMMAND_FD: "w", REPORT_FD: "r", SPEC_FD: "w"})
    child: Any = protocol.transport
    child.writeToChild(SPEC_FD, spec.to_bytes())
    child.closeChildFD(SPEC_FD)


def _make_pseudonymizer(secret: bytes) -> Callable[[str], str]:
    """Names accounts for the webhook: whoever has its key can compute the pseudonyms of the DIDs that it knows."""

    def name_account(did: str) -> str:
        return hmac.digest(secret, b"account " + did.encode("utf-8", "surrogatepass"), "sha256").hex()[:_ID_LENGTH]

    return name_account
