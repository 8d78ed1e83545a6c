"""Base58 with the Bitcoin alphabet (base58btc), as multibase `z` values have it (reference 8.2)."""

from __future__ import annotations

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {character: value for value, character in enumerate(_ALPHABET)}
# Ten digits fit in a machine word: long values (did:peer:4 documents) are worked on in pieces of that size.
_PIECE = 10
_PIECE_BASE = 58**_PIECE


def encode(data: bytes) -> str:
    """The digits; each leading zero byte is a leading `1`."""
    rest = int.from_bytes(data, "big")
    pieces = []
    while rest:
        rest, piece = divmod(rest, _PIECE_BASE)
        pieces.append(_digits(piece))
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(pieces)).lstrip("1")


def _digits(piece: int) -> str:
    digits = []
    for _ in range(_PIECE):
        piece, digit = divmod(piece, 58)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def decode(text: str) -> bytes:
    """
    The bytes. The work grows with the square of the length, so bound it first (8192 characters take a millisecond).

    :raise ValueError: a character outside the alphabet.
    """
    digits = text.lstrip("1")
    number = 0
    try:
        for start in range(0, len(digits), _PIECE):
            piece = 0
            part = digits[start : start + _PIECE]
            for character in part:
                piece = piece * 58 + _DIGITS[character]
            number = number * 58 ** len(part) + piece
    except KeyError:
        raise ValueError("not base58") from None
    return bytes(len(text) - len(digits)) + number.to_bytes((number.bit_length() + 7) // 8, "big")
