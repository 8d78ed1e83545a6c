"""Collaborators and settings of all DIDComm v1 use cases, and the request that they serve."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from mediatord.didcomm.context import DIDCommContext
from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm.pickup import LiveDelivery
from mediatord.identity.v1_identity import V1Identity
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.didcomm_v1.keys import KeySpelling
from mediatord.protocol.didcomm_v1.message import V1Answer, V1Message
from mediatord.store.interfaces.store import Account
from mediatord.store.interfaces.v1_connections import IV1ConnectionStore, V1Connection


class V1Endpoints(Protocol):
    """Posts to wallets that have an endpoint of their own."""

    def can_reply(self, connection: V1Connection, peer: str) -> bool:
        """Whether the wallet has an endpoint, and one more reply may be posted for this rate limit key."""

    def reply(self, connection: V1Connection, packed: bytes, peer: str) -> None:
        """Begin to post a packed reply; one attempt, never queued."""

    def resume(self, connection: V1Connection) -> None:
        """The wallet has shown itself: deliver what is still queued for it, if it has an endpoint."""


@dataclass(frozen=True, slots=True)
class V1Context:
    """
    Collaborators and settings of all DIDComm v1 use cases.

    :param common: those that are the same for both versions: store, rate limits, access list, event recorder.
    :param live: delivery to sockets, of both versions.
    :param connections: what is known of wallets that have connected.
    :param identity: returns the mediator's keys of v1.
    :param public_url: root of all public addresses, without trailing slash.
    :param max_pending: connections without an account at most.
    """

    common: DIDCommContext
    live: LiveDelivery
    connections: IV1ConnectionStore
    identity: Callable[[], V1Identity]
    public_url: str
    max_pending: int


@dataclass(frozen=True, slots=True)
class ReceivedV1Message:
    """
    An opened message and what its envelope proves.

    :param own_key: the mediator's key that opened it.
    :param sender: key of the authenticated sender; None for anoncrypt, and for an envelope to several recipients.
    :param connection: that `own_key` belongs to; None for the invitation and the routing key.
    :param digest: for replay protection.
    """

    message: V1Message
    own_key: str
    sender: str | None
    connection: V1Connection | None
    digest: bytes = field(repr=False)


@dataclass(slots=True)
class V1Request:
    """
    An opened message that is being served.

    :param cost: of reading it.
    :param account: of its sender; None if it has none, or is denied.
    """

    received: ReceivedV1Message
    origin: MessageOrigin
    record: RequestRecord
    cost: int
    account: Account | None

    @property
    def message(self) -> V1Message:
        """The message."""
        return self.received.message

    @property
    def spelling(self) -> KeySpelling:
        """How the wallet spells keys, where the message names none."""
        connection = self.received.connection
        return "base58" if connection is not None and connection.has_base58_keys else "did:key"


# Serves a request of any connected wallet.
V1RequestHandler = Callable[[V1Request], Coroutine[Any, Any, V1Answer | None]]
# Serves a request of an enrolled account.
V1AccountRequestHandler = Callable[[V1Request, Account], Coroutine[Any, Any, V1Answer | None]]
