"""A hint on its way to all nodes that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from twisted.internet.defer import Deferred

from mediatord.cluster.hint import Hint
from mediatord.interfaces import Node


class Sender(Protocol):
    """What takes hints for other nodes."""

    def put(self, node: Node, hint: Hint) -> Deferred[bool | None]:
        """Fires with whether a socket of that node took it, None when that is not known; never fails."""


class Way:
    """
    Goes once to each node: to those where sockets were seen last, and to those where they are.

    :param over: told of it when there is nothing more to wait for.
    :param told: boots that need not be told.
    :ivar taken: fires with whether a socket of another node took it, as soon as that is known.
    :ivar sent: boots that it went to.
    :ivar told: boots that have answered, and those that need not.
    """

    def __init__(
        self,
        hint: Hint,
        sender: Sender,
        over: Callable[[Way], None] = lambda way: None,
        told: Iterable[str] = (),
    ) -> None:
        self.hint = hint
        self.taken: Deferred[bool] = Deferred()
        self.sent: set[str] = set()
        self.told = set(told)
        self._sender = sender
        self._over = over
        self._waiting: set[str] = set()
        self._wanted: frozenset[str] | None = None
        self._is_asked = False

    @property
    def complete(self) -> bool:
        """Whether it is known who holds sockets, and all of them have answered."""
        return self._wanted is not None and self._wanted <= self.told

    def offer(self, nodes: Iterable[Node]) -> None:
        """These should have it; those that had it are passed over."""
        for node in nodes:
            if node.boot not in self.sent and node.boot not in self.told:
                self.sent.add(node.boot)
                self._waiting.add(node.boot)
                self._sender.put(node, self.hint).addCallback(self._answered, node.boot)

    def end(self, nodes: Sequence[Node] | None) -> None:
        """
        These hold sockets, and nobody else has to be waited for.

        :param nodes: None when that cannot be known.
        """
        if nodes is not None:
            self._wanted = frozenset(node.boot for node in nodes)
            self.offer(nodes)
            self._waiting &= self._wanted
        self._is_asked = True
        self._look()

    def _answered(self, took: bool | None, boot: str) -> None:
        if took is not None:
            self.told.add(boot)
        if took and not self.taken.called:
            self.taken.callback(True)
        if boot in self._waiting:
            self._waiting.discard(boot)
            self._look()

    def _look(self) -> None:
        if self._is_asked and not self._waiting:
            if not self.taken.called:
                self.taken.callback(False)
            self._over(self)
