"""A push service in memory, whose answers a test gives."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred

from mediatord.push.devices import APNsDevice, FCMDevice, ServiceName, WebPushDevice
from mediatord.push.service import PushResult, Wakeup

SENT = PushResult("sent", status=200)


class ScriptedService:
    """
    Answers with `script`, a function of the device's token, or holds requests while that is None.

    :ivar requests: tokens or endpoints, with what they were told, in order.
    :ivar held: requests without an answer.
    """

    def __init__(self, name: ServiceName, script: Callable[[str], PushResult] | None = lambda token: SENT) -> None:
        self._name = name
        self.script = script
        self.requests: list[tuple[str, Wakeup]] = []
        self.held: list[Deferred[PushResult]] = []

    @property
    def name(self) -> ServiceName:
        """As of :class:`IPushService`."""
        return self._name

    @property
    def tokens(self) -> list[str]:
        """Tokens of the requests, in order."""
        return [token for token, _ in self.requests]

    def host_of(self, device: FCMDevice | APNsDevice | WebPushDevice) -> str:
        """The host of the endpoint; one for all tokens."""
        return device.endpoint.split("/")[2] if isinstance(device, WebPushDevice) else "push.example"

    async def send(self, device: FCMDevice | APNsDevice | WebPushDevice, wakeup: Wakeup) -> PushResult:
        """Record the request, and answer it."""
        token = device.endpoint if isinstance(device, WebPushDevice) else device.token
        self.requests.append((token, wakeup))
        if self.script is not None:
            return self.script(token)
        answer: Deferred[PushResult] = Deferred()
        self.held.append(answer)
        return await answer

    async def close(self) -> None:
        """Answer all requests that are held."""
        for answer in self.held:
            if not answer.called:
                answer.callback(PushResult("retry", "closed"))
