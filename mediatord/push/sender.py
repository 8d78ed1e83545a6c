"""
Sends claimed wake-ups to push services, and acts on their answers: devices that a service no longer knows are
removed, and nothing is sent for a while to a host that fails.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.net.outbound_http import LOCAL_LIMIT_REASONS
from mediatord.observability.event_recorder import EventRecorder
from mediatord.push.devices import DeviceSealer, PushDevice
from mediatord.push.service import REQUEST_TIMEOUT, IPushService, PushResult, Wakeup
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.devices import Device, IDeviceStore, WakeupClaim

_log = Logger()

# Requests to one host at a time, and those that wait for one of them to end. While a host fails it is one, and none.
MAX_REQUESTS_PER_HOST = 64
# As many as it has connections for one host, so that none waits there.
MAX_REQUESTS_PER_WEB_PUSH_HOST = 32
MAX_WAITING_PER_HOST = 100
# Requests at a time to all Web Push hosts that are not trusted: anybody can register an endpoint.
MAX_UNTRUSTED_REQUESTS = 100
# Seconds in which a host has to accept a request to be trusted.
TRUSTED_SECONDS = 2.0
# Attempts to wake a device at a host that is not trusted. Those of other hosts are not limited.
MAX_UNTRUSTED_ATTEMPTS = 24
# Hosts, and devices with a pause of their own, that are remembered; the least recently used are dropped.
MAX_HOSTS = 10_000
# Failures in a row after which a host gets one request at a time, with growing pauses.
FAILURES_BEFORE_BACKOFF = 3
INITIAL_BACKOFF, MAX_BACKOFF = 1.0, 300.0
# The longest pause that a service may ask for.
MAX_RETRY_AFTER = 3_600.0
_BACKING_OFF, _BUSY, _INTERNAL_ERROR = "backing_off", "busy", "internal_error"
# Nothing was sent: a limit of this process, which says nothing about the host.
_NOT_SENT = frozenset((_BACKING_OFF, _BUSY, *LOCAL_LIMIT_REASONS))
# Stands for the webhook among the ids of devices.
WEBHOOK_TARGET = b"webhook"


class IWebhook(Protocol):
    """Tells the operator's endpoint that messages wait for an account."""

    async def notify(self, account: str, messages: int, bytes: int) -> PushResult:
        """:param account: its DID, which the webhook shows as configured. Never fails."""

    async def close(self) -> None:
        """Abort what is in progress."""


@dataclass(slots=True)
class _Host:
    """
    A host that wake-ups go to.

    :ivar failures: requests in a row without a usable answer.
    :ivar blocked_until: no request is sent before.
    :ivar is_trusted: whether it is the operator's choice, or has accepted its last request in time.
    :ivar waiting: fire with whether a request may be sent now.
    """

    is_trusted: bool
    in_progress: int = 0
    failures: int = 0
    blocked_until: float = 0.0
    waiting: deque[Deferred[bool]] = field(default_factory=deque)

    @property
    def is_failing(self) -> bool:
        """Whether it gets one request at a time only, to find out whether it works again."""
        return self.failures >= FAILURES_BEFORE_BACKOFF

    def end_waiting(self) -> None:
        """Send none of the requests that wait."""
        waiting, self.waiting = self.waiting, deque()
        for one in waiting:
            one.callback(False)


@dataclass(frozen=True, slots=True)
class SendReport:
    """
    What became of a wake-up.

    :param owed: ids of the devices that are still to be woken; :data:`WEBHOOK_TARGET` for the webhook.
    :param is_partial: whether some devices were woken, and something is owed.
    :param retry_in: seconds until the next attempt, if any is owed.
    """

    owed: frozenset[bytes]
    is_partial: bool = False
    retry_in: float = 0.0


