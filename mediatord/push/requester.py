"""Makes the requests of wake-ups, within bounds for each host; nothing is sent for a while to a host that fails."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.net.outbound_http import LOCAL_LIMIT_REASONS
from mediatord.push.devices import DeviceSealer, PushDevice
from mediatord.push.service import IPushService, PushResult, Wakeup
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.devices import Device

_log = Logger()

# Requests to one host at a time, and those that wait for one of them to end. While a host fails it is one, and none.
MAX_REQUESTS_PER_HOST = 64
# As many as it has connections for one host, so that none waits there.
MAX_REQUESTS_PER_WEB_PUSH_HOST = 32
MAX_WAITING_PER_HOST = 200
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
_BACKING_OFF, _KEY_RETIRED, _NOT_CONFIGURED, _INTERNAL_ERROR = (
    "backing_off",
    "key_retired",
    "not_configured",
    "internal_error",
)
BUSY, PROCESS_ENDED = "busy", "process_ended"
# Nothing was sent: a limit of this process, which says nothing about the host.
_NOT_SENT = frozenset((_BACKING_OFF, BUSY, *LOCAL_LIMIT_REASONS))
# Reasons of results that no answer of a service is behind.
UNRECORDED = _NOT_SENT | {_KEY_RETIRED, _NOT_CONFIGURED, PROCESS_ENDED}


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


class PushRequest(NamedTuple):
    """
    Requests for one account, which are made at once.

    :param owner: its DID, which is for the webhook.
    :param message_ids: as of :class:`~mediatord.push.service.Wakeup`.
    :param webhook: numbers of messages and bytes that the webhook is told; None if it is not called.
    """

    owner: str
    devices: Sequence[Device]
    message_ids: Sequence[str] = ()
    webhook: tuple[int, int] | None = None

    def count_targets(self) -> int:
        """Number of its results: those of the devices, then that of the webhook."""
        return len(self.devices) + (self.webhook is not None)


class TimedResult(NamedTuple):
    """
    :param seconds: from the request for it on, so with any wait for other requests.
    :param is_trusted: whether the host is, as of :class:`PushRequester`.
    """

    result: PushResult
    seconds: float
    is_trusted: bool = True


RequestCallback = Callable[[Sequence[TimedResult]], None]


class IPushRequester(Protocol):
    """Makes requests to push services, in this process or in another."""

    def start(self) -> None:
        """Called when the daemon starts."""

    def request(self, request: PushRequest, done: RequestCallback) -> None:
        """Make requests; `done` is called once with a result for each target, perhaps at once. Never fails."""

    def count_backing_off(self) -> Mapping[str, int]:
        """Number of hosts to which nothing is sent at the moment, as they fail, by service."""

    async def close(self) -> None:
        """Abort requests; their results are `retry`. May be called again."""


class PushRequester:
    """
    Makes requests to push services in this process.

    A host is trusted if it is the operator's choice, or has accepted its last request in time.

    :param services: the configured services, by name.
    :param webhook: None if there is none.
    :param mediator: opaque id of this mediator.
    :param uniform: as `random.uniform`.
    :param monotonic: returns seconds, by a clock that cannot be set.
    """

    def __init__(
        self,
        clock: IReactorTime,
        services: Mapping[str, IPushService[Any]],
        webhook: IWebhook | None,
        sealer: DeviceSealer,
        mediator: str,
        uniform: Callable[[float, float], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._services = services
        self._webhook = webhook
        self._sealer = sealer
        self._mediator = mediator
        self._uniform = uniform
        self._monotonic = monotonic
        self._hosts: OrderedDict[tuple[str, str], _Host] = OrderedDict()
        # Ends of pauses of single devices.
        self._paused: OrderedDict[bytes, float] = OrderedDict()
        self._untrusted = 0
        self._is_closed = False
        self._warning = LogThrottle(clock)

    def start(self) -> None:
        """As of :class:`IPushRequester`: nothing to do."""

    def request(self, request: PushRequest, done: RequestCallback) -> None:
        """As of :class:`IPushRequester`."""
        wakeup = Wakeup(self._mediator, tuple(request.message_ids))
        requests = [self._wake(device, wakeup) for device in request.devices]
        if request.webhook is not None:
            requests.append(self._notify(request.owner, *request.webhook))
        made = gatherResults([Deferred.fromCoroutine(self._measure(one)) for one in requests])
        made.addCallback(done)
        made.addErrback(lambda failure: _log.failure("ending a wake-up failed", redact_failure(failure)))

    def count_backing_off(self) -> dict[str, int]:
        """As of :class:`IPushRequester`."""
        names = [*self._services, *(["webhook"] if self._webhook is not None else [])]
        now, found = self._monotonic(), dict.fromkeys(names, 0)
        for (service, _), host in self._hosts.items():
            if host.blocked_until > now:
                found[service] = found.get(service, 0) + 1
        return found

    async def close(self) -> None:
        """As of :class:`IPushRequester`."""
        self._is_closed = True
        for host in self._hosts.values():
            host.end_waiting()
        closing = [Deferred.fromCoroutine(service.close()) for service in self._services.values()]
        if self._webhook is not None:
            closing.append(Deferred.fromCoroutine(self._webhook.close()))
        await gatherResults(closing)

    async def _measure(self, request: Coroutine[Deferred[Any], Any, tuple[PushResult, bool]]) -> TimedResult:
        began = self._monotonic()
        try:
            result, is_trusted = await request
        except Exception:
            _log.failure("sending a wake-up failed", redact_failure())
            result, is_trusted = PushResult("retry", _INTERNAL_ERROR), True
        return TimedResult(result, self._monotonic() - began, is_trusted)

    async def _wake(self, device: Device, wakeup: Wakeup) -> tuple[PushResult, bool]:
        """The result, and whether the host is trusted."""
        service = self._services.get(device.service)
        if service is None:
            return PushResult("rejected", _NOT_CONFIGURED), True
        opened = self._sealer.open(device)
        if opened is None:
            # The key that it was sealed with is gone, so it cannot be woken again.
            return PushResult("gone", _KEY_RETIRED), True
        host = self._find_host(service.name, service.host_of(opened))
        return await self._wake_opened(host, service, device, opened, wakeup), host.is_trusted

    async def _notify(self, owner: str, messages: int, size: int) -> tuple[PushResult, bool]:
        webhook = self._webhook
        if webhook is None:
            return PushResult("rejected", _NOT_CONFIGURED), True
        host = self._find_host("webhook", "")
        return await self._send_to(host, "webhook", lambda: webhook.notify(owner, messages, size)), True

    async def _wake_opened(
        self, host: _Host, service: IPushService[Any], device: Device, opened: PushDevice, wakeup: Wakeup
    ) -> PushResult:
        now, paused_until = self._monotonic(), self._paused.pop(device.id, 0.0)
        if paused_until > now:
            self._paused[device.id] = paused_until
            return PushResult("retry", _BACKING_OFF, retry_after=paused_until - now)
        result = await self._send_to(host, service.name, lambda: service.send(opened, wakeup))
        if _is_limit_of_device(service.name, result) and result.retry_after is not None:
            self._paused[device.id] = self._monotonic() + min(result.retry_after, MAX_RETRY_AFTER)
            if len(self._paused) > MAX_HOSTS:
                self._paused.popitem(last=False)
        return result

    async def _send_to(
        self, host: _Host, service: str, send: Callable[[], Coroutine[Any, Any, PushResult]]
    ) -> PushResult:
        if not host.is_trusted and self._untrusted >= MAX_UNTRUSTED_REQUESTS:
            return PushResult("retry", BUSY)
        limit = MAX_REQUESTS_PER_WEB_PUSH_HOST if service == "web_push" else MAX_REQUESTS_PER_HOST
        if host.in_progress >= (1 if host.is_failing else limit) and not await self._wait_for(host):
            return PushResult("retry", BUSY)
        began = self._monotonic()
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
            self._judge(host, service, result, self._monotonic() - began)
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
        is_chosen = service != "web_push"
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
        host.blocked_until = max(host.blocked_until, self._monotonic() + seconds)
        host.end_waiting()
        if self._warning.count_occurrence():
            _log.warn(
                "push service {service} fails ({reason}); next attempt in {pause} s",
                service=service,
                reason=result.reason or result.status,
                pause=round(seconds),
            )

    def _find_host(self, service: str, name: str) -> _Host:
        key = service, name
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = _Host(is_trusted=service != "web_push")
            # Those in use are at the end, so the oldest is idle, or was used before ten thousand others.
            while len(self._hosts) > MAX_HOSTS:
                _, dropped = self._hosts.popitem(last=False)
                dropped.end_waiting()
        else:
            self._hosts.move_to_end(key)
        return host


def _is_limit_of_device(service: str, result: PushResult) -> bool:
    """Whether a service limits one subscription, and not its sender (RFC 8030 8.4)."""
    return service == "web_push" and result.status == 429
