"""Makes the requests that wake-ups need, with bounds for each host; a host that fails is left alone for a while."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.push.devices import DeviceSealer, PushDevice, ServiceName
from mediatord.push.service import IPushService, PushResult, Wakeup
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.devices import Device

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
# Reasons of results for which no request was made.
BACKING_OFF, BUSY, KEY_RETIRED, NOT_CONFIGURED = "backing_off", "busy", "key_retired", "not_configured"
PROCESS_ENDED = "process_ended"
_INTERNAL_ERROR = "internal_error"


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
    """:param seconds: from the request for it on, so with any wait for other requests."""

    result: PushResult
    seconds: float


RequestCallback = Callable[[Sequence[TimedResult]], None]


class IPushRequester(Protocol):
    """Makes requests to push services, in this process or in another."""

    def start(self) -> None:
        """Called when the daemon starts."""

    def request(self, request: PushRequest, done: RequestCallback) -> None:
        """Make requests; `done` is called once with a result for each target, perhaps at once. Never fails."""

    def count_backing_off(self) -> Mapping[str, int]:
        """Number of hosts that are left alone at the moment, by service."""

    async def close(self) -> None:
        """Abort requests; their results are `retry`. May be called again."""


class PushRequester:
    """
    Makes requests to push services in this process.

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
        self._unproven = 0
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
        now, found = self._monotonic(), dict.fromkeys(self._services, 0)
        for (service, _), host in self._hosts.items():
            if host.blocked_until > now:
                found[service] = found.get(service, 0) + 1
        return found

    async def close(self) -> None:
        """As of :class:`IPushRequester`."""
        for host in self._hosts.values():
            _release_waiting(host)
        closing = [Deferred.fromCoroutine(service.close()) for service in self._services.values()]
        if self._webhook is not None:
            closing.append(Deferred.fromCoroutine(self._webhook.close()))
        await gatherResults(closing)

    async def _measure(self, request: Coroutine[Deferred[Any], Any, PushResult]) -> TimedResult:
        began = self._monotonic()
        try:
            result = await request
        except Exception:
            _log.failure("sending a wake-up failed", redact_failure())
            result = PushResult("retry", _INTERNAL_ERROR)
        return TimedResult(result, self._monotonic() - began)

    async def _wake(self, device: Device, wakeup: Wakeup) -> PushResult:
        service = self._services.get(device.service)
        if service is None:
            return PushResult("rejected", NOT_CONFIGURED)
        opened = self._sealer.open(device)
        if opened is None:
            # The key that it was sealed with is gone, so it cannot be woken again.
            return PushResult("gone", KEY_RETIRED)
        return await self._send_to(self._find_host(service.name, service.host_of(opened)), service, opened, wakeup)

    async def _notify(self, owner: str, messages: int, size: int) -> PushResult:
        if self._webhook is None:
            return PushResult("rejected", NOT_CONFIGURED)
        return await self._webhook.notify(owner, messages, size)

    async def _send_to(
        self, host: _Host, service: IPushService[Any], device: PushDevice, wakeup: Wakeup
    ) -> PushResult:
        is_unproven = not host.is_proven
        if is_unproven and self._unproven >= MAX_UNPROVEN_REQUESTS:
            return PushResult("retry", BUSY)
        if host.in_progress >= MAX_REQUESTS_PER_HOST and not await self._wait_for(host):
            return PushResult("retry", BUSY)
        left = host.blocked_until - self._monotonic()
        if left > 0:
            return PushResult("retry", BACKING_OFF, retry_after=left)
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
            host.blocked_until = max(host.blocked_until, self._monotonic() + pause)
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


def _release_waiting(host: _Host) -> None:
    waiting, host.waiting = host.waiting, deque()
    for one in waiting:
        one.callback(False)
