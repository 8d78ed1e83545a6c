"""Writing to a correspondent: packed messages, and problem reports in the form its situation allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.exchange import Correspondent, Reader, Received, Reply
from mediatord.errors import MediatorError, NotAnEnvelope, Undecryptable
from mediatord.keyset import NamedKey
from mediatord.protocol.didcomm import signed
from mediatord.protocol.didcomm.did import did_of
from mediatord.protocol.didcomm.envelope import seal_anoncrypt, seal_authcrypt
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, PLAIN_TYPE, Draft, Message
from mediatord.protocol.didcomm.small import PROBLEM_REPORT
from mediatord.stopwatch import timed
from mediatord.wire import IDENTUS_CODES, Wire, wire_for

_seal_anoncrypt, _seal_authcrypt = timed(seal_anoncrypt), timed(seal_authcrypt)
_sign = timed(signed.sign)


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """
    How problem reports are written.

    :param codes: `uc021`, or `identus` for the code that the public conformance suite expects of unknown recipients.
    :param ack: whether `ack` names the message; `pthid` does so for its thread, and some libraries take an array in
        `ack` for an error.
    """

    codes: Literal["uc021", "identus"] = "uc021"
    ack: bool = False


class Packing:
    """
    Turns drafts into what goes on the wire.

    :param new_id: source of message ids, lower-case UUIDs.
    :param signing_key_for: our key, with its id, that signs for the DID of a key that a message was encrypted to.
    """

    def __init__(
        self,
        clock: IReactorTime,
        new_id: Callable[[], str],
        signing_key_for: Callable[[str], NamedKey | None],
        reports: ReportSettings,
    ) -> None:
        self._clock = clock
        self.new_id = new_id
        self._signing_key_for = signing_key_for
        self._ack = reports.ack
        self._codes = IDENTUS_CODES if reports.codes == "identus" else {}

    def pack(self, draft: Draft, to: Correspondent | Reader) -> bytes:
        """The draft encrypted to `to`, authenticated unless `to` cannot read that (reference 1.10)."""
        plaintext = draft.plaintext(sender=did_of(to.own_kid), to=to.name, created_time=self._now())
        if to.draft03:
            return _seal_anoncrypt(plaintext, [(to.kid, to.key)])
        return _seal_authcrypt(plaintext, (to.own_kid, to.own_key), [(to.kid, to.key)])

    def plain(self, draft: Draft) -> bytes:
        """The draft in the clear, for a peer there is no key of."""
        return draft.plaintext(sender=None, to=None, created_time=self._now())

    def answer(self, to: Message, type_: str, body: dict[str, object]) -> Draft:
        """A draft in the thread of the message it answers."""
        return Draft(id=self.new_id(), type=type_, body=body, thid=to.thread)

    def refuse(self, error: MediatorError, received: Received | None) -> Reply:
        """
        The wire form of a refusal (reference section 11): where the situation allows it, encrypted to an
        authenticated sender, or signed for an anonymous one; in the clear otherwise.
        """
        if received is None:
            return self.refuse_unopened(error)
        wire, message = wire_for(error), received.message
        if received.correspondent is None:
            return self.refuse_anonymous(error, message.id, message.thread, received.own_kid)
        report = self._report(error, message.id, message.thread)
        if wire.packed is None:
            return self._reply(error, wire.status, self.plain(report), PLAIN_TYPE)
        return self._reply(error, wire.packed, self.pack(report, received.correspondent), ENCRYPTED_TYPE)

    def refuse_anonymous(self, error: MediatorError, id_: str, thread: str, kid: str) -> Reply:
        """
        A refusal of a message that says nothing certain of its sender: signed, so that whoever sent it knows that it
        was this mediator who opened and refused it.

        What passes by itself is told in the clear: whoever is over a limit, or comes while the store is away or a
        queue is full, shall cost no signature.

        :param id_: of the message, and its thread.
        :param kid: our key that it was encrypted to.
        """
        wire, report = wire_for(error), self._report(error, id_, thread)
        named_key = self._signing_key_for(kid) if wire.signed else None
        if named_key is None:
            return self._reply(error, wire.status, self.plain(report), PLAIN_TYPE)
        plaintext = report.plaintext(sender=did_of(kid), to=None, created_time=self._now())
        return self._reply(error, wire.status, _sign(plaintext, *named_key), signed.MEDIA_TYPE)

    def refuse_unopened(self, error: MediatorError) -> Reply:
        """A refusal of what could not be opened, or of all that comes: in the clear, naming no message."""
        return self._reply(error, wire_for(error).status, self.plain(self._report(error)), PLAIN_TYPE)

    def _reply(self, error: MediatorError, status: int, body: bytes, media_type: str) -> Reply:
        situation = type(error)
        return Reply(status, body, media_type, _wait(error, wire_for(error)), situation, self._codes.get(situation))

    def _report(self, error: MediatorError, id_: str | None = None, thread: str | None = None) -> Draft:
        wire = wire_for(error)
        return Draft(
            id=self.new_id(),
            type=PROBLEM_REPORT,
            body={"code": self._codes.get(type(error), wire.code), "comment": wire.comment},
            pthid=thread,
            ack=[id_] if id_ is not None and self._ack else (),
        )

    def _now(self) -> int:
        return int(self._clock.seconds())


def _wait(error: MediatorError, wire: Wire) -> int | None:
    """Seconds after which it may be tried again, if that is known."""
    return wire.retry_after if error.retry_after is None else int(error.retry_after)


def is_opaque(reply: Reply) -> bool:
    """Whether the message could not even be read or opened; a socket takes only a few of those (reference 3.2)."""
    return reply.fault is not None and issubclass(reply.fault, (Undecryptable, NotAnEnvelope))
