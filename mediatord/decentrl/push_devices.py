"""
Commands about devices for push notifications, of mediatord's own (docs/reference/protocols.md, "Push notifications").

The dispatcher checks the guard before them, so that the nonce stays claimed whatever becomes of the command: one that
the store fails has to be composed anew. Devices are encrypted: to the mediator as contract requests are, and to the
sender with ephemeral keys of both, which a rotation of the mediator's keys does not concern. Each command is a
function that returns the members of its reply.
"""

from __future__ import annotations

from typing import Any

from mediatord.decentrl.context import CommandRequest, DecentrlContext, ReplyBody, decrypt_for_mediator
from mediatord.errors import InvalidBody, InvalidCommand, MediationNotGranted, UnauthorizedCommand
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import QueryPushDevices, RemovePushDevices, SetPushDevice
from mediatord.protocol.decentrl.crypto import decode_public_key, derive_shared_secret, encrypt, generate_key_pair
from mediatord.push.device_json import format_device
from mediatord.push.devices import PushDevice, ServiceName, get_service_name
from mediatord.push.registry import DeviceRegistry
from mediatord.runtime.request_time import measure_time


async def set_device(context: DecentrlContext, request: CommandRequest, payload: SetPushDevice) -> ReplyBody:
    """SET_PUSH_DEVICE."""
    devices = _require_devices(context)
    plaintext = decrypt_for_mediator(context, payload.encrypted_push_device, payload.sender_ephemeral_public_key)
    device = _parse_device(devices, plaintext)
    try:
        await devices.set_device(request.sender, device, request.record.peer)
    except MediationNotGranted:
        # Its registration has ended since the guard was checked.
        raise UnauthorizedCommand from None
    return {}


async def query(context: DecentrlContext, request: CommandRequest, payload: QueryPushDevices) -> ReplyBody:
    """QUERY_PUSH_DEVICES: devices in order of registration, and what the mediator offers."""
    devices = _require_devices(context)
    found = [
        {"service": get_service_name(device), **format_device(device)}
        for device in await devices.get_devices(request.sender)
    ]
    sealed, public = _encrypt_for_sender(encoding.dumps(found), payload.sender_ephemeral_public_key)
    reply: dict[str, Any] = {
        "services": devices.services,
        "mediator": devices.mediator_id,
        "encrypted_push_devices": sealed,
        "ephemeral_public_key": public,
    }
    if devices.vapid_public_key is not None:
        reply["vapid_public_key"] = devices.vapid_public_key
    return {"payload": reply}


async def remove(context: DecentrlContext, request: CommandRequest, payload: RemovePushDevices) -> ReplyBody:
    """REMOVE_PUSH_DEVICES: also of a service that is no longer configured."""
    await _require_devices(context).remove_devices(request.sender, payload.service)
    return {}


def _require_devices(context: DecentrlContext) -> DeviceRegistry:
    if context.devices is None:
        raise InvalidCommand
    return context.devices


def _parse_device(devices: DeviceRegistry, plaintext: bytes) -> PushDevice:
    """:raise InvalidCommand: it is no device of a configured service."""
    try:
        members = encoding.loads_object(plaintext)
        service: ServiceName | None = next(
            (name for name in devices.services if name == members.get("service")), None
        )
        device = None if service is None else devices.parse_device(service, members)
    except (ValueError, InvalidBody):
        raise InvalidCommand from None
    if device is None:
        raise InvalidCommand
    return device


@measure_time
def _encrypt_for_sender(plaintext: bytes, public_key: str) -> tuple[str, str]:
    """Ciphertext, and the ephemeral key that it is made with. :raise InvalidCommand: the sender's key is none."""
    private, public = generate_key_pair()
    try:
        secret = derive_shared_secret(private, decode_public_key(public_key))
        return encrypt(plaintext, secret), encoding.encode_base64(public)
    except ValueError:
        raise InvalidCommand from None
