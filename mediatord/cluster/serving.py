"""Answers what other nodes ask, once it is known that they are nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.cluster.sealing import NotSealed, Sealing
from mediatord.deadline import one_request
from mediatord.errors import StoreUnavailable
from mediatord.faults import Rarely, without_text

_log = Logger()

# Requests that are served at the same time; what is more is sent again later.
AT_ONCE = 64

_OK, _BAD, _UNAUTHORIZED, _NOT_FOUND, _GONE, _BUSY = 200, 400, 401, 404, 410, 503

Use = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """
    :param known: whether it was a node that asked.
    """

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    known: bool = True


class Serving:
    """
    Opens requests, has them answered, and seals the answers.

    :param boot: ours.
    :param uses: what is done for each path; raises ValueError for a body that is none.
    :param refused: told of what no node has sent, in one of the words of :class:`NotSealed`.
    """

    def __init__(
        self,
        clock: IReactorTime,
        boot: str,
        sealing: Sealing,
        uses: Mapping[str, Use],
        refused: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._boot = boot
        self._sealing = sealing
        self._uses = uses
        self._refused = refused
        self._warning = Rarely(clock)
        self._inside = 0

    async def serve(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        known: Callable[[], None] = lambda: None,
    ) -> Answer:
        """
        The answer to a request: 401 without a seal when it is none of a node's, else sealed.

        :param known: called as soon as it has shown to be a node's.
        """
        try:
            stamp = self._sealing.open_request(headers, method, path, body)
        except NotSealed as refusal:
            return self._refuse(refusal.reason)
        except Exception:
            _log.failure("opening a request failed", without_text())
            return self._refuse("malformed")
        known()
        status, answer = (_GONE, b"{}") if stamp.receiver != self._boot else await self._answer(method, path, body)
        return Answer(status, answer, self._sealing.seal_response(stamp, self._boot, status, answer))

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        use = self._uses.get(path)
        if use is None or method != "POST":
            return _NOT_FOUND, b"{}"
        if self._inside >= AT_ONCE:
            return _BUSY, b"{}"
        self._inside += 1
        try:
            with one_request(self._clock):
                return _OK, await use(body)
        except ValueError:
            return _BAD, b"{}"
        except StoreUnavailable:
            return _BUSY, b"{}"
        finally:
            self._inside -= 1

    def _refuse(self, reason: str) -> Answer:
        """Of what no node has sent, which counts."""
        self._refused(reason)
        count = self._warning.count()
        if count:
            _log.warn(
                "refused {count} requests to cluster.listen, the last one because of its {reason}: from a stranger, "
                "or a node with another secret or a clock that is wrong",
                count=count,
                reason=reason,
            )
        return Answer(_UNAUTHORIZED, known=False)
