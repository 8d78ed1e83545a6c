"""
What nodes say to each other, as JSON.

Request: `{"protocol": 1, "hints": {"messages": [ids], "events": [ids], "contracts": [DIDs]}}`. Response:
`{"protocol": 1, "pushed": {...}}`, which has those of them that a socket took. Nodes of different versions run side
by side: members and kinds that are not known are passed over, on both sides, and nothing follows from a higher
protocol number. A kind that the other side does not know is a kind of which nothing was pushed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mediatord.protocol import encoding

PROTOCOL_VERSION = 1
NOTIFICATIONS_PATH = "/cluster/hints"
PROBE_PATH = "/cluster/probe"
MAX_BODY_BYTES = 65_536
# So many hints are read from one request at most.
MAX_NOTIFICATIONS = 1000
# What a body has beside its names.
ENVELOPE_BYTES = 256

NotificationKind = Literal["messages", "events", "contracts"]
NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
NotificationNames = dict[NotificationKind, list[str]]


@dataclass(frozen=True, slots=True)
class PeerNotification:
    """
    Something that the node which holds sockets of a DID should know.

    :param kind: a DIDComm message, a pending event of Decentrl, or that the contracts of a DID have changed.
    :param name: id of the message or event, or the DID.
    :param lane: the DID; hints of one lane arrive in order.
    :param weight: bytes that the other node will read from the store for it.
    """

    kind: NotificationKind
    name: str
    did: str = field(default="", compare=False)
    payload_bytes: int = field(default=0, compare=False)

    @property
    def size(self) -> int:
        """Bytes that it takes in a body."""
        return len(encoding.dumps(self.name)) + 1


def encode_notifications(notifications: Iterable[PeerNotification]) -> bytes:
    """The body of a request."""
    return _encode("hints", [(notification.kind, notification.name) for notification in notifications])


def decode_notifications(body: bytes) -> NotificationNames:
    """
    What a request hints at.

    :raise ValueError: it is no request.
    """
    return _decode("hints", body)


def encode_push_result(pushed: NotificationNames) -> bytes:
    """The body of a response."""
    return _encode("pushed", [(kind, name) for kind, names in pushed.items() for name in names])


def decode_push_result(body: bytes) -> frozenset[tuple[NotificationKind, str]]:
    """
    What was pushed, as pairs of kind and name.

    :raise ValueError: it is no response.
    """
    return frozenset((kind, name) for kind, names in _decode("pushed", body).items() for name in names)


def _encode(member: str, items: Iterable[tuple[NotificationKind, str]]) -> bytes:
    grouped: NotificationNames = {}
    for kind, name in items:
        grouped.setdefault(kind, []).append(name)
    return encoding.dumps({"protocol": PROTOCOL_VERSION, member: grouped})


def _decode(member: str, body: bytes) -> NotificationNames:
    groups = encoding.loads_object(body).get(member)
    if not isinstance(groups, dict):
        raise ValueError(f"no {member}")
    found: NotificationNames = {kind: _decode_names(groups.get(kind)) for kind in NOTIFICATION_KINDS}
    if sum(map(len, found.values())) > MAX_NOTIFICATIONS:
        raise ValueError(f"too many {member}")
    return found


def _decode_names(listed: Any) -> list[str]:
    """The names in a list; what a newer version may have put there instead is passed over."""
    names = listed if isinstance(listed, list) else []
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))
