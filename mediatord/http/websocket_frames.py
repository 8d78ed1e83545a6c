"""Frames of a WebSocket as bytes: those that we write, and those that nearly all clients send (RFC 6455, 5)."""

from __future__ import annotations

from typing import NamedTuple

from autobahn.websocket import USES_NVX
from autobahn.websocket.xormasker import create_xor_masker  # type: ignore[attr-defined]  # chosen at run time

TEXT_FRAME, BINARY_FRAME, PONG_FRAME = 0x81, 0x82, 0x8A
PING_FRAME = b"\x89\x04ping"

_MASK_BIT = 0x80
_EXTENDED_LENGTH = 126
# Below this a long integer is quicker than a call of Autobahn's native code; without that it always is.
_MAX_INTEGER_XOR = 768 if USES_NVX else 1 << 62


class FrameBounds(NamedTuple):
    """
    Where a frame lies in what was received.

    :param kind: its first byte, one of those above.
    :param begin: of its payload, right behind the mask.
    :param end: of its payload.
    """

    kind: int
    begin: int
    end: int


def find_simple_frame(data: bytes, at: int, most: int) -> FrameBounds | None:
    """
    The frame at a place, if it is whole and could not be plainer: final, masked, of minimal length, without
    extensions, a text, a binary or a pong. None for all others, also for those that have to be refused.

    :param most: bytes of a payload.
    """
    left = len(data) - at
    if left < 6:
        return None
    kind, length, begin = data[at], data[at + 1] - _MASK_BIT, at + 6
    if kind not in (TEXT_FRAME, BINARY_FRAME, PONG_FRAME) or length < 0:
        return None
    if length >= _EXTENDED_LENGTH:
        if length > _EXTENDED_LENGTH or left < 8 or kind == PONG_FRAME:
            return None
        length, begin = data[at + 2] << 8 | data[at + 3], at + 8
        if length < _EXTENDED_LENGTH:
            return None
    end = begin + length
    return FrameBounds(kind, begin, end) if end <= len(data) and length <= most else None


def unmask_payload(data: bytes, frame: FrameBounds) -> bytes:
    """What a client wrote, without the mask."""
    begin, end = frame.begin, frame.end
    mask, masked = data[begin - 4 : begin], data[begin:end]
    size = end - begin
    if size < _MAX_INTEGER_XOR:
        repeated = (mask * (size // 4 + 1))[:size]
        return (int.from_bytes(masked, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
    unmasked: bytes = create_xor_masker(mask, size).process(masked)
    return unmasked


def build_text_header(length: int) -> bytes:
    """The header of an unmasked, final text frame (section 5.2)."""
    if length < _EXTENDED_LENGTH:
        return bytes((TEXT_FRAME, length))
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")
