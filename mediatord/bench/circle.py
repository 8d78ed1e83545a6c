"""Decentrl identities that the daemon knows, and commands that they have signed."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle, islice, product
from typing import Any

from mediatord.bench.line import Line
from mediatord.protocol.decentrl.commands import Channel
from mediatord.protocol.decentrl.signing import encode_base64
from mediatord.wallet.decentrl import commands
from mediatord.wallet.decentrl.contracts import accept, propose
from mediatord.wallet.decentrl.identity import Identity, public_half
from mediatord.wallet.decentrl.mediator import Mediator, read_document
from mediatord.wallet.decentrl.replies import ContractRequest

_SENDERS = 8
_RECIPIENTS = 20
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Member:
    """An identity, and the mediator that it says things to."""

    identity: Identity
    mediator: Mediator

    @property
    def did(self) -> str:
        """The identity's."""
        return self.identity.did

    def command(
        self, payload: dict[str, Any] | str, recipient_did: str | None = None, channel: Channel = commands.DIRECT
    ) -> bytes:
        """Signed now; to the mediator if no recipient is given."""
        to = recipient_did or self.mediator.did
        signed = commands.compose(self.identity, channel, to, payload, timestamp_ms=int(_now() * 1000))
        return commands.encode(signed)

    def registration(self) -> bytes:
        """The command that makes it a registered one."""
        return self.command(propose(self.identity, self.mediator.did, _now()).payload(self.mediator.prekey))

    def permission(self, sender: Identity) -> bytes:
        """The command that saves a contract which `sender` proposed."""
        proposed = propose(sender, self.did, _now()).payload(public_half(self.identity.prekey))
        request = ContractRequest.model_validate({**proposed, "id": "", "sender_did": sender.did})
        signed = accept(request, self.identity, _now()).signed
        return self.command({"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": signed})


@dataclass(frozen=True, slots=True)
class Circle:
    """:param senders: each of them may write to each of the recipients."""

    mediator: Mediator
    senders: tuple[Member, ...]
    recipients: tuple[Member, ...]


def mediator_at(url: str) -> Mediator:
    """The mediator that a daemon says it is."""
    with urllib.request.urlopen(f"{url}/.well-known/did.json", timeout=_TIMEOUT_SECONDS) as response:
        return read_document(json.load(response))


def join(mediator: Mediator, line: Line, alias: str) -> Member:
    """
    Make an identity and register it.

    :raise RuntimeError: the daemon did not do as asked.
    """
    member = Member(Identity.fresh(alias, mediator.did), mediator)
    line.post(member.registration()).read()
    return member


def gather(url: str) -> Circle:
    """
    Make identities, register them, and give them contracts.

    :raise RuntimeError: the daemon did not do as asked.
    """
    mediator = mediator_at(url)
    with Line(mediator.url) as line:
        senders = tuple(join(mediator, line, f"sender {number}") for number in range(_SENDERS))
        recipients = tuple(join(mediator, line, f"recipient {number}") for number in range(_RECIPIENTS))
        for recipient, sender in product(recipients, senders):
            line.post(recipient.permission(sender.identity)).read()
    return Circle(mediator, senders, recipients)


def deliveries(circle: Circle, size: int, count: int) -> Iterator[bytes]:
    """
    TWO_WAY_PRIVATE commands of now, from everybody to everybody in turn.

    :param size: characters of the payload, which is base64 of nothing in particular.
    """
    for sender, recipient in islice(cycle(product(circle.senders, circle.recipients)), count):
        payload = encode_base64(secrets.token_bytes(size))[:size]
        yield sender.command(payload, recipient.did, commands.PRIVATE)


def _now() -> float:
    return datetime.now(UTC).timestamp()
