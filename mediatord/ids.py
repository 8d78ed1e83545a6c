"""Ids that mediatord gives out."""

from __future__ import annotations

import os
import uuid


def new_message_id(now: float) -> str:
    """
    Id of a stored message: 32 hexadecimal digits, unguessable, in order of time so that indexes grow at their end.

    :param now: seconds since the epoch.
    """
    return f"{int(now * 1000) & 0xFFFF_FFFF_FFFF:012x}{os.urandom(10).hex()}"


def new_id() -> str:
    """Id of a DIDComm message that we write."""
    return str(uuid.uuid4())
