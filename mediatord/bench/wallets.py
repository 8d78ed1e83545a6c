"""
Wallets and what they do, as a process of its own.

It speaks by lines. The first one it reads, a :class:`Setup` as JSON, has it make wallets, enrol them, and write
forwards to them into a file for others to post; then it says `ready`. After that it does what each further line asks
for, and answers with one line of JSON. `{"do": "live"}` opens a socket for every wallet and switches live delivery
on, and `close` closes them; `cycle` is a :class:`~mediatord.bench.cycling.Turn`; `waiting` asks what is left, and
`drain` fetches and acknowledges it; `storm` has all come at once; `ping` pings the sockets; `leave` takes the DIDs
off the mediator's list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mediatord.bench.courier import Courier
from mediatord.bench.crowd import dismiss, gather_at, letters
from mediatord.bench.cycling import Cycling, Letter, Live, Turn
from mediatord.bench.draining import Draining
from mediatord.bench.finding import find_mediator
from mediatord.bench.load import loopback, request_for, write_bodies
from mediatord.bench.pinging import ping
from mediatord.bench.processes import allow_many_files
from mediatord.bench.storming import Storm


@dataclass(frozen=True, slots=True)
class Setup:
    """
    :param url: where the mediator is.
    :param did: of the mediator, if it does not say so itself.
    :param wallets: how many.
    :param size: of the plaintext inside the innermost envelope, in bytes.
    :param letters: how many different forwards, to the wallets in turn.
    :param bodies: the file for them.
    """

    url: str
    did: str | None
    wallets: int
    size: int
    letters: int
    bodies: str


class Wallets:
    """Those of one process."""

    def __init__(self, setup: Setup) -> None:
        self._mediator = find_mediator(setup.url, setup.did)
        self._crowd = gather_at(self._mediator, setup.wallets, short=True)
        self._couriers = [Courier(wallet, self._mediator) for wallet in self._crowd.wallets]
        self._lives: list[Live] = []
        target = urlsplit(self._crowd.hop.http_uri)
        self._address = (target.hostname or "", target.port or 80)
        own = urlsplit(self._mediator.http_uri)
        self._own = (own.hostname or "", own.port or 80, own.path or "/")
        packed = list(letters(self._crowd, setup.size, setup.letters))
        write_bodies(Path(setup.bodies), [body for body, _ in packed])
        self._letters = [
            Letter(request_for(self._address[1], target.path or "/", body, host=self._address[0]), tag)
            for body, tag in packed
        ]

    def does(self) -> dict[str, Callable[[dict[str, Any]], object]]:
        """What may be asked for, and what does it."""
        return {
            "live": self._live,
            "cycle": self._cycle,
            "waiting": self._waiting,
            "drain": self._drain,
            "storm": self._storm,
            "ping": self._ping,
            "close": self._close,
            "leave": self._leave,
        }

    def _live(self, wanted: dict[str, Any]) -> object:
        """:param wanted: `apart` for addresses of their own."""
        sources = [loopback(number) if wanted.get("apart") else "" for number in range(len(self._couriers))]
        url = self._socket_url()
        self._lives = [Live(courier, url, source) for courier, source in zip(self._couriers, sources, strict=True)]
        for live in self._lives:
            live.begin()
        return {"sockets": len(self._lives)}

    def _cycle(self, wanted: dict[str, Any]) -> object:
        return Cycling(self._address, self._letters, self._lives, Turn(**wanted)).run()

    def _waiting(self, _wanted: dict[str, Any]) -> object:
        return {"messages": sum(live.waiting() for live in self._lives)}

    def _drain(self, wanted: dict[str, Any]) -> object:
        return Draining(self._own, self._couriers, **wanted).run()

    def _storm(self, wanted: dict[str, Any]) -> object:
        return Storm(self._socket_url(), self._couriers, **wanted).run()

    def _ping(self, wanted: dict[str, Any]) -> object:
        return ping(self._lives, **wanted)

    def _close(self, _wanted: dict[str, Any]) -> object:
        for live in self._lives:
            live.socket.close()
        self._lives = []
        return {}

    def _leave(self, _wanted: dict[str, Any]) -> object:
        dismiss(self._crowd)
        return {}

    def _socket_url(self) -> str:
        if self._mediator.ws_uri is None:
            raise RuntimeError("the mediator's DID document names no WebSocket")
        return self._mediator.ws_uri


def serve() -> None:
    """Until there is nothing more to read."""
    wallets = Wallets(Setup(**json.loads(sys.stdin.readline())))
    does = wallets.does()
    _say("ready")
    for line in sys.stdin:
        wanted = json.loads(line)
        found = does[wanted.pop("do")](wanted)
        _say(json.dumps(asdict(found) if is_dataclass(found) and not isinstance(found, type) else found))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    allow_many_files()
    serve()
