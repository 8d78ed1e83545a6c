"""
JSON bodies of requests and responses between nodes.

Request: `{"protocol": 1, "hints": {"messages": [ids], "events": [ids], "contracts": [DIDs]}}`. Response:
`{"protocol": 1, "pushed": {...}}` with those that a socket took. Nodes of different versions run side by side: both
sides ignore unknown members and kinds, and a higher protocol number means nothing. The response to an unknown kind is
that none of it was pushed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from mediatord.protocol import encoding

PROTOCOL_VERSION = 1
NOTIFICATIONS_PATH = "/cluster/hints"
PROBE_PATH = "/cluster/probe"
MAX_BODY_BYTES = 65_536
# Notifications in one request.
MAX_NOTIFICATIONS = 1000
# Bytes of a body beside the names.
ENVELOPE_BYTES = 256

NotificationKind = Literal["messages", "events", "contracts"]
NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
NotificationNames = dict[NotificationKind, list[str]]


@dataclass(frozen=True, slots=True)
class PeerNotification:
    """
    Notice to a node with sockets of a DID: an item was stored, or the DID's contracts have changed.

    :param kind: DIDComm messages, pending Decentrl events, or changed contracts.
    :param name: id of the message or event, or the DID.
    :param did: the recipient, whose notifications arrive in order.
    :param payload_bytes: size of what the other node will read from the store.
    """

    kind: NotificationKind
    name: str
    did: str = field(default="", compare=False)
    payload_bytes: int = field(default=0, compare=False)

    @property
    def size(self) -> int:
        """Bytes in a body."""
        return len(encoding.dumps(self.name)) + 1


def encode_notifications(notifications: Iterable[PeerNotification]) -> bytes:
    """Encode the body of a request."""
    return _encode("hints", [(notification.kind, notification.name) for notification in notifications])


def decode_notifications(body: bytes) -> NotificationNames:
    """
    Decode the body of a request.

    :raise ValueError: it is malformed.
    """
    return _decode("hints", body)


def encode_push_result(pushed: NotificationNames) -> bytes:
    """Encode the body of a response."""
    return _encode("pushed", [(kind, name) for kind, names in pushed.items() for name in names])


def decode_push_result(body: bytes) -> frozenset[tuple[NotificationKind, str]]:
    """
    Decode the body of a response into kind and name of what was pushed.

    :raise ValueError: it is malformed.
    """
    return frozenset([(kind, name) for kind, names in _decode("pushed", body).items() for name in names])


def _encode(member: str, items: Iterable[tuple[NotificationKind, str]]) -> bytes:
    grouped: NotificationNames = {}
    for kind, name in items:
        grouped.setdefault(kind, []).append(name)
    return encoding.dumps({"protocol": PROTOCOL_VERSION, member: grouped})


def _decode(member: str, body: bytes) -> NotificationNames:
    groups = encoding.loads_object(body).get(member)
    if not isinstance(groups, dict):
        raise ValueError(f"no {member}")
    found: NotificationNames = {}
    count = 0
    for kind in NOTIFICATION_KINDS:
        listed = groups.get(kind)
        names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        found[kind] = list(dict.fromkeys(names))
        count += len(found[kind])
    if count > MAX_NOTIFICATIONS:
        raise ValueError(f"too many {member}")
    return found
