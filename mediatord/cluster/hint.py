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

from mediatord.protocol import jsontext

PROTOCOL = 1
HINTS_PATH = "/cluster/hints"
PROBE_PATH = "/cluster/probe"
MAX_BODY = 65_536
# So many hints are read from one request at most.
MAX_HINTS = 1000
# What a body has beside its names.
ENVELOPE_BYTES = 256

Kind = Literal["messages", "events", "contracts"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Names = dict[Kind, list[str]]


@dataclass(frozen=True, slots=True)
class Hint:
    """
    Something that the node which holds sockets of a DID should know.

    :param kind: a DIDComm message, a pending event of Decentrl, or that the contracts of a DID have changed.
    :param name: id of the message or event, or the DID.
    :param lane: the DID; hints of one lane arrive in order.
    :param weight: bytes that the other node will read from the store for it.
    """

    kind: Kind
    name: str
    lane: str = field(default="", compare=False)
    weight: int = field(default=0, compare=False)

    @property
    def size(self) -> int:
        """Bytes that it takes in a body."""
        return len(jsontext.dumps(self.name)) + 1


def write_hints(hints: Iterable[Hint]) -> bytes:
    """The body of a request."""
    return _write("hints", [(hint.kind, hint.name) for hint in hints])


def read_hints(body: bytes) -> Names:
    """
    What a request hints at.

    :raise ValueError: it is no request.
    """
    return _read("hints", body)


def write_pushed(pushed: Names) -> bytes:
    """The body of a response."""
    return _write("pushed", [(kind, name) for kind, names in pushed.items() for name in names])


def read_pushed(body: bytes) -> frozenset[tuple[Kind, str]]:
    """
    What was pushed, as pairs of kind and name.

    :raise ValueError: it is no response.
    """
    return frozenset((kind, name) for kind, names in _read("pushed", body).items() for name in names)


def _write(member: str, items: Iterable[tuple[Kind, str]]) -> bytes:
    grouped: Names = {}
    for kind, name in items:
        grouped.setdefault(kind, []).append(name)
    return jsontext.dumps({"protocol": PROTOCOL, member: grouped})


def _read(member: str, body: bytes) -> Names:
    groups = jsontext.loads_object(body).get(member)
    if not isinstance(groups, dict):
        raise ValueError(f"no {member}")
    found: Names = {kind: _names(groups.get(kind)) for kind in KINDS}
    if sum(map(len, found.values())) > MAX_HINTS:
        raise ValueError(f"too many {member}")
    return found


def _names(listed: Any) -> list[str]:
    """The names in a list; what a newer version may have put there instead is passed over."""
    names = listed if isinstance(listed, list) else []
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))
