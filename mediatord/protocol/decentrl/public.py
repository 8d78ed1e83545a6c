"""The publisher's signature of a public event (DCTRL-0007, reference 10.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mediatord.protocol.decentrl.signing import sign_json, verify_json


def event_signature_holds(
    event: str,
    tags: Sequence[str],
    timestamp: int | float,
    signature: str,
    key: bytes,
    channel_id: str | None = None,
) -> bool:
    """
    Whether the publisher signed it; never raises.

    :param timestamp: as it came, Unix seconds.
    :param key: the publisher's Ed25519 public key.
    :param channel_id: where there is one, it is signed as well.
    """
    return verify_json(_signed(event, tags, timestamp, channel_id), signature, key)


def sign_event(
    event: str, tags: Sequence[str], timestamp: int | float, seed: bytes, channel_id: str | None = None
) -> str:
    """
    The signature, as base64.

    :param seed: the 32 bytes of the publisher's Ed25519 private key.
    :raise ValueError: a timestamp that is no number of JSON.
    """
    return sign_json(_signed(event, tags, timestamp, channel_id), seed)


def _signed(event: str, tags: Sequence[str], timestamp: int | float, channel_id: str | None) -> dict[str, Any]:
    """Clients until 0.5.4 sign three fields; channels are newer."""
    signed = {"event": event, "tags": list(tags), "timestamp": timestamp}
    return signed if channel_id is None else {**signed, "channel_id": channel_id}
