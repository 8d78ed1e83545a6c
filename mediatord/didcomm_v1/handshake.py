"""
Connecting with wallets of DIDComm v1: DID Exchange, Connections, Out-of-Band and DID Rotate (Aries RFC 0023, 0160,
0434, 0794).

A wallet connects with a key of its own, which becomes the DID of its account, and gets a key of the mediator for this
connection alone: libraries find a connection by the key of the peer. That key is derived from the wallet's, so a
repeated request gets the same answer. All requests that prove their key are accepted, and any number of wallets may
answer the invitation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mediatord.didcomm_v1.context import V1Context, V1Request, V1RequestHandler
from mediatord.errors import (
    InvalidBody,
    MediationNotGranted,
    MediatorError,
    MisaddressedMessage,
    SenderMismatch,
    StoreUnavailable,
)
from mediatord.identity.mediator_identity import list_services
from mediatord.protocol.didcomm_v1 import connections, did_exchange
from mediatord.protocol.didcomm_v1.did_exchange import ConnectionRequest
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, V1Answer
from mediatord.protocol.didcomm_v1.out_of_band import derive_invitation_id
from mediatord.store.interfaces.v1_connections import MAX_CONNECTION_BYTES, V1Connection

# Messages of an account that are removed at once, and attempts to remove it: forwards under way may still come.
_PURGE_SIZE = 100
_REMOVALS = 3


class Handshake:
    """
    Serves requests to connect and to disconnect, one method for each.

    :param end_pushes: have nothing more pushed to the sockets of an account.
    """

    def __init__(self, context: V1Context, end_pushes: Callable[[str], None]) -> None:
        self._context = context
        self._end_pushes = end_pushes
        self._common = context.common
        self._endpoints = [uri for _, uri in list_services(context.public_url)]
        self._invitation_id = derive_invitation_id(context.public_url)

    def handlers(self) -> dict[str, V1RequestHandler]:
        """Handlers by type without prefix."""
        return {
            "didexchange/1.1/request": self.exchange_dids,
            "didexchange/1.1/complete": self.ignore,
            "didexchange/1.1/problem-report": self.ignore,
            "connections/1.0/request": self.connect,
            "connections/1.0/problem-report": self.ignore,
            "out-of-band/1.1/handshake-reuse": self.reuse,
            "did-rotate/1.0/rotate": self.refuse_rotation,
            "did-rotate/1.0/hangup": self.hang_up,
        }

    async def exchange_dids(self, request: V1Request) -> V1Answer:
        """`response` with the mediator's DID for this connection."""
        sender = await self._admit(request)
        wanted = did_exchange.parse_request(request.message)
        await self._store(request, wanted, sender)
        identity = self._context.identity()
        return did_exchange.make_response(
            wanted,
            identity.connection_key(sender),
            identity.invitation_key,
            self._endpoints,
            request.message.id,
            request.message.pthid or self._invitation_id,
        )

    async def connect(self, request: V1Request) -> V1Answer:
        """`response` of Connections 1.0, likewise."""
        sender = await self._admit(request)
        message = request.message
        await self._store(request, connections.parse_request(message), sender)
        identity = self._context.identity()
        return connections.make_response(
            identity.connection_key(sender),
            identity.invitation_key,
            self._endpoints,
            message.type.prefix or DIDCOMM_ORG,
            message.id,
            message.pthid,
            self._common.clock.seconds(),
        )

    async def reuse(self, request: V1Request) -> V1Answer:
        """`handshake-reuse-accepted`: the wallet is connected already."""
        _require_connection(request)
        version = f"1.{min(request.message.type.minor, 1)}"
        return V1Answer(f"out-of-band/{version}/handshake-reuse-accepted", pthid=request.message.pthid)

    async def ignore(self, request: V1Request) -> None:
        """
        `complete` and reports need no answer: whatever uses the key of a connection completes it, and one that is
        abandoned expires.
        """
        _require_connection(request)

    async def refuse_rotation(self, request: V1Request) -> V1Answer:
        """A `problem-report`: the account is bound to the wallet's key."""
        _require_connection(request)
        description = {
            "en": "The mediator knows an account by its key; connect again to use another one",
            "code": "e.did.method_unsupported",
        }
        members = {"problem-code": description["code"], "description": description}
        return V1Answer("did-rotate/1.0/problem-report", members)

    async def hang_up(self, request: V1Request) -> None:
        """
        Remove the connection, and the account with what it has registered and what is queued for it.

        The connection goes last, so that the wallet can repeat this if it fails.

        :raise StoreUnavailable: likewise if messages keep coming.
        """
        account = _require_connection(request).account
        administration = self._common.store.administration
        # First what is registered, so that nothing more comes.
        await administration.unregister_recipients(account)
        self._end_pushes(account)
        for _ in range(_REMOVALS):
            for did in await administration.list_queued_dids(account):
                await self._purge(did, account)
            if await administration.remove_account(account):
                return
            if await self._common.store.get_account(account) is None:
                await self._context.connections.remove_connection(account)
                return
        raise StoreUnavailable

    async def _admit(self, request: V1Request) -> str:
        """
        Charge an address for a request to connect; the authenticated key of the wallet.

        :raise MisaddressedMessage: the request was not encrypted to the key of the invitation.
        :raise MediationNotGranted: the key is denied.
        :raise RateLimitExceeded: the address is over its limit.
        """
        received = request.received
        if received.sender is None or received.own_key != self._context.identity().invitation_key.did_key:
            raise MisaddressedMessage
        if self._common.access.denies(received.sender):
            self._common.recorder.record_denial(received.sender, "policy", "didcomm_v1")
            raise MediationNotGranted
        await self._common.rate_limiter.charge_connection(request.origin.peer)
        return received.sender

    async def _store(self, request: V1Request, wanted: ConnectionRequest, sender: str) -> V1Connection:
        """
        Store a new connection, or what has changed in an existing one, and charge the address for its size.

        :raise SenderMismatch: the key of the wallet is none of its document.
        :raise InvalidBody: endpoint and routing keys are too long.
        :raise RegistrationLimitExceeded: the address is over its daily limit.
        :raise RegistrationCapacityExceeded: there are too many connections.
        """
        if sender not in wanted.document.keys:
            raise SenderMismatch
        former = await self._context.connections.get_connection(sender)
        connection = self._make_connection(request, wanted, sender, former)
        if _measure(connection) > MAX_CONNECTION_BYTES:
            raise InvalidBody
        size = max(_measure(connection) - (0 if former is None else _measure(former)), 0)
        quota, peer = self._common.registrations, request.origin.peer
        await quota.charge(peer, size)
        try:
            return await self._context.connections.put_connection(connection, max_pending=self._context.max_pending)
        except MediatorError:
            quota.refund(peer, size)
            raise

    def _make_connection(
        self, request: V1Request, wanted: ConnectionRequest, sender: str, former: V1Connection | None
    ) -> V1Connection:
        message, own_key = request.message, self._context.identity().connection_key(sender).did_key
        if former is None:
            former = V1Connection(sender, own_key, "", has_base58_keys=wanted.form == "nym")
        return replace(
            former,
            own_key=own_key,
            request_id=message.id,
            endpoint=wanted.document.endpoint,
            routing_keys=wanted.document.routing_keys,
        )

    async def _purge(self, did: str, account: str) -> None:
        """Remove what is queued for a DID of an account, in steps, as a queue may be long."""
        administration, after = self._common.store.administration, ""
        while True:
            page = await administration.list_entries(did, "didcomm", after, _PURGE_SIZE)
            ids = [entry.id for entry in page.entries if entry.account == account]
            if ids:
                for removed in await administration.purge(did, "didcomm", ids):
                    self._common.recorder.record_purge(removed, "didcomm")
            if page.after is None:
                return
            after = page.after


def _require_connection(request: V1Request) -> V1Connection:
    """:raise MisaddressedMessage: the message was encrypted to the key of the invitation."""
    if request.received.connection is None:
        raise MisaddressedMessage
    return request.received.connection


def _measure(connection: V1Connection) -> int:
    """Bytes of the text that a wallet has chosen, and of its keys."""
    texts = (
        connection.account,
        connection.own_key,
        connection.request_id,
        connection.endpoint or "",
        *connection.routing_keys,
    )
    return sum(map(len, texts))
