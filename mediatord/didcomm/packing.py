"""Writing to a correspondent: packed messages, and problem reports in the form its situation allows."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.exchange import Correspondent, Reader, Received, Reply
from mediatord.errors import MediatorError, NotAnEnvelope, Undecryptable
from mediatord.protocol.didcomm.did import did_of
from mediatord.protocol.didcomm.envelope import seal_anoncrypt, seal_authcrypt
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, PLAIN_TYPE, Draft, Message
from mediatord.protocol.didcomm.small import PROBLEM_REPORT
from mediatord.stopwatch import timed
from mediatord.wire import Wire, wire_for

_seal_anoncrypt, _seal_authcrypt = timed(seal_anoncrypt), timed(seal_authcrypt)


class Packing:
    """
    Turns drafts into what goes on the wire.

    :param new_id: source of message ids, lower-case UUIDs.
    """

    def __init__(self, clock: IReactorTime, new_id: Callable[[], str]) -> None:
        self._clock = clock
        self.new_id = new_id

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
        The wire form of a refusal (reference section 11): encrypted to an authenticated sender where the situation
        allows it, in the clear otherwise.
        """
        if received is None:
            return self.refuse_stranger(error)
        wire, message = wire_for(error), received.message
        if received.correspondent is None or wire.packed is None:
            return self.refuse_stranger(error, message.id, message.thread)
        body = self.pack(self._report(wire, message.id, message.thread), received.correspondent)
        return Reply(wire.packed, body, ENCRYPTED_TYPE, _wait(error, wire), type(error))

    def refuse_stranger(self, error: MediatorError, id_: str | None = None, thread: str | None = None) -> Reply:
        """
        A refusal in the clear.

        :param id_: of the message that is refused, and its thread, if it could be read.
        """
        wire = wire_for(error)
        body = self.plain(self._report(wire, id_, thread))
        return Reply(wire.status, body, PLAIN_TYPE, _wait(error, wire), type(error))

    def _report(self, wire: Wire, id_: str | None, thread: str | None) -> Draft:
        return Draft(
            id=self.new_id(),
            type=PROBLEM_REPORT,
            body={"code": wire.code, "comment": wire.comment},
            pthid=thread,
            ack=() if id_ is None else [id_],
        )

    def _now(self) -> int:
        return int(self._clock.seconds())


def _wait(error: MediatorError, wire: Wire) -> int | None:
    """Seconds after which it may be tried again, if that is known."""
    return wire.retry_after if error.retry_after is None else int(error.retry_after)


def is_opaque(reply: Reply) -> bool:
    """Whether the message could not even be read or opened; a socket takes only a few of those (reference 3.2)."""
    return reply.fault is not None and issubclass(reply.fault, (Undecryptable, NotAnEnvelope))
