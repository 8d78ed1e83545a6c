"""Connections with wallets that speak DIDComm v1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Interface

# How a wallet takes mail on a socket: by Message Pickup, as bare envelopes, or not known yet.
ImplicitPickup = Literal["unknown", "delivery", "raw"]
# Pending connections that a new one replaces at most: more than one only after the limit was lowered or exceeded.
MAX_REPLACED_CONNECTIONS = 8
# Bytes of the text of one connection at most.
MAX_CONNECTION_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class V1Connection:
    """
    What is known of a wallet that has connected. Keys are named as did:key without fragment.

    :param account: key of the wallet, which is also the DID of its account once it has one.
    :param own_key: key of the mediator for this connection.
    :param request_id: id of the request that made it, which the response and later reports name as their thread.
    :param endpoint: http(s) URL that messages to the wallet are posted to; None if it has none.
    :param routing_keys: for which these are wrapped, the last one outermost.
    :param has_base58_keys: whether the wallet spells keys in base58, and is answered in it.
    :param implicit_pickup: how it takes mail on a socket.
    :param created_at: set by the store.
    """

    account: str
    own_key: str
    request_id: str
    endpoint: str | None = field(default=None, repr=False)
    routing_keys: tuple[str, ...] = ()
    has_base58_keys: bool = False
    implicit_pickup: ImplicitPickup = "unknown"
    created_at: float = 0.0


class IV1ConnectionStore(Interface):
    """Connections, one for each wallet. Every Deferred may fail with StoreUnavailable; then nothing was stored."""

    def put_connection(connection: V1Connection, *, max_pending: int) -> Deferred[V1Connection]:
        """
        Insert the connection, or replace the one of the same account; as it is stored. What `change_connection`
        changes is left as it is, and so is `created_at`.

        :param max_pending: connections without an account at most; a further one replaces the oldest.
        """

    def change_connection(
        account: str, *, has_base58_keys: bool | None = None, implicit_pickup: ImplicitPickup | None = None
    ) -> Deferred[bool]:
        """Change what is given of a connection, and nothing else; whether there is one."""

    def find_connection(own_key: str) -> Deferred[V1Connection | None]:
        """
        The connection of one of the mediator's keys. Called for every message of an account; it may be seconds old
        where several processes share the store.
        """

    def get_connection(account: str) -> Deferred[V1Connection | None]:
        """The connection of an account, or of the key of a wallet that has none yet."""

    def remove_connection(account: str) -> Deferred[bool]:
        """
        Remove a connection; whether there was one. An account is removed together with its connection, and so is the
        connection of a DID that an account is moved away from.
        """

    def expire_connections(created_before: float, limit: int) -> Deferred[int]:
        """Remove at most `limit` connections without an account that are older, the oldest first; their number."""

    def count_connections() -> Deferred[tuple[int, int]]:
        """Number of connections with an account, and without one."""

    def scan_connections(after: str, limit: int) -> Deferred[Sequence[V1Connection]]:
        """Connections in order of their accounts, from behind one; for exports."""
