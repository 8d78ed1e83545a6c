"""
Sends claimed wake-ups to push services, and acts on their answers: devices that a service no longer knows are
removed, and a host that fails is left alone for a while.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.observability.event_recorder import EventRecorder
from mediatord.push.devices import DeviceSealer, PushDevice, ServiceName
from mediatord.push.service import REQUEST_TIMEOUT, IPushService, PushResult, Wakeup
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.devices import Device, IDeviceStore, WakeupClaim

_log = Logger()

# Requests to one host at a time, and those that wait for one of them to end.
MAX_REQUESTS_PER_HOST = 64
MAX_WAITING_PER_HOST = 1_000
# Requests at a time to all hosts that have not accepted any yet: the endpoints of Web Push are chosen by strangers.
MAX_UNPROVEN_REQUESTS = 100
# Hosts of which the state is kept; the least recently used are dropped.
MAX_HOSTS = 10_000
# Failures in a row after which a host is left alone.
FAILURES_BEFORE_BACKOFF = 3
INITIAL_BACKOFF, MAX_BACKOFF = 1.0, 300.0
# The longest pause that a service may ask for.
MAX_RETRY_AFTER = 3_600.0
_BACKING_OFF, _BUSY, _INTERNAL_ERROR = "backing_off", "busy", "internal_error"
_NOT_SENT = frozenset((_BACKING_OFF, _BUSY))
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
    :ivar is_proven: whether it has accepted a request.
    :ivar waiting: fire with whether a request may be sent now.
    """

    in_progress: int = 0
    failures: int = 0
    blocked_until: float = 0.0
    is_proven: bool = False
    waiting: deque[Deferred[bool]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class SendReport:
    """
    What became of a wake-up.

    :param owed: ids of the devices that are still to be woken; :data:`WEBHOOK_TARGET` for the webhook.
    :param is_partial: whether some were woken, and others are owed.
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
        self._unproven = 0
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
        results = await gatherResults(sending)
        owed = [(id_, result) for id_, result in zip(ids, results, strict=True) if result.outcome == "retry"]
        if not owed:
            return SendReport(frozenset())
        pause = min(MAX_BACKOFF, INITIAL_BACKOFF * 2 ** min(attempt, 16)) * self._uniform(0.5, 1.5)
        pause = max(pause, min(result.retry_after or 0.0 for _, result in owed))
        is_partial = "sent" in [result.outcome for result in results]
        return SendReport(frozenset(id_ for id_, _ in owed), is_partial, min(pause, MAX_RETRY_AFTER))

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
            result = await self._request(service, opened, wakeup)
            self._record(owner, device.service, result, age, self._recorder.monotonic() - began)
        if result.outcome in ("gone", "mismatch"):
            await self._forget(owner, device, result.reason or result.outcome)
        return result

    async def notify(self, claim: WakeupClaim, age: float = 0.0) -> PushResult:
        """Call the webhook, and record the outcome."""
        if self._webhook is None:
            return PushResult("rejected", "not_configured")
        began = self._recorder.monotonic()
        try:
            result = await self._webhook.notify(claim.owner, claim.messages, claim.bytes)
        except Exception:
            _log.failure("calling the webhook failed", redact_failure())
            result = PushResult("retry", _INTERNAL_ERROR)
        self._record(claim.owner, "webhook", result, age, self._recorder.monotonic() - began)
        return result

    def count_backing_off(self) -> dict[str, int]:
        """Number of hosts that are left alone at the moment, by service."""
        now, found = self._recorder.monotonic(), dict.fromkeys(self._services, 0)
        for (service, _), host in self._hosts.items():
            if host.blocked_until > now:
                found[service] = found.get(service, 0) + 1
        return found

    async def close(self) -> None:
        """Abort requests; those who wait for them get `retry`."""
        for host in self._hosts.values():
            _release_waiting(host)
        closing = [Deferred.fromCoroutine(service.close()) for service in self._services.values()]
        if self._webhook is not None:
            closing.append(Deferred.fromCoroutine(self._webhook.close()))
        await gatherResults(closing)

    async def _request(self, service: IPushService[Any], device: PushDevice, wakeup: Wakeup) -> PushResult:
        try:
            host = self._find_host(service.name, service.host_of(device))
            return await self._send_to(host, service, device, wakeup)
        except Exception:
            _log.failure("sending a wake-up failed", redact_failure())
            return PushResult("retry", _INTERNAL_ERROR)

    async def _send_to(
        self, host: _Host, service: IPushService[Any], device: PushDevice, wakeup: Wakeup
    ) -> PushResult:
        is_unproven = not host.is_proven
        if is_unproven and self._unproven >= MAX_UNPROVEN_REQUESTS:
            return PushResult("retry", _BUSY)
        if host.in_progress >= MAX_REQUESTS_PER_HOST and not await self._wait_for(host):
            return PushResult("retry", _BUSY)
        left = host.blocked_until - self._recorder.monotonic()
        if left > 0:
            return PushResult("retry", _BACKING_OFF, retry_after=left)
        host.in_progress += 1
        self._unproven += is_unproven
        try:
            result = await service.send(device, wakeup)
            self._judge(host, service.name, result)
            return result
        finally:
            host.in_progress -= 1
            self._unproven -= is_unproven
            if host.waiting:
                # Not at once, as each that waits would end inside the one before.
                self._clock.callLater(0, host.waiting.popleft().callback, True)

    def _wait_for(self, host: _Host) -> Deferred[bool]:
        """Fires with whether a request may be sent."""
        waiting: Deferred[bool] = Deferred()
        if len(host.waiting) >= MAX_WAITING_PER_HOST:
            waiting.callback(False)
        else:
            host.waiting.append(waiting)
        return waiting

    def _judge(self, host: _Host, service: ServiceName, result: PushResult) -> None:
        """Leave a host alone that fails, or that asks for it."""
        if result.outcome != "retry":
            host.failures = 0
            host.is_proven = host.is_proven or result.outcome == "sent"
            return
        if service == "webpush" and result.status == 429:
            return  # a limit of this subscription (RFC 8030 8.4), not of the host
        host.failures += 1
        pause = 0.0
        if result.retry_after is not None:
            pause = min(result.retry_after, MAX_RETRY_AFTER)
        elif host.failures >= FAILURES_BEFORE_BACKOFF:
            pause = INITIAL_BACKOFF * 2 ** min(host.failures - FAILURES_BEFORE_BACKOFF, 16)
            pause = min(pause, MAX_BACKOFF) * self._uniform(0.5, 1.5)
        if pause > 0:
            host.blocked_until = max(host.blocked_until, self._recorder.monotonic() + pause)
            _release_waiting(host)
            if self._warning.count_occurrence():
                _log.warn(
                    "push service {service} fails ({reason}); next attempt in {pause} s",
                    service=service,
                    reason=result.reason or result.status,
                    pause=round(pause),
                )

    def _find_host(self, service: ServiceName, name: str) -> _Host:
        key = service, name
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = _Host()
            # Those in use are at the end, so the oldest is idle, or was used before ten thousand others.
            while len(self._hosts) > MAX_HOSTS:
                _, dropped = self._hosts.popitem(last=False)
                _release_waiting(dropped)
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


def _release_waiting(host: _Host) -> None:
    waiting, host.waiting = host.waiting, deque()
    for one in waiting:
        one.callback(False)
