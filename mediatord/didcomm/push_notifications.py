"""Push Notifications: registration of the devices of an account (Aries RFC 0734, 0699, and ours for Web Push)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mediatord.didcomm.context import AccountRequestHandler, DIDCommContext, MessageRequest
from mediatord.errors import DeviceNotRegistered
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.protocol.didcomm.push_notifications import ACK_BODY, PUSH_PROTOCOLS, PushProtocol
from mediatord.push.device_json import format_device
from mediatord.push.devices import ServiceName
from mediatord.push.registry import DeviceRegistry
from mediatord.store.interfaces.store import Account


class PushNotifications:
    """Serves `set` and `get` of each configured service."""

    def __init__(self, context: DIDCommContext, devices: DeviceRegistry) -> None:
        self._packer = context.packer
        self._devices = devices

    def handlers(self) -> Iterator[tuple[str, AccountRequestHandler]]:
        """Type URI and handler of each request."""
        for service in self._devices.services:
            protocol = PUSH_PROTOCOLS[service]
            yield protocol.type("set"), partial(self._set, service, protocol)
            yield protocol.type("get"), partial(self._get, service, protocol)

    async def _set(
        self, service: ServiceName, protocol: PushProtocol, request: MessageRequest, account: Account
    ) -> OutgoingMessage:
        """
        `ack`, once the device is registered, or, with null values, all devices of the service are removed.

        :raise MissingDeviceValue: some values are null, and others are not.
        :raise InvalidBody: a value is malformed.
        :raise TooManyDevices: the account has too many.
        :raise RegistrationLimitExceeded: the address has registered too much.
        """
        message = request.received.message
        device = self._devices.parse_device(service, protocol.extract_values(message.require_body()))
        if device is None:
            await self._devices.remove_devices(account.did, service)
        else:
            await self._devices.set_device(account.did, device, request.origin.peer)
        return replace(self._packer.answer(message, protocol.type("ack"), ACK_BODY), ack=(message.id,))

    async def _get(
        self, service: ServiceName, protocol: PushProtocol, request: MessageRequest, account: Account
    ) -> OutgoingMessage:
        """
        The device that was registered last. For Web Push there is an answer without any, as it has the key that a
        subscription is bound to.

        :raise DeviceNotRegistered: there is none.
        """
        devices = await self._devices.get_devices(account.did, service)
        if not devices and service != "web_push":
            raise DeviceNotRegistered
        values = format_device(devices[-1]) if devices else None
        body = protocol.make_info_body(values, self._devices.vapid_public_key)
        return self._packer.answer(request.received.message, protocol.type("info"), body)
