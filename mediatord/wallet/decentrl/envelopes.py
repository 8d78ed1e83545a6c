"""Events on their way between two identities: signed by one, encrypted under their contract (reference section 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.did import parse_did
from mediatord.protocol.decentrl.sealing import open_sealed, seal
from mediatord.protocol.decentrl.signing import verify_json
from mediatord.wallet.decentrl.contracts import Agreement
from mediatord.wallet.decentrl.identity import Identity
from mediatord.wallet.packing import Unreadable

_SIGNED = ("contract_id", "event", "timestamp")


@dataclass(frozen=True, slots=True)
class Event:
    """
    What somebody wrote to us, and proved to be from them.

    :param agreement: the contract that it was encrypted under.
    :param text: the event itself, usually JSON.
    :param timestamp: Unix seconds.
    """

    sender_did: str
    agreement: Agreement
    text: str = field(repr=False)
    timestamp: float


def seal_event(identity: Identity, agreement: Agreement, text: str, timestamp: int) -> str:
    """
    An event for the other side of a contract, as it goes through a mediator.

    :param timestamp: Unix seconds.
    """
    envelope = {"contract_id": agreement.id, "event": text, "timestamp": timestamp}
    return seal(jsontext.dumps({**envelope, "signature": identity.sign(envelope)}), agreement.root_secret)


def open_event(payload: str, sender_did: str, agreements: Iterable[Agreement]) -> Event:
    """
    Decrypt an event and check who wrote it.

    :param agreements: with the sender, tried one after the other.
    :raise Unreadable: none of them opens it, or it was not signed by the sender.
    """
    for agreement in agreements:
        try:
            plaintext = open_sealed(payload, agreement.root_secret)
        except ValueError:
            continue
        return Event(sender_did, agreement, *_checked(plaintext, sender_did))
    raise Unreadable("encrypted under no contract that we have with its sender")


def _checked(plaintext: bytes, sender_did: str) -> tuple[str, float]:
    try:
        envelope: dict[str, Any] = jsontext.loads_object(plaintext)
        signed = {name: envelope[name] for name in _SIGNED}
        signature, key = envelope["signature"], parse_did(sender_did).signing_key
    except (KeyError, ValueError):
        raise Unreadable("not an event") from None
    if not verify_json(signed, signature, key):
        raise Unreadable("an event that its sender did not sign")
    if not isinstance(signed["event"], str) or not isinstance(signed["timestamp"], int | float):
        raise Unreadable("not an event")
    return signed["event"], float(signed["timestamp"])
