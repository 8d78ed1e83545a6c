"""WebSocket frames as bytes: those written here, and the common form of those received (RFC 6455 section 5)."""

from __future__ import annotations

from typing import NamedTuple

from autobahn.websocket import USES_NVX
from autobahn.websocket.xormasker import create_xor_masker  # type: ignore[attr-defined]  # chosen at run time

TEXT_FRAME, BINARY_FRAME, PONG_FRAME = 0x81, 0x82, 0x8A
PING_FRAME = b"\x89\x04ping"

_MASK_BIT = 0x80
_EXTENDED_LENGTH = 126
# Up to this size XOR of integers is faster than Autobahn's native code; without native code it always is.
_MAX_INTEGER_XOR = 768 if USES_NVX else 1 << 62


class FrameBounds(NamedTuple):
    """
    Position of a frame in a buffer.

    :param kind: its first byte, one of those above.
    :param begin: start of its payload, right behind the mask.
    :param end: end of its payload.
    """

    kind: int
    begin: int
    end: int


def find_simple_frame(data: bytes, at: int, max_payload: int) -> FrameBounds | None:
    """
    The frame at `at`, if it is complete and plain: final, masked, without extensions, its length in the shortest form
    of at most 16 bits, and a text, binary or pong frame. None for all others, invalid ones included.

    :param max_payload: bytes.
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
    return FrameBounds(kind, begin, end) if end <= len(data) and length <= max_payload else None


def unmask_payload(data: bytes, frame: FrameBounds) -> bytes:
    """The payload of a frame without the mask."""
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
