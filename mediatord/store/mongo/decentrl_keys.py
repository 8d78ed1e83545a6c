"""What stands for texts of the Decentrl half in its indexes, and how long texts are."""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b

_BYTES = 16


class Kind(Enum):
    """What an event is found by."""

    ALL = b"all"
    TAG = b"tag"
    PARTICIPANT = b"participant"
    CHANNEL = b"channel"


def key_of(did: str) -> bytes:
    """What stands for a DID."""
    return blake2b(did.encode(), digest_size=_BYTES).digest()


def label_of(owner: bytes, kind: Kind, text: str = "", *, unprocessed: bool = False) -> bytes:
    """
    What stands for something that events of an owner are found by.

    :param owner: its key.
    :param unprocessed: for those events alone that are unprocessed.
    """
    salt = b"unprocessed" if unprocessed else b""
    return blake2b(text.encode(), digest_size=_BYTES, key=owner, person=kind.value, salt=salt).digest()


def size_of(*texts: str) -> int:
    """Bytes as UTF-8."""
    return sum([len(text) if text.isascii() else len(text.encode()) for text in texts])
