"""Requests of a wallet over any connection: Coordinate Mediation, Pickup, Trust Ping (reference 5 to 7.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import Message, extract_attachment_json
from mediatord.wallet.didcomm_messages import AttachmentForm, UnreadableMessage, build_attachment

CoordinationVersion = Literal["2.0", "3.0"]

PICKUP = "https://didcomm.org/messagepickup/3.0"
PING = "https://didcomm.org/trust-ping/2.0"
PROBLEM_REPORT = "https://didcomm.org/report-problem/2.0/problem-report"

_COORDINATION = "https://didcomm.org/coordinate-mediation"
# By version: update and its response, query and its response, and the name of the list (reference 5.2).
_MESSAGE_NAMES = {
    "2.0": ("keylist-update", "keylist-update-response", "keylist-query", "keylist", "keys"),
    "3.0": ("recipient-update", "recipient-update-response", "recipient-query", "recipient", "dids"),
}


class MediatorProblem(Exception):
    """
    The mediator rejected a request.

    :param status: HTTP status; None on a socket.
    :param report: the problem report; empty if there was none.
    """

    def __init__(self, status: int | None, report: Mapping[str, Any] | None = None) -> None:
        self.status = status
        self.report = dict(report or {})
        super().__init__(f"{status or 'socket'} {self.code} {self.comment}".strip())

    @property
    def code(self) -> str:
        """The problem code."""
        return self._text("code")

    @property
    def comment(self) -> str:
        """The human-readable text."""
        return self._text("comment")

    @property
    def pthid(self) -> str | None:
        """The thread that the problem is about."""
        pthid = self.report.get("pthid")
        return pthid if isinstance(pthid, str) else None

    def _text(self, name: str) -> str:
        body = self.report.get("body")
        return str(body.get(name, "")) if isinstance(body, dict) else ""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """State of a queue (reference 6); times in Unix seconds."""

    message_count: int
    live_delivery: bool | None = None
    total_bytes: int | None = None
    recipient_did: str | None = None
    longest_waited_seconds: int | None = None
    oldest_received_time: int | None = None
    newest_received_time: int | None = None


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """
    A message delivered by the mediator.

    :param id: for the acknowledgement.
    :param payload: the encrypted message; compact if it was attached as JSON.
    :param form: of the attachment.
    """

    id: str
    payload: bytes = field(repr=False)
    form: AttachmentForm


class SendRequest(Protocol):
    """Sends a request and returns its response."""

    async def __call__(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message: ...


class MediationRequests:
    """
    The requests of one wallet.

    Methods raise :class:`MediatorProblem` when the mediator rejects a request, and
    :class:`~mediatord.wallet.didcomm_messages.UnreadableMessage` when its response does not pass the checks.

    :param did: the wallet's DID, the default of :meth:`register`.
    :param version: of Coordinate Mediation.
    """

    def __init__(self, ask: SendRequest, did: str, version: CoordinationVersion = "3.0") -> None:
        self._ask = ask
        self._did = did
        self.version: CoordinationVersion = version

    async def grant(self) -> tuple[str, ...]:
        """Request mediation; the routing DIDs that are granted."""
        reply = await self._ask(self._coordination("mediate-request"))
        _require_type(reply, self._coordination("mediate-grant"))
        routing_did = (reply.body or {}).get("routing_did")
        # 2.0 has a string, 3.0 a list (reference D13).
        dids = [routing_did] if self.version == "2.0" else routing_did
        if not (isinstance(dids, list) and dids and all(isinstance(did, str) for did in dids)):
            raise UnreadableMessage("a grant without a routing_did of this version")
        return tuple(dids)

    async def register(self, *dids: str, proofs: Iterable[bytes] = ()) -> list[str]:
        """
        Register recipient DIDs, by default the wallet's own; a result for each, such as `success`.

        :param proofs: of :func:`~mediatord.wallet.didcomm_messages.prove_ownership`, if the mediator requires them or
            another account has registered the DIDs.
        """
        return await self._update("add", dids or (self._did,), [build_attachment(proof) for proof in proofs])

    async def unregister(self, *dids: str) -> list[str]:
        """Unregister recipient DIDs, by default the wallet's own."""
        return await self._update("remove", dids or (self._did,))

    async def _update(
        self, action: str, dids: Iterable[str], attachments: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        update, answer, *_ = _MESSAGE_NAMES[self.version]
        entries = [{"recipient_did": did, "action": action} for did in dids]
        more = {"attachments": list(attachments)} if attachments else {}
        reply = await self._ask(self._coordination(update), {"updates": entries}, **more)
        _require_type(reply, self._coordination(answer))
        updated = (reply.body or {}).get("updated")
        if not isinstance(updated, list) or not all(isinstance(one, dict) for one in updated):
            raise UnreadableMessage("no list of results")
        results = [str(one.get("result")) for one in updated]
        echoed = [{"recipient_did": one.get("recipient_did"), "action": one.get("action")} for one in updated]
        if echoed != entries:
            raise UnreadableMessage("results of other updates")
        return results

    async def registered(self, *, limit: int | None = None, offset: int = 0) -> list[str]:
        """The registered DIDs, or a slice of them."""
        _, _, query, answer, member = _MESSAGE_NAMES[self.version]
        body = {} if limit is None else {"paginate": {"limit": limit, "offset": offset}}
        reply = await self._ask(self._coordination(query), body)
        _require_type(reply, self._coordination(answer))
        try:
            return [entry["recipient_did"] for entry in (reply.body or {})[member]]
        except (KeyError, TypeError):
            raise UnreadableMessage("no list of DIDs") from None

    async def status(self, recipient_did: str | None = None) -> QueueStatus:
        """State of the queue of one DID, or of all."""
        return read_status(await self._ask(f"{PICKUP}/status-request", _add_recipient({}, recipient_did)))

    async def fetch(self, limit: int = 10, recipient_did: str | None = None) -> list[DeliveredMessage]:
        """Fetch the oldest messages, which stay queued until they are acknowledged."""
        reply = await self._ask(f"{PICKUP}/delivery-request", _add_recipient({"limit": limit}, recipient_did))
        if reply.type.uri == f"{PICKUP}/status":
            return []
        return read_delivery(reply)

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> QueueStatus:
        """Remove messages; the state of the queue."""
        names = [one if isinstance(one, str) else one.id for one in ids]
        return read_status(await self._ask(f"{PICKUP}/messages-received", {"message_id_list": names}))

    async def ping(self) -> None:
        """Ping the mediator and wait for its response."""
        _require_type(await self._ask(f"{PING}/ping", {"response_requested": True}), f"{PING}/ping-response")

    def _coordination(self, name: str) -> str:
        return f"{_COORDINATION}/{self.version}/{name}"


def read_status(message: Message) -> QueueStatus:
    """
    Read a `status`.

    :raise UnreadableMessage: it does not conform to reference 6.
    """
    _require_type(message, f"{PICKUP}/status")
    body = message.body or {}
    numbers = (
        "message_count", "total_bytes", "longest_waited_seconds", "oldest_received_time", "newest_received_time"
    )  # fmt: skip
    known = (*numbers, "live_delivery", "recipient_did")
    for name in numbers:
        if name in body and (not isinstance(body[name], int) or isinstance(body[name], bool)):
            raise UnreadableMessage(f"{name} is no integer")
    if "message_count" not in body or not isinstance(body.get("live_delivery", False), bool):
        raise UnreadableMessage("a status without a count, or with an odd live_delivery")
    return QueueStatus(**{name: body[name] for name in known if name in body})


def read_delivery(message: Message) -> list[DeliveredMessage]:
    """
    Read a `delivery`.

    :raise UnreadableMessage: it does not conform to reference 6.2.
    """
    _require_type(message, f"{PICKUP}/delivery")
    if not message.attachments:
        raise UnreadableMessage("an empty delivery")
    try:
        texts = extract_attachment_json(message)
    except ValueError:
        raise UnreadableMessage("invalid attachments") from None
    return [read_attachment(*one) for one in zip(message.attachments, texts, strict=True)]


def read_attachment(attachment: Mapping[str, Any], text: bytes | None = None) -> DeliveredMessage:
    """
    Read an attachment of a `delivery`.

    :param text: source of its `data.json`, if known.
    :raise UnreadableMessage: no id, or not exactly one of the two forms of data.
    """
    id_, data = attachment.get("id"), attachment.get("data")
    if not isinstance(id_, str) or not isinstance(data, dict) or len(data) != 1:
        raise UnreadableMessage("an attachment without an id, or not with exactly one form of data")
    try:
        if "json" in data:
            return DeliveredMessage(id_, encoding.dumps(data["json"]) if text is None else text, "json")
        return DeliveredMessage(id_, encoding.decode_base64url(data["base64"]), "base64")
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage("an invalid attachment") from None


def _require_type(message: Message, type_: str) -> None:
    if message.type.uri != type_:
        raise UnreadableMessage("a response of another type")


def _add_recipient(body: dict[str, Any], recipient_did: str | None) -> dict[str, Any]:
    return body if recipient_did is None else {**body, "recipient_did": recipient_did}
