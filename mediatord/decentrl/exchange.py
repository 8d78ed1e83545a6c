"""What passes between the transports and the use cases of the Decentrl half."""

from __future__ import annotations

from dataclasses import dataclass, field

from mediatord.errors import MediatorError
from mediatord.interfaces.decentrl import Guard
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.commands import Command
from mediatord.wire import decentrl_wire_for


@dataclass(frozen=True, slots=True)
class Reply:
    """
    What goes back for a command or a query of a public channel.

    :param body: JSON.
    :param retry_after: seconds.
    :param fault: the situation in which it was refused, if it was; a class, as an error's traceback would keep all
        that was received.
    """

    status: int
    body: bytes = field(repr=False)
    retry_after: int | None = None
    fault: type[MediatorError] | None = None


def refusal(error: MediatorError) -> Reply:
    """The wire form of a refusal (DCTRL-0004 section 11)."""
    wire = decentrl_wire_for(error)
    retry_after = int(error.retry_after) if error.retry_after is not None else wire.retry_after
    return Reply(wire.status, jsontext.dumps({"type": "ERROR", "code": wire.code}), retry_after, type(error))


@dataclass(frozen=True, slots=True)
class Order:
    """
    A command whose sender is proven, and what it is remembered by.

    :param request: id of the request that it came with, in the log.
    :param key: Ed25519 public key that the command is signed with.
    :param nonce: what stands for the pair of nonce and sender.
    :param until: when the nonce may be forgotten.
    :param peer: who pays, as an address.
    """

    command: Command
    request: str
    key: bytes = field(repr=False)
    nonce: bytes
    until: float
    peer: str = ""

    @property
    def sender(self) -> str:
        """DID of the sender."""
        return self.command.sender_did

    def guard(self, *, registered: bool = False, recipient: str | None = None) -> Guard:
        """
        What has to hold for the command.

        :param registered: whether the sender has to be registered.
        :param recipient: DID that has to be registered as well.
        """
        return Guard(self.nonce, self.until, self.sender if registered else None, recipient)
