"""
What Autobahn keeps of a socket, kept once for all of them.

Its protocol has about a hundred attributes: options, what it read in the handshake, room for a close that is far
away. Those of a socket at rest are alike, so they belong to the class; each socket has only what differs.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from autobahn.websocket.protocol import TrafficStats

_AT_REST: dict[str, Any] = {
    "state": WebSocketServerProtocol.STATE_OPEN,
    "send_state": WebSocketServerProtocol.SEND_STATE_GROUND,
    "connected": 1,
    "data": b"",
    "inside_message": False,
    "current_frame": None,
    "websocket_version": 13,
    "websocket_protocol_in_use": None,
    "trackTimings": False,
    "trackedTimings": None,
    "triggered": False,
    "autoPingPendingSeq": 0,
    "_perMessageCompress": None,
    "_isMessageCompressed": False,
    "utf8validateIncomingCurrentMessage": False,
    **dict.fromkeys(
        "wasMaxFramePayloadSizeExceeded wasMaxMessagePayloadSizeExceeded closedByMe failedByMe droppedByMe wasClean "
        "wasServerConnectionDropTimeout wasOpenHandshakeTimeout wasCloseHandshakeTimeout "
        "wasServingFlashSocketPolicyFile".split(),
        False,
    ),
    **dict.fromkeys(
        "wasNotCleanReason localCloseCode localCloseReason remoteCloseCode remoteCloseReason "
        "openHandshakeTimeoutCall closeHandshakeTimeoutCall autoPingTimeoutCall autoPingPending autoPingPendingCall "
        "autoPingPendingSent message_data frame_data control_frame_data".split(),
    ),
}

# Of the handshake or of the last message; what is still asked for has a stand-in in the class.
_FORGOTTEN = frozenset(
    "http_request_data http_status_line http_headers http_request_uri http_request_path http_request_params "
    "http_request_host http_response_data websocket_protocols websocket_origin websocket_extensions "
    "websocket_extensions_in_use _wskey _transport_details _valid_events _results _listeners _parent utf8validator "
    "utf8validateLast current_frame_masker message_is_binary message_data_total_length frame_length "
    "is_open is_closed peer trafficStats send_queue".split()
)


class _Nobody:
    """Takes the place of Deferreds that nobody waits for."""

    def callback(self, result: object) -> None:
        """It has happened."""


def at_rest(factory: WebSocketServerFactory) -> dict[str, Any]:
    """The attributes of a class whose sockets, once they are open, have them alike."""
    return {
        **{name: _alike(getattr(factory, name)) for name in WebSocketServerProtocol.CONFIG_ATTRS},
        # Or they would be copied to every socket, and printed for a log that is none.
        "CONFIG_ATTRS": (),
        **_AT_REST,
        "is_open": _Nobody(),
        "is_closed": _Nobody(),
        "peer": "",
        "trafficStats": TrafficStats(),
        "send_queue": (),
        "factory": factory,
    }


def _alike(value: Any) -> Any:
    """As an attribute of a class; a function would become a method."""
    return staticmethod(value) if isinstance(value, FunctionType) else value


def rest(socket: WebSocketServerProtocol) -> None:
    """Let an open socket that is in no message have of its own only what differs from its class."""
    alike = type(socket).__dict__
    own = vars(socket)
    different = {
        name: value for name, value in own.items() if name not in _FORGOTTEN and alike.get(name, alike) is not value
    }
    # A dictionary does not become smaller by itself.
    own.clear()
    own.update(different)
