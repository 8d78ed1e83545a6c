"""Collaborators and settings of all DIDComm use cases, and the request that they serve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twisted.internet.interfaces import IReactorTime

from mediatord.delivery.connections import ConnectionManager
from mediatord.didcomm.messages import MessageOrigin, MessagePacker, MessageUnpacker, PushRecipient, UnpackedMessage
from mediatord.observability.event_recorder import EventRecorder, RequestRecord
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.protocol.didcomm.message_pickup import AttachmentFormat
from mediatord.push.registry import DeviceRegistry
from mediatord.ratelimit.rate_limiter import RateLimiter
from mediatord.ratelimit.registration import AccessList, RegistrationQuota
from mediatord.store.interfaces.store import Account, IStore


@dataclass(frozen=True, slots=True)
class DIDCommContext:
    """
    Collaborators and settings of all DIDComm use cases.

    :param access: whom mediation is granted to, and whose authenticated messages are refused.
    :param own_dids: canonical forms of the mediator's DIDs, current and former.
    :param owns: whether a DID is one of the mediator's, in any form.
    :param owns_v1_key: whether a did:key is that of the invitation or of routing of DIDComm v1.
    :param routing_did: returns the DID to grant to a client that addressed the mediator by the given one.
    :param new_stored_id: id of a stored message for a time: unique, URI-safe.
    :param ttl: seconds that a message may be queued.
    :param max_delay: longest `delay_milli` that is honoured, in seconds.
    :param routing_keys: by recipient DID: keys to wrap payloads for before delivery, configured by the operator.
    :param rewrap: whether every payload is wrapped in a new forward to its recipient.
    :param registered_senders_only: refuse forwards without an authenticated sender that has an account.
    :param encrypted_only: refuse payloads that do not look like an envelope.
    :param max_payload: bytes of one payload; a queue that is smaller could not keep it.
    :param max_recipients: recipient DIDs of one account.
    :param with_proof: whether a DID other than the account's own is added only with a proof of ownership.
    :param delivery_limit: messages in one `delivery` at most.
    :param delivery_form: form of the attachments in a `delivery`.
    :param push_mode: `delivery` pushes a pickup message, `raw` the payload itself.
    :param live_by_default: whether a socket is live as soon as an account authenticates on it.
    :param push_timeout: seconds after which an unacknowledged push is pending again.
    :param node: boot id of this node, which marks contain; empty for a single node.
    :param devices: None if no push service is configured.
    :param wake: called with the account of a pushed message that is pending again; None without push notifications.
    :param note_poll: called with each account that is about to be shown the state of its queue; None without push
        notifications.
    """

    clock: IReactorTime
    store: IStore
    recorder: EventRecorder
    connections: ConnectionManager[PushRecipient]
    rate_limiter: RateLimiter
    registrations: RegistrationQuota
    access: AccessList
    unpacker: MessageUnpacker
    packer: MessagePacker
    own_dids: Collection[str]
    owns: Callable[[str], bool]
    owns_v1_key: Callable[[str], bool]
    routing_did: Callable[[str], str]
    new_stored_id: Callable[[float], str]
    ttl: float
    max_delay: float
    routing_keys: Mapping[str, Sequence[str]]
    rewrap: bool
    registered_senders_only: bool
    encrypted_only: bool
    max_payload: int
    max_recipients: int
    with_proof: bool
    delivery_limit: int
    delivery_form: AttachmentFormat
    push_mode: Literal["delivery", "raw"]
    live_by_default: bool
    push_timeout: float
    node: str
    devices: DeviceRegistry | None = None
    wake: Callable[[str], None] | None = None
    note_poll: Callable[[str], None] | None = None


@dataclass(slots=True)
class MessageRequest:
    """
    An opened message that is being served.

    :param cost: of reading it.
    :param account: of its sender; None if it has none, or is denied.
    """

    received: UnpackedMessage
    origin: MessageOrigin
    record: RequestRecord
    cost: int
    account: Account | None


# Serves a request of an enrolled account.
AccountRequestHandler = Callable[[MessageRequest, Account], Coroutine[Any, Any, OutgoingMessage | None]]
