"""
Push Notifications of DIDComm: FCM (Aries RFC 0734), APNs (Aries RFC 0699), and Web Push, for which there is no
published protocol (docs/reference/protocols.md, "Push notifications"); type URIs and bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mediatord.errors import InvalidBody

PushServiceName = Literal["fcm", "apns", "web_push"]
NOTIFICATION_SENDER = "notification-sender"


@dataclass(frozen=True, slots=True)
class PushProtocol:
    """
    One protocol of registration.

    :param uri: of the protocol and its version.
    :param subject: what is registered, in names of messages.
    :param member: of bodies, in which the values are; None if they are members of the body itself.
    """

    uri: str
    subject: str
    member: str | None = None

    def type(self, name: Literal["set", "get", "info", "ack"]) -> str:
        """Type URI of a request, of the answer to `get`, or of the answer to `set`."""
        if name == "ack":
            return f"{self.uri}/ack"
        return f"{self.uri}/{self.subject}" if name == "info" else f"{self.uri}/{name}-{self.subject}"

    def extract_values(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """
        The values of a `set`; none if they are null.

        :raise InvalidBody: they are no object.
        """
        values = body if self.member is None else body.get(self.member)
        if values is None:
            return {}
        if not isinstance(values, Mapping):
            raise InvalidBody
        return values

    def make_info_body(self, values: Mapping[str, Any] | None, vapid_public_key: str | None) -> dict[str, Any]:
        """
        Body of the answer to a `get`.

        :param values: of the device; None, only for Web Push, if there is none.
        :param vapid_public_key: only for Web Push.
        """
        if self.member is None:
            return dict(values or {})
        return {self.member: values, "vapid_public_key": vapid_public_key}


PUSH_PROTOCOLS: dict[PushServiceName, PushProtocol] = {
    "fcm": PushProtocol("https://didcomm.org/push-notifications-fcm/1.0", "device-info"),
    "apns": PushProtocol("https://didcomm.org/push-notifications-apns/1.0", "device-info"),
    "web_push": PushProtocol("urn:mediatord:web-push/1.0", "subscription", "subscription"),
}
# Body of the `ack` (Aries RFC 0015), which the protocols adopt under their own URI.
ACK_BODY = {"status": "OK"}
