"""A stored message goes to whoever takes it: a socket here, one at another node, or an endpoint of its account."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from mediatord.faults import without_text
from mediatord.interfaces import StoredMessage

_log = Logger()


class HandOver:
    """
    Hands messages over.

    :param push: writes to the sockets of this process; False when none took it.
    :param elsewhere: has other nodes push; fires with whether a socket took it and never fails. None for one process.
    :param fail_over: told of a message that no socket took.
    """

    def __init__(
        self,
        push: Callable[[StoredMessage], bool],
        elsewhere: Callable[[StoredMessage], Deferred[bool]] | None,
        fail_over: Callable[[StoredMessage], None],
    ) -> None:
        self._push = push
        self._elsewhere = elsewhere
        self._fail_over = fail_over

    def __call__(self, message: StoredMessage, tell: Callable[[bool], None] | None = None) -> None:
        """
        Waits for nothing and never fails; what nobody takes stays in the queue.

        :param tell: told whether a socket took it, as soon as that is known.
        """
        pushed = self._push(message)
        if self._elsewhere is None:
            self._done(message, tell, pushed)
            return
        # Its recipient may have sockets at several nodes, and all of them get it.
        taken = self._elsewhere(message)
        if pushed:
            self._done(message, tell, pushed)
        else:
            taken.addCallback(lambda there: self._done(message, tell, there))
            taken.addErrback(lambda failure: _log.failure("handing over a message failed", without_text(failure)))

    def _done(self, message: StoredMessage, tell: Callable[[bool], None] | None, pushed: bool) -> None:
        if tell is not None:
            tell(pushed)
        if not pushed:
            self._fail_over(message)
