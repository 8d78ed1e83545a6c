"""Opening and packing of DIDComm v1 messages, and their replies."""

from __future__ import annotations

from collections.abc import Callable

from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm_v1.context import ReceivedV1Message, V1Request
from mediatord.errors import DecryptionError, MediatorError, UnknownRecipient
from mediatord.identity.v1_identity import V1Identity
from mediatord.protocol.didcomm_v1 import envelope as v1_envelope
from mediatord.protocol.didcomm_v1.envelope import ENVELOPE_MEDIA_TYPE, Envelope, Recipient
from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.protocol.didcomm_v1.message import (
    DIDCOMM_ORG,
    HANDSHAKE_REQUESTS,
    V1Answer,
    V1Message,
    parse_message,
    serialize_answer,
)
from mediatord.protocol.didcomm_v1.problem_report import (
    find_report_family,
    make_handshake_report,
    make_problem_report,
)
from mediatord.protocol.error_codes import DIDCommErrorCode, get_didcomm_error_code
from mediatord.ratelimit.admission import RequestReply
from mediatord.runtime.request_time import measure_time
from mediatord.store.interfaces.v1_connections import IV1ConnectionStore, V1Connection

# RFC 0044, and what libraries sent before.
OLD_MEDIA_TYPE = "application/ssi-agent-wire"
# Recipients of an envelope that are looked up: a request to the mediator has one.
_MAX_LOOKUPS = 3
# Senders and their mediators know this one from others (ACA-Py tries again, and no wallet cares).
_STATUS: dict[type[MediatorError], int] = {UnknownRecipient: 404}

_open_envelope = measure_time(v1_envelope.open_envelope)
_pack = measure_time(v1_envelope.pack_authcrypt)


class V1Unpacker:
    """Opens envelopes addressed to the mediator."""

    def __init__(self, identity: Callable[[], V1Identity], connections: IV1ConnectionStore) -> None:
        self._identity = identity
        self._connections = connections

    async def open(self, envelope: Envelope) -> ReceivedV1Message:
        """
        Open an envelope.

        :raise DecryptionError: any failure that depends on keys or ciphertext.
        :raise InvalidPlaintext: there is no message inside.
        :raise StoreUnavailable: connections cannot be read.
        """
        recipient, key, connection = await self._find_recipient(envelope)
        opened = _open_envelope(envelope, recipient, key)
        return ReceivedV1Message(
            message=parse_message(opened.plaintext),
            own_key=recipient.key,
            # Other recipients know the key of the content, too, and could have written it.
            sender=opened.sender if len(envelope.recipients) == 1 else None,
            connection=connection,
            digest=envelope.digest,
        )

    def owns(self, key: str) -> bool:
        """Whether a key is that of the invitation or of routing."""
        return self._identity().find_constant_key(key) is not None

    async def _find_recipient(self, envelope: Envelope) -> tuple[Recipient, SigningKey, V1Connection | None]:
        for recipient in envelope.recipients:
            if (key := self._identity().find_constant_key(recipient.key)) is not None:
                return recipient, key, None
        for recipient in envelope.recipients[:_MAX_LOOKUPS]:
            connection = await self._connections.find_connection(recipient.key)
            if connection is not None:
                return recipient, self._identity().connection_key(connection.account), connection
        raise DecryptionError


class V1Packer:
    """
    Packs replies, with the key that the request was encrypted to.

    :param new_id: source of message ids.
    """

    def __init__(self, identity: Callable[[], V1Identity], new_id: Callable[[], str]) -> None:
        self._identity = identity
        self.new_id = new_id

    def pack(self, answer: V1Answer, received: ReceivedV1Message) -> bytes:
        """
        The packed answer to a message of an authenticated sender.

        :raise DecryptionError: there is none.
        """
        if received.sender is None:
            raise DecryptionError
        message = received.message
        plaintext = serialize_answer(answer, self.new_id(), message.type.prefix or DIDCOMM_ORG, message.thread)
        return _pack(plaintext, received.sender, self._find_key(received))

    def pack_to(self, answer: V1Answer, wallet_key: str, prefix: str) -> bytes:
        """A packed message that answers no other. :param wallet_key: of a connection."""
        plaintext = serialize_answer(answer, self.new_id(), prefix, None)
        return _pack(plaintext, wallet_key, self._identity().connection_key(wallet_key))

    def refuse(self, error: MediatorError, received: ReceivedV1Message | None, origin: MessageOrigin) -> RequestReply:
        """
        The reply for an error: a packed problem report to a wallet that has connected and takes one here, else no
        body, as wallets take nothing but envelopes.
        """
        wire, fault = get_didcomm_error_code(error), type(error)
        retry_after = wire.retry_after if error.retry_after is None else int(error.retry_after)
        status = _STATUS.get(fault, wire.status)
        if received is not None and self._takes_handshake_report(wire, received):
            report = make_handshake_report(error, received.message.type, received.message.id)
            # ACA-Py would repeat a request for any other status.
            status = 200 if wire.retry_after is None else wire.status
            return RequestReply(status, self.pack(report, received), choose_media_type(origin), retry_after, fault)
        if received is None or wire.encrypted_status is None or not takes_report(received):
            return RequestReply(status, b"", "", retry_after, fault)
        message = received.message
        packed = self.pack(make_problem_report(error, message.id, find_report_family(message.type)), received)
        return RequestReply(wire.encrypted_status, packed, choose_media_type(origin), retry_after, fault)

    def _takes_handshake_report(self, wire: DIDCommErrorCode, received: ReceivedV1Message) -> bool:
        """
        Whether a refusal is reported to a wallet that wants to connect, and proves its key; not one over a limit, to
        save the work.
        """
        message = received.message
        if received.own_key != self._identity().invitation_key.did_key or received.sender is None:
            return False
        is_reported = wire.retry_after is None or wire.encrypted_status is not None
        return is_reported and message.type.key in HANDSHAKE_REQUESTS and takes_reply(message)

    def _find_key(self, received: ReceivedV1Message) -> SigningKey:
        identity = self._identity()
        if received.connection is not None:
            return identity.connection_key(received.connection.account)
        return identity.routing_key if received.own_key == identity.routing_key.did_key else identity.invitation_key


def choose_media_type(origin: MessageOrigin) -> str:
    """The media type of a reply: that of the request, if it is one of the two that are read everywhere."""
    return OLD_MEDIA_TYPE if OLD_MEDIA_TYPE.encode("ascii") in origin.content_type.lower() else ENVELOPE_MEDIA_TYPE


def takes_reply(message: V1Message) -> bool:
    """Whether a message asks for its reply on the connection that it came on (RFC 0092)."""
    if message.return_route == "thread":
        return message.return_route_thread in (None, message.thread)
    return message.return_route == "all"


def takes_report(received: ReceivedV1Message) -> bool:
    """Whether a refusal is reported: to the wallet of a connection, and never about a report."""
    connection, message = received.connection, received.message
    is_known = connection is not None and received.sender == connection.account
    return is_known and takes_reply(message) and message.type.name != "problem-report"


def make_reply(request: V1Request, packed: bytes) -> RequestReply:
    """The reply to a request on the connection that it came on."""
    return RequestReply(200, packed, choose_media_type(request.origin))
