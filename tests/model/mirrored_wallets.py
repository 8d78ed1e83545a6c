"""Requests of the model's wallets to all mediators, with responses and pushes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from mediatord.protocol import encoding
from mediatord.ratelimit.admission import RequestReply
from mediatord.wallet.didcomm_identity import WalletIdentity
from tests.in_memory_mediator import FakeSocket, InMemoryWallet, read_problem_report
from tests.model.mirrored_mediators import LIMITS, MirroredMediators
from tests.model.reference_model import ExpectedMessage, ReferenceModel
from tests.model.restartable_mediator import RestartableMediator

NAMES = ("alice", "bob", "carol")
MAX_SOCKETS = 4

# Status, members of the response, and reason of a refusal.
Answer = tuple[int, Any, str | None]


@dataclass(eq=False, slots=True)
class MirroredSocket:
    """
    One socket at every mediator.

    :param ends: the socket at each mediator.

    :ivar live: DIDs of the wallets that are live on it.
    """

    ends: dict[str, FakeSocket]
    live: set[str] = field(default_factory=set)

    @property
    def takes(self) -> bool:
        """Whether its peer reads."""
        return all(end.takes for end in self.ends.values())


class MirroredWallets(RuleBasedStateMachine):
    """
    Three wallets and their sockets, at every mediator.

    :ivar known: messages that some wallet has seen, by the aliases of their ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mediators = MirroredMediators()
        self.expected = ReferenceModel(LIMITS, self.mediators.now)
        self.identities = {name: WalletIdentity.generate(endpoint=self.mediators.first.did) for name in NAMES}
        self.guests = {
            (name, mediator.backend): InMemoryWallet(mediator, identity)
            for name, identity in self.identities.items()
            for mediator in self.mediators.mediator_fixtures
        }
        self.names = {identity.did: name for name, identity in self.identities.items()}
        self.sockets: list[MirroredSocket] = []
        self.known: dict[str, ExpectedMessage] = {}
        self._numbers = count()

    def teardown(self) -> None:
        self.mediators.close()

    def get_did(self, name: str) -> str:
        """DID of a wallet."""
        return self.identities[name].did

    def make_payload(self, size: int, form: str = "json") -> bytes:
        """A payload that looks encrypted and differs from every other one."""
        text = f"m{next(self._numbers)}"
        return encoding.dumps({"ciphertext": text + "." * max(0, size - len(text) - 17)})

    def post(self, raw: bytes, name: str | None = None, socket: MirroredSocket | None = None) -> Answer:
        """Send the same message to all. :param name: wallet that a response is for."""
        return self.send({mediator.backend: raw for mediator in self.mediators.mediator_fixtures}, name, socket)

    def send(self, raws: Mapping[str, bytes], name: str | None, socket: MirroredSocket | None = None) -> Answer:
        """Send a message to each; return the common result."""

        def request(mediator_fixture: RestartableMediator) -> Answer:
            end = socket.ends[mediator_fixture.backend] if socket else None
            return self._read(mediator_fixture, mediator_fixture.receive(raws[mediator_fixture.backend], end), name)

        return tuple(self.mediators.ask_all(lambda one: list(request(one))))

    def request(
        self, name: str, type_: str, body: Any, socket: MirroredSocket | None = None, **headers: Any
    ) -> Answer:
        """Request of a wallet. :param body: one for all, or a function of the mediator."""
        headers = {"id": f"q{next(self._numbers)}", "return_route": "all", **headers}
        if not callable(body):
            return self.post(self.guests[name, "memory"].pack(type_, body, **headers), name, socket)
        packed = {
            mediator.backend: self.guests[name, mediator.backend].pack(type_, body(mediator), **headers)
            for mediator in self.mediators.mediator_fixtures
        }
        return self.send(packed, name, socket)

    def learn(self, attachments: Sequence[Mapping[str, Any]], messages: Sequence[ExpectedMessage]) -> None:
        """These attachments are those messages, in this order; their ids are known from now on."""
        assert [_payload(attachment["data"]) for attachment in attachments] == [
            message.payload for message in messages
        ]
        self.known.update(zip([str(attachment["id"]) for attachment in attachments], messages, strict=True))

    def assert_pushed(self, messages: Sequence[ExpectedMessage] = ()) -> None:
        """
        Since the last call these messages were pushed: to each live socket that reads, those of an account in order,
        and no others.
        """
        for socket in self.sockets:
            due = [one for one in messages if one.account in socket.live and socket.takes]
            names = [self.names[one.account] for one in due]

            def frames(
                mediator_fixture: RestartableMediator, socket: MirroredSocket = socket, names: list[str] = names
            ) -> list[Any]:
                end = socket.ends[mediator_fixture.backend]
                frames_sent, end.frames = end.frames, []
                left, deliveries = list(names), []
                for frame in frames_sent:
                    assert left, f"{mediator_fixture.backend}: {len(frames_sent)} frames for {len(names)} messages"
                    name = left[0]
                    deliveries.append(self._opened(mediator_fixture, frame, name))
                    for _ in deliveries[-1]["attachments"]:
                        left.remove(name)
                assert not left, f"{mediator_fixture.backend}: {len(left)} of {len(names)} messages not pushed"
                return deliveries

            for delivery in self.mediators.ask_all(frames):
                account, attachments = due[0].account, delivery["attachments"]
                self.learn(attachments, [one for one in due if one.account == account][: len(attachments)])
                for _ in attachments:
                    due.remove(next(one for one in due if one.account == account))

    def pass_time(self, seconds: int) -> None:
        """Let time pass second by second: messages due together have no guaranteed order."""
        for _ in range(seconds):
            for mediator in self.mediators.mediator_fixtures:
                mediator.advance(1.0)
            self.assert_pushed(self.expected.pass_time(1.0))

    def open_didcomm_socket(self) -> MirroredSocket:
        """Open a socket at each mediator."""
        socket = MirroredSocket(
            {mediator.backend: mediator.socket() for mediator in self.mediators.mediator_fixtures}
        )
        self.sockets.append(socket)
        return socket

    def close_socket(self, socket: MirroredSocket) -> None:
        """Close a socket."""
        self.sockets.remove(socket)
        for mediator in self.mediators.mediator_fixtures:
            mediator.disconnect(socket.ends[mediator.backend])

    def _read(self, mediator_fixture: RestartableMediator, reply: RequestReply, name: str | None) -> Answer:
        fault = reply.fault.reason if reply.fault else None
        if not reply.body:
            return reply.status, None, fault
        if "ciphertext" in encoding.loads_object(reply.body):
            assert name is not None, "an answer to nobody"
            return reply.status, self._opened(mediator_fixture, reply.body, name), fault
        return reply.status, read_problem_report(reply), fault

    def _opened(self, mediator_fixture: RestartableMediator, raw: bytes, name: str) -> dict[str, Any]:
        return encoding.loads_object(self.guests[name, mediator_fixture.backend].open(raw).plaintext)


def _payload(data: Mapping[str, Any]) -> bytes:
    return encoding.dumps(data["json"]) if "json" in data else encoding.decode_lenient_base64(data["base64"])
