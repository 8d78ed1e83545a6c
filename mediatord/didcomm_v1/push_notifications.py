"""
Push Notifications: registration of the devices of an account (Aries RFC 0734, 0699, and ours for Web Push). Members
are those of the bodies of v2.
"""

from __future__ import annotations

from functools import partial

from mediatord.didcomm.push_notifications import DeviceRequests
from mediatord.didcomm_v1.context import V1AccountRequestHandler, V1Request
from mediatord.protocol.didcomm.push_notifications import ACK_BODY, PUSH_PROTOCOLS
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, V1Answer
from mediatord.protocol.didcomm_v1.problem_report import make_ack
from mediatord.push.devices import ServiceName
from mediatord.push.registry import DeviceRegistry
from mediatord.store.interfaces.store import Account


class V1PushNotifications:
    """Serves `set` and `get` of each configured service."""

    def __init__(self, devices: DeviceRegistry) -> None:
        self._services = devices.services
        self._requests = DeviceRequests(devices)

    def account_handlers(self) -> dict[str, V1AccountRequestHandler]:
        """Handler of each request, by type without prefix."""
        handlers: dict[str, V1AccountRequestHandler] = {}
        for service in self._services:
            protocol = PUSH_PROTOCOLS[service]
            handlers[_strip_prefix(protocol.type("set"))] = partial(self._set, service)
            handlers[_strip_prefix(protocol.type("get"))] = partial(self._get, service)
        return handlers

    async def _set(self, service: ServiceName, request: V1Request, account: Account) -> V1Answer:
        """An ack, as :meth:`DeviceRequests.set_device`; that of Web Push belongs to its own protocol."""
        await self._requests.set_device(service, request.message.members, account, request.origin.peer)
        if service == "web_push":
            return V1Answer(PUSH_PROTOCOLS[service].type("ack"), ACK_BODY)
        return make_ack()

    async def _get(self, service: ServiceName, request: V1Request, account: Account) -> V1Answer:
        """The device, as :meth:`DeviceRequests.get_device`."""
        members = await self._requests.get_device(service, account)
        return V1Answer(_strip_prefix(PUSH_PROTOCOLS[service].type("info")), members)


def _strip_prefix(uri: str) -> str:
    return uri.removeprefix(DIDCOMM_ORG)
