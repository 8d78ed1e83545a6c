"""Which way an answer goes: back on the connection, to the sender's own endpoint, or nowhere (reference 3.3)."""

from __future__ import annotations

from typing import Literal

from mediatord.didcomm.endpoints import EndpointDelivery, Targets
from mediatord.didcomm.exchange import ACCEPTED, Correspondent, Origin, Reply
from mediatord.didcomm.packing import Packing
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, Draft, Message

Way = Literal["connection", "endpoint", "nowhere"]


class Replying:
    """Sends answers the way that `return_route` and the sender's document ask for."""

    def __init__(self, packing: Packing, targets: Targets, delivery: EndpointDelivery) -> None:
        self._packing = packing
        self._targets = targets
        self._delivery = delivery

    async def send(self, draft: Draft, to: Message, correspondent: Correspondent, origin: Origin) -> Reply:
        """What goes back on the connection; an answer that goes elsewhere is on its way when this is done."""
        way = self._way(to, correspondent, origin)
        if way == "nowhere":
            return ACCEPTED
        packed = self._packing.pack(draft, correspondent)
        if way == "connection":
            return Reply(200, packed, ENCRYPTED_TYPE)
        self._delivery.reply(correspondent.document, packed, origin.peer)
        return ACCEPTED

    def goes_nowhere(self, to: Message, correspondent: Correspondent, origin: Origin) -> bool:
        """Whether nobody would get an answer, so that there is no need to make one."""
        return self._way(to, correspondent, origin) == "nowhere"

    def _way(self, to: Message, correspondent: Correspondent, origin: Origin) -> Way:
        route = (to.return_route or "").lower()
        if route == "thread" and to.return_route_thread not in (None, to.thread):
            route = "none"
        if route in ("all", "thread"):
            return "connection"
        has_endpoint = bool(self._targets.of_document(correspondent.document)) and self._delivery.can_reply(
            origin.peer
        )
        if route == "none":
            return "endpoint" if has_endpoint else "nowhere"
        if origin.session is not None or not has_endpoint:
            return "connection"
        return "endpoint"