class PushSender:
    """
    Sends wake-ups to all devices of an account at once.

    :param services: the configured services, by name.
    :param webhook: None if there is none.
    :param mediator: opaque id of this mediator.
    :param uniform: as `random.uniform`.
    """

    def __init__(
        self,
        clock: IReactorTime,
        services: Mapping[str, IPushService[Any]],
        webhook: IWebhook | None,
        sealer: DeviceSealer,
        devices: IDeviceStore,
        recorder: EventRecorder,
        mediator: str,
        uniform: Callable[[float, float], float],
    ) -> None:
        self._clock = clock
        self._services = services
        self._webhook = webhook
        self._sealer = sealer
        self._devices = devices
        self._recorder = recorder
        self._mediator = mediator
        self._uniform = uniform
        self._hosts: OrderedDict[tuple[str, str], _Host] = OrderedDict()
        # Ends of pauses of single devices.
        self._paused: OrderedDict[bytes, float] = OrderedDict()
        self._untrusted = 0
        self._is_closed = False
        self._warning = LogThrottle(clock)

    @property
    def has_webhook(self) -> bool:
        """Whether a webhook is configured."""
        return self._webhook is not None

    async def send(
        self, claim: WakeupClaim, only: Container[bytes] | None = None, *, attempt: int = 0, age: float = 0.0
    ) -> SendReport:
        """
        Send a wake-up to the devices of its owner, and to the webhook.

        :param only: ids of the devices to wake; None for all.
        :param attempt: number of attempts before this one.
        :param age: seconds since the message arrived.
        """
        wakeup = Wakeup(self._mediator, claim.message_ids)
        targets = [device for device in claim.devices if only is None or device.id in only]
        sending = [Deferred.fromCoroutine(self.wake(claim.owner, device, wakeup, age)) for device in targets]
        ids = [device.id for device in targets]
        if self._webhook is not None and (only is None or WEBHOOK_TARGET in only):
            sending.append(Deferred.fromCoroutine(self.notify(claim, age)))
            ids.append(WEBHOOK_TARGET)
        results = dict(zip(ids, await gatherResults(sending), strict=True))
        owed = {id_: result for id_, result in results.items() if result.outcome == "retry"}
        if attempt >= MAX_UNTRUSTED_ATTEMPTS:
            for device in targets:
                if device.id in owed and device.service == "webpush" and not self._is_host_trusted(device):
                    del owed[device.id]
        if not owed:
            return SendReport(frozenset())
        pause = min(MAX_BACKOFF, INITIAL_BACKOFF * 2 ** min(attempt, 16)) * self._uniform(0.5, 1.5)
        pause = max(pause, min(result.retry_after or 0.0 for result in owed.values()))
        is_partial = any(results[device.id].outcome == "sent" for device in targets)
        return SendReport(frozenset(owed), is_partial, min(pause, MAX_RETRY_AFTER))

    async def wake(self, owner: str, device: Device, wakeup: Wakeup, age: float = 0.0) -> PushResult:
        """Send one wake-up to one device, record the outcome, and remove the device if its service says so."""
        service = self._services.get(device.service)
        if service is None:
            return PushResult("rejected", "not_configured")
        opened = self._sealer.open(device)
        if opened is None:
            # The key that it was sealed with is gone, so it cannot be woken again.
            result = PushResult("gone", "key_retired")
        else:
            began = self._recorder.monotonic()
            result = await self._wake_opened(service, device, opened, wakeup)
            self._record(owner, device.service, result, age, self._recorder.monotonic() - began)
        if result.outcome in ("gone", "mismatch"):
            await self._forget(owner, device, result.reason or result.outcome)
        return result

    async def notify(self, claim: WakeupClaim, age: float = 0.0) -> PushResult:
        """Call the webhook, and record the outcome."""
        if self._webhook is None:
            return PushResult("rejected", "not_configured")
        began, webhook = self._recorder.monotonic(), self._webhook
        host = self._find_host("webhook", "")
        result = await self._send_to(
            host, "webhook", lambda: webhook.notify(claim.owner, claim.messages, claim.bytes)
        )
        self._record(claim.owner, "webhook", result, age, self._recorder.monotonic() - began)
        return result

    def count_backing_off(self) -> dict[str, int]:
        """Number of hosts to which nothing is sent at the moment, as they fail, by service."""
        names = [*self._services, *(["webhook"] if self.has_webhook else [])]
        now, found = self._recorder.monotonic(), dict.fromkeys(names, 0)
        for (service, _), host in self._hosts.items():
            if host.blocked_until > now:
                found[service] = found.get(service, 0) + 1
        return found

    async def close(self) -> None:
        """Abort requests; those who wait for them get `retry`."""
        self._is_closed = True
        for host in self._hosts.values():
            host.end_waiting()
        closing = [Deferred.fromCoroutine(service.close()) for service in self._services.values()]
        if self._webhook is not None:
            closing.append(Deferred.fromCoroutine(self._webhook.close()))
        await gatherResults(closing)

    async def _wake_opened(
        self, service: IPushService[Any], device: Device, opened: PushDevice, wakeup: Wakeup
    ) -> PushResult:
        now, paused_until = self._recorder.monotonic(), self._paused.pop(device.id, 0.0)
        if paused_until > now:
            self._paused[device.id] = paused_until
            return PushResult("retry", _BACKING_OFF, retry_after=paused_until - now)
        host = self._find_host(service.name, service.host_of(opened))
        result = await self._send_to(host, service.name, lambda: service.send(opened, wakeup))
        if _is_limit_of_device(service.name, result) and result.retry_after is not None:
            self._paused[device.id] = self._recorder.monotonic() + min(result.retry_after, MAX_RETRY_AFTER)
            if len(self._paused) > MAX_HOSTS:
                self._paused.popitem(last=False)
        return result

    async def _send_to(
        self, host: _Host, service: str, send: Callable[[], Coroutine[Any, Any, PushResult]]
    ) -> PushResult:
        if not host.is_trusted and self._untrusted >= MAX_UNTRUSTED_REQUESTS:
            return PushResult("retry", _BUSY)
        limit = MAX_REQUESTS_PER_WEB_PUSH_HOST if service == "webpush" else MAX_REQUESTS_PER_HOST
        if host.in_progress >= (1 if host.is_failing else limit) and not await self._wait_for(host):
            return PushResult("retry", _BUSY)
        began = self._recorder.monotonic()
        if self._is_closed or host.blocked_until > began:
            return PushResult("retry", _BACKING_OFF, retry_after=max(0.0, host.blocked_until - began))
        is_untrusted = not host.is_trusted
        host.in_progress += 1
        self._untrusted += is_untrusted
        try:
            result = await send()
        except Exception:
            _log.failure("sending a wake-up failed", redact_failure())
            result = PushResult("retry", _INTERNAL_ERROR)
        finally:
            host.in_progress -= 1
            self._untrusted -= is_untrusted
        if result.reason not in _NOT_SENT:
            self._judge(host, service, result, self._recorder.monotonic() - began)
        if host.waiting:
            # Not at once, as each that waits would end inside the one before.
            self._clock.callLater(0, host.waiting.popleft().callback, True)
        return result

    def _wait_for(self, host: _Host) -> Deferred[bool]:
        """Fires with whether a request may be sent."""
        waiting: Deferred[bool] = Deferred()
        if host.is_failing or self._is_closed or len(host.waiting) >= MAX_WAITING_PER_HOST:
            waiting.callback(False)
        else:
            host.waiting.append(waiting)
        return waiting

    def _judge(self, host: _Host, service: str, result: PushResult, seconds: float) -> None:
        """Record what an answer says about its host, and pause if it fails, or asks for it."""
        is_chosen = service != "webpush"
        if result.outcome == "sent":
            host.failures = 0
            host.is_trusted = is_chosen or seconds <= TRUSTED_SECONDS
            return
        if _is_limit_of_device(service, result):
            return
        if result.outcome != "retry" and (host.is_trusted or result.outcome != "rejected"):
            host.failures = 0
            return
        # Also a host that was never seen to accept a wake-up, and rejects them: it may be no push service at all.
        host.failures += 1
        host.is_trusted = is_chosen
        pause = 0.0
        if result.retry_after is not None:
            pause = min(result.retry_after, MAX_RETRY_AFTER)
        elif host.is_failing:
            pause = INITIAL_BACKOFF * 2 ** min(host.failures - FAILURES_BEFORE_BACKOFF, 16)
            pause = min(pause, MAX_BACKOFF) * self._uniform(0.5, 1.5)
        if pause > 0:
            self._pause(host, service, result, pause)

    def _pause(self, host: _Host, service: str, result: PushResult, seconds: float) -> None:
        host.blocked_until = max(host.blocked_until, self._recorder.monotonic() + seconds)
        host.end_waiting()
        if self._warning.count_occurrence():
            _log.warn(
                "push service {service} fails ({reason}); next attempt in {pause} s",
                service=service,
                reason=result.reason or result.status,
                pause=round(seconds),
            )

    def _is_host_trusted(self, device: Device) -> bool:
        opened, service = self._sealer.open(device), self._services.get(device.service)
        return (
            opened is not None
            and service is not None
            and self._find_host(service.name, service.host_of(opened)).is_trusted
        )

    def _find_host(self, service: str, name: str) -> _Host:
        key = service, name
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = _Host(is_trusted=service != "webpush")
            # Those in use are at the end, so the oldest is idle, or was used before ten thousand others.
            while len(self._hosts) > MAX_HOSTS:
                _, dropped = self._hosts.popitem(last=False)
                dropped.end_waiting()
        else:
            self._hosts.move_to_end(key)
        return host

    def _record(self, owner: str, service: str, result: PushResult, age: float, seconds: float) -> None:
        if result.reason not in _NOT_SENT:
            self._recorder.record_wakeup(
                owner,
                service,
                result.outcome,
                code=result.reason or None,
                status=result.status,
                age=age,
                seconds=min(seconds, 2 * REQUEST_TIMEOUT),
                retry_after=result.retry_after,
            )

    async def _forget(self, owner: str, device: Device, reason: str) -> None:
        try:
            if await self._devices.forget_devices([device.id]):
                self._recorder.record_device_forgotten(owner, device.service, reason)
        except StoreUnavailable:
            pass  # the next wake-up finds out again


def _is_limit_of_device(service: str, result: PushResult) -> bool:
    """Whether a service limits one subscription, and not its sender (RFC 8030 8.4)."""
    return service == "webpush" and result.status == 429
