"""The parent of the workers, as a service."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall

from mediatord.notify import notify, reloading, watchdog_interval
from mediatord.service import StartupError
from mediatord.workers.arrivals import make_arrivals
from mediatord.workers.brief import Brief, Inherited, WorkerPlace
from mediatord.workers.changeover import Changeover, Tell
from mediatord.workers.child import FIRST_SOCKET, Child
from mediatord.workers.crew import Crew, Patience
from mediatord.workers.polls import Polls
from mediatord.workers.scrapes import Scrapes
from mediatord.workers.sockets import Sharing


@dataclass(frozen=True, slots=True)
class Orders:
    """
    What the workers are to do.

    :param workers: name and configuration (as JSON) of each.
    :param secret: they know each other by it.
    :param seed: of what they are to have in common with other nodes.
    :param keys: the content of a key file, that all of them have.
    """

    workers: Sequence[tuple[str, str]]
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    keys: bytes = field(repr=False)


class Supervisor(Service):
    """
    Binds the listeners, keeps the workers going, and speaks for them to systemd.

    :param check: finds out whether the workers could use the store at all; raises ValueError with one line.
    :param give_up: told in one line why no worker could start.
    :param ready: told once that all workers are up.
    :ivar tell_state: what this process has to say beside the workers when they are asked for their states.
    """

    name = "supervisor"

    def __init__(
        self,
        reactor: Any,
        sharing: Sharing,
        orders: Orders,
        *,
        check: Callable[[], None],
        give_up: Callable[[str], None],
        ready: Callable[[], None] = lambda: None,
        patience: Patience = Patience(),  # noqa: B008  frozen
    ) -> None:
        self._reactor = reactor
        self._sharing = sharing
        self._orders = orders
        self._check = check
        self._tell_ready = ready
        self._patience = patience
        self._directory: Path | None = None
        self._told = ""
        self._watchdog = LoopingCall(self._ping)
        self._watchdog.clock = reactor
        self.crew = Crew(
            reactor,
            self._recruit,
            sharing,
            [name for name, _ in orders.workers],
            hear=self._hear,
            complete=self._ready,
            changed=self._tell_status,
            give_up=give_up,
            patience=patience,
        )
        self._scrapes = Scrapes(reactor, lambda: self.crew)
        self._states = Polls(reactor, "state", lambda: self.crew)
        self.tell_state: Callable[[], Any] | None = None
        self._changeover = Changeover(lambda: self.crew)
        self._up = False

    def privilegedStartService(self) -> None:
        """
        Bind the listeners, while there is still somebody to tell.

        :raise StartupError: an address is taken or not ours.
        """
        super().privilegedStartService()
        self._sharing.bind()

    def startService(self) -> None:
        """
        Look at the store, and have the workers begin as soon as the reactor runs.

        :raise StartupError: the store cannot be used.
        :raise OSError: there is no place for the workers' sockets.
        """
        super().startService()
        try:
            # Not earlier: the database is to belong to the user that the workers run as.
            self._check()
            self._directory = Path(tempfile.mkdtemp(prefix="mediatord-workers-"))
            make_arrivals(self._socket(0), len(self._orders.workers))
        except ValueError as error:
            self._sharing.close()
            raise StartupError(str(error)) from None
        except OSError:
            self._sharing.close()
            raise
        self._reactor.callWhenRunning(self._begin)

    def rotate(self) -> None:
        """Have every worker close the segment of its event log."""
        for child in self.crew:
            child.send("rotate")

    def reload(self, settings: Sequence[str], outcome: str, keys: Sequence[bytes] = ()) -> None:
        """
        Have every worker go by other settings, and close the segment of its event log.

        :param settings: configuration (as JSON) of each, also for those that are to replace one of them.
        :param outcome: what became of the configuration that was read.
        :param keys: contents of key files: each is what all workers go by before any of them goes by the next.
        """
        present, *later = keys or (self._orders.keys,)
        named = zip(self._orders.workers, settings, strict=True)
        orders = replace(self._orders, workers=[(name, new) for (name, _), new in named])

        def apply() -> Tell:
            self._orders = replace(orders, keys=present)
            return lambda child: child.send(
                "reload", [settings[self.crew.number(child)], outcome, present.decode("utf-8")]
            )

        def use(content: bytes) -> Tell:
            self._orders = replace(self._orders, keys=content)
            return lambda child: child.send("keys", content.decode("utf-8"))

        self._tell_reload(reloading())
        self._changeover.add(apply, *(partial(use, one) for one in later), partial(self._tell_reload, "READY=1"))

    def _tell_reload(self, state: str) -> None:
        # A daemon that is not up yet must not say that it is.
        if self._up:
            notify(state)

    def stopService(self) -> Deferred[None]:
        """Take no more connections, and have the workers stop. Fires when they are gone."""
        super().stopService()
        notify("STOPPING=1")
        if self._watchdog.running:
            self._watchdog.stop()
        self._scrapes.stop()
        self._states.stop()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self._sharing.close()
        await self.crew.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _begin(self) -> None:
        if self.running:
            self.crew.start()

    def _ready(self) -> None:
        self._up = True
        notify("READY=1")
        self._tell_ready()
        interval = watchdog_interval()
        if interval is not None:
            self._watchdog.start(interval)

    def _tell_status(self) -> None:
        status = self.crew.status
        if status != self._told:
            self._told = status
            notify(f"STATUS={status}")

    def _ping(self) -> None:
        if self.crew.answers:
            notify("WATCHDOG=1")

    def _recruit(
        self, number: int, hear: Callable[[Child, str, Any], None], gone: Callable[[Child, str], None]
    ) -> Child:
        path = self._socket(number)
        for left in (path, path.with_name(f"{path.name}.lock")):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()
        name, settings = self._orders.workers[number]
        sockets = self._sharing.sockets(number)
        inherited = tuple(Inherited(FIRST_SOCKET + index, family) for index, (_, family) in enumerate(sockets))
        place = WorkerPlace(str(path), self._orders.secret, self._orders.seed, inherited, self._orders.keys)
        brief = Brief(place, settings)

        def ended(child: Child, how: str) -> None:
            self._scrapes.gone(child)
            self._states.gone(child)
            gone(child, how)
            self._changeover.answered(child)

        child = Child(name, hear, ended, missed=-self._patience.starting)
        child.spawn(self._reactor, brief.written(), [descriptor for descriptor, _ in sockets])
        return child

    def _socket(self, number: int) -> Path:
        """The node-to-node socket of a worker, counted from 0."""
        assert self._directory is not None
        return self._directory / f"{number + 1}.sock"

    def _hear(self, child: Child, word: str, content: Any) -> None:
        if word == "ask":
            self._scrapes.begin(child, lambda page: child.send("page", [content, page]))
        elif word == "reloaded":
            self._changeover.answered(child)
        elif word == "report":
            self._scrapes.take(child, *content)
        elif word == "ask states":
            self._states.begin(child, partial(self._hand_states, child, content))
        elif word == "state":
            self._states.take(child, *content)

    def _hand_states(self, child: Child, number: int, asked: int, states: Mapping[int, Any]) -> None:
        own = [] if self.tell_state is None else [self.tell_state()]
        child.send("states", [number, [asked, [*states.values(), *own]]])
