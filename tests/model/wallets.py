"""What the wallets of the model say to all mediators, what is answered, and what is pushed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from mediatord.didcomm.exchange import Reply
from mediatord.protocol import jsontext
from mediatord.wallet.identity import Identity
from tests.house import FakeSocket, Guest, report_of
from tests.model.dwelling import Dwelling
from tests.model.expected import Expected, Letter
from tests.model.street import LIMITS, Street

NAMES = ("alice", "bob", "carol")
MOST_SOCKETS = 4

# Status, what stood in the answer, and why it was refused.
Answer = tuple[int, Any, str | None]


@dataclass(eq=False, slots=True)
class Socket:
    """
    One and the same socket at every mediator.

    :param ends: by mediator.
    :ivar live: DIDs of the wallets that are live on it.
    """

    ends: dict[str, FakeSocket]
    live: set[str] = field(default_factory=set)

    @property
    def takes(self) -> bool:
        """Whether its peer reads."""
        return all(end.takes for end in self.ends.values())


class Wallets(RuleBasedStateMachine):
    """
    Three wallets and their sockets, at every mediator.

    :ivar known: messages that some wallet has seen, by what their ids are called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.street = Street()
        self.expected = Expected(LIMITS, self.street.now)
        self.identities = {name: Identity.fresh(endpoint=self.street.first.did) for name in NAMES}
        self.guests = {
            (name, one.backend): Guest(one, identity)
            for name, identity in self.identities.items()
            for one in self.street.dwellings
        }
        self.names = {identity.did: name for name, identity in self.identities.items()}
        self.sockets: list[Socket] = []
        self.known: dict[str, Letter] = {}
        self._numbers = count()

    def teardown(self) -> None:
        self.street.close()

    def did(self, name: str) -> str:
        """Of a wallet."""
        return self.identities[name].did

    def payload(self, size: int, form: str = "json") -> bytes:
        """Something that looks encrypted, unlike any other."""
        text = f"m{next(self._numbers)}"
        return jsontext.dumps({"ciphertext": text + "." * max(0, size - len(text) - 17)})

    def post(self, raw: bytes, name: str | None = None, socket: Socket | None = None) -> Answer:
        """The same message to all. :param name: of the wallet that an answer is for."""
        return self.tell({one.backend: raw for one in self.street.dwellings}, name, socket)

    def tell(self, raws: Mapping[str, bytes], name: str | None, socket: Socket | None = None) -> Answer:
        """A message to each; what they agree on."""

        def ask(dwelling: Dwelling) -> Answer:
            end = socket.ends[dwelling.backend] if socket else None
            return self._read(dwelling, dwelling.receive(raws[dwelling.backend], end), name)

        return tuple(self.street.same(lambda one: list(ask(one))))

    def ask(self, name: str, type_: str, body: Any, socket: Socket | None = None, **headers: Any) -> Answer:
        """A request of a wallet. :param body: one for all, or what makes one of a mediator."""
        headers = {"id": f"q{next(self._numbers)}", "return_route": "all", **headers}
        if not callable(body):
            return self.post(self.guests[name, "memory"].pack(type_, body, **headers), name, socket)
        packed = {
            one.backend: self.guests[name, one.backend].pack(type_, body(one), **headers)
            for one in self.street.dwellings
        }
        return self.tell(packed, name, socket)

    def learn(self, attachments: Sequence[Mapping[str, Any]], letters: Sequence[Letter]) -> None:
        """These attachments are those letters, in this order; from now on their ids are known."""
        assert [_payload(one["data"]) for one in attachments] == [one.payload for one in letters]
        self.known.update(zip([str(one["id"]) for one in attachments], letters, strict=True))

    def pushed(self, letters: Sequence[Letter] = ()) -> None:
        """Since this was last asked, these were pushed: to each live socket that reads, in order, and no more."""
        for socket in self.sockets:
            due = [one for one in letters if one.account in socket.live and socket.takes]
            names = [self.names[one.account] for one in due]

            def frames(dwelling: Dwelling, socket: Socket = socket, names: list[str] = names) -> list[Any]:
                end = socket.ends[dwelling.backend]
                taken, end.frames = end.frames, []
                assert len(taken) == len(names), f"{dwelling.backend}: {len(taken)} frames instead of {len(names)}"
                return [self._opened(dwelling, frame, name) for frame, name in zip(taken, names, strict=True)]

            for frame, letter in zip(self.street.same(frames), due, strict=True):
                self.learn(frame["attachments"], [letter])

    def let_pass(self, seconds: int) -> None:
        """Second by second: what is due together is done in no order that anybody promised."""
        for _ in range(seconds):
            for one in self.street.dwellings:
                one.later(1.0)
            self.pushed(self.expected.pass_time(1.0))

    def open_socket(self) -> Socket:
        """One more, at each."""
        socket = Socket({one.backend: one.socket() for one in self.street.dwellings})
        self.sockets.append(socket)
        return socket

    def close_socket(self, socket: Socket) -> None:
        """One less."""
        self.sockets.remove(socket)
        for one in self.street.dwellings:
            one.hang_up(socket.ends[one.backend])

    def _read(self, dwelling: Dwelling, reply: Reply, name: str | None) -> Answer:
        fault = reply.fault.__name__ if reply.fault else None
        if not reply.body:
            return reply.status, None, fault
        if "ciphertext" in jsontext.loads_object(reply.body):
            assert name is not None, "an answer to nobody"
            return reply.status, self._opened(dwelling, reply.body, name), fault
        return reply.status, report_of(reply), fault

    def _opened(self, dwelling: Dwelling, raw: bytes, name: str) -> dict[str, Any]:
        return jsontext.loads_object(self.guests[name, dwelling.backend].open(raw).plaintext)


def _payload(data: Mapping[str, Any]) -> bytes:
    return jsontext.dumps(data["json"]) if "json" in data else jsontext.b64_lenient_decode(data["base64"])
