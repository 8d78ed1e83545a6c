"""
Messages between the supervisor and a worker: JSON arrays of a word and its content, one per line, both ways.

Either side may ask the other: `["ask", [number, word, content]]` is answered by `["answer", [number, value]]`,
without a value if there is no answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

_log = Logger()


class NoAnswer(TimeoutError):
    """The other side has no answer, which is to those who ask as if it came too late."""


def encode_control_message(word: str, content: Any = None) -> bytes:
    """Encode a message as one line."""
    return json.dumps([word, content], separators=(",", ":")).encode("ascii") + b"\n"


class ControlChannel:
    """
    One side of the control channel.

    :ivar handlers: called with the content of a message or question, by its word; a question is answered with the
        result, which may be awaitable, unless that raises :class:`NoAnswer`. Other messages are ignored.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self.handlers: dict[str, Callable[[Any], Any]] = {}
        self._clock = clock
        self._remainder = b""
        self._asked: dict[int, Deferred[Any]] = {}
        self._numbers = count(1)

    def write_line(self, line: bytes) -> None:
        """Send a line, if the other side is still there."""
        raise NotImplementedError

    def send(self, word: str, content: Any = None) -> None:
        """Send a message."""
        self.write_line(encode_control_message(word, content))

    def ask(self, word: str, content: Any = None, timeout: float | None = None) -> Deferred[Any]:
        """
        Ask the other side; fires with its answer.

        :raise NoAnswer: it has none.
        :raise TimeoutError: there was none in time.
        :raise ConnectionLost: the other side has ended.
        """
        number = next(self._numbers)
        answer: Deferred[Any] = Deferred()
        self._asked[number] = answer
        self.send("ask", [number, word, content])
        if timeout is not None:
            answer.addTimeout(timeout, self._clock, _raise_timeout)
        return answer.addBoth(self._forget, number)

    def receive(self, data: bytes) -> None:
        """Process received data."""
        *lines, self._remainder = (self._remainder + data).split(b"\n")
        for line in lines:
            self._handle(*json.loads(line))

    def fail_asked(self) -> None:
        """The other side has ended: it will answer nothing more."""
        for answer in tuple(self._asked.values()):
            answer.errback(ConnectionLost())

    def _forget(self, result: Any, number: int) -> Any:
        del self._asked[number]
        return result

    def _handle(self, word: str, content: Any) -> None:
        if word == "answer":
            number, *value = content
            if number in self._asked:
                self._asked[number].callback(value[0] if value else Failure(NoAnswer()))
        elif word == "ask":
            number, word, content = content
            answer = maybeDeferred(self.handlers.get(word, _raise_no_answer), content)
            answer.addCallbacks(lambda value: [number, value], self._fail, errbackArgs=(number, word))
            answer.addCallback(lambda answer: self.send("answer", answer))
        elif word in self.handlers:
            self.handlers[word](content)

    def _fail(self, failure: Failure, number: int, word: str) -> list[int]:
        if not failure.check(NoAnswer):
            _log.failure("answering {word} failed", failure, word=word)
        return [number]


def _raise_timeout(result: object, seconds: float) -> None:
    raise TimeoutError


def _raise_no_answer(content: object) -> None:
    raise NoAnswer
