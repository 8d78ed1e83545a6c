"""Push Notifications: registration of the devices of an account (Aries RFC 0734, 0699, and ours for Web Push)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mediatord.didcomm.context import AccountRequestHandler, DIDCommContext, MessageRequest
from mediatord.errors import DeviceNotRegistered
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.protocol.didcomm.push_notifications import ACK_BODY, PUSH_PROTOCOLS, PushProtocol
from mediatord.push.device_json import format_device
from mediatord.push.devices import ServiceName
from mediatord.push.registry import DeviceRegistry
from mediatord.store.interfaces.store import Account


class DeviceRequests:
    """What requests of all versions do with the devices of an account."""

    def __init__(self, devices: DeviceRegistry) -> None:
        self._devices = devices

    async def set_device(self, service: ServiceName, members: Mapping[str, Any], account: Account, peer: str) -> None:
        """
        Register the device, or, with null values, remove all devices of the service.

        :param members: that contain the values.
        :raise MissingDeviceValue: some values are null, and others are not.
        :raise InvalidBody: a value is malformed.
        :raise TooManyDevices: the account has too many.
        :raise RegistrationLimitExceeded: the address has registered too much.
        """
        device = self._devices.parse_device(service, PUSH_PROTOCOLS[service].extract_values(members))
        if device is None:
            await self._devices.remove_devices(account.did, service)
        else:
            await self._devices.set_device(account.did, device, peer)

    async def get_device(self, service: ServiceName, account: Account) -> dict[str, Any]:
        """
        Members of the answer that shows the device that was registered last. For Web Push there is an answer without
        any, as it has the key that a subscription is bound to.

        :raise DeviceNotRegistered: there is none.
        """
        devices = await self._devices.get_devices(account.did, service)
        if not devices and service != "web_push":
            raise DeviceNotRegistered
        values = format_device(devices[-1]) if devices else None
        return PUSH_PROTOCOLS[service].make_info_body(values, self._devices.vapid_public_key)


class PushNotifications:
    """Serves `set` and `get` of each configured service."""

    def __init__(self, context: DIDCommContext, devices: DeviceRegistry) -> None:
        self._packer = context.packer
        self._services = devices.services
        self._requests = DeviceRequests(devices)

    def handlers(self) -> Iterator[tuple[str, AccountRequestHandler]]:
        """Type URI and handler of each request."""
        for service in self._services:
            protocol = PUSH_PROTOCOLS[service]
            yield protocol.type("set"), partial(self._set, service, protocol)
            yield protocol.type("get"), partial(self._get, service, protocol)

    async def _set(
        self, service: ServiceName, protocol: PushProtocol, request: MessageRequest, account: Account
    ) -> OutgoingMessage:
        """`ack`, as :meth:`DeviceRequests.set_device`."""
        message = request.received.message
        await self._requests.set_device(service, message.require_body(), account, request.origin.peer)
        return replace(self._packer.answer(message, protocol.type("ack"), ACK_BODY), ack=(message.id,))

    async def _get(
        self, service: ServiceName, protocol: PushProtocol, request: MessageRequest, account: Account
    ) -> OutgoingMessage:
        """The device, as :meth:`DeviceRequests.get_device`."""
        body = await self._requests.get_device(service, account)
        return self._packer.answer(request.received.message, protocol.type("info"), body)
