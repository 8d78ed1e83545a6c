"""Who has registered a recipient DID: asked for every forward, so from memory where that is recent enough."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.internet.defer import Deferred, fail, succeed

from mediatord.errors import StoreUnavailable
from mediatord.protocol.canonical_did import did_digest
from mediatord.store.mongo.accounts import asking_for_owners
from mediatord.store.mongo.server import Server
from mediatord.store.owners import Owners
from mediatord.store.texts import is_storable

# Seconds; another node may have taken a DID away, which a deposit finds out in any case.
_LIFETIME = 2.0


class Ownership:
    """Questions that come while another one is under way are asked together."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: Owners[str] = Owners(now=server.clock.seconds, lifetime=_LIFETIME)
        self._waiting: dict[str, list[Deferred[str | None]]] = {}
        self._since = 0.0
        self._asking = False

    def known(self, recipient_did: str) -> str | None:
        """The account, if that was asked lately."""
        return self._known.get(recipient_did)

    def owner(self, recipient_did: str) -> Deferred[str | None]:
        if not self._server.answers:
            return fail(StoreUnavailable())
        account = self._known.get(recipient_did)
        if account is not None or not is_storable(recipient_did):
            return succeed(account)
        answer: Deferred[str | None] = Deferred()
        server, clock = self._server, self._server.clock
        left = max(server.began + server.patience - clock.seconds(), 0.0)
        # Others wait for the same question, which therefore has its own time.
        answer.addTimeout(left, clock, lambda _, __: fail(StoreUnavailable()))
        if not self._waiting:
            self._since = clock.seconds()
        self._waiting.setdefault(recipient_did, []).append(answer)
        if not self._asking:
            self._asking = True
            clock.callLater(0, self._ask)
        return answer

    def forget(self, dids: Iterable[str]) -> None:
        """Their registration may have changed."""
        self._known.forget(dids)

    def clear(self) -> None:
        """An account has another DID now."""
        self._known.clear()

    def _ask(self) -> None:
        answers, self._waiting = self._waiting, {}
        question = asking_for_owners(list(answers))
        asked = Deferred.fromCoroutine(self._server.ask("owner", question, since=self._since, prompt=True))
        asked.addCallback(lambda found: {bytes(one["did_digest"]): one["owner"][0]["did"] for one in found})
        asked.addCallbacks(self._found, self._failed, (answers, self._known.age), {}, (answers,))

    def _found(self, owners: dict[bytes, str], answers: dict[str, list[Deferred[str | None]]], age: int) -> None:
        self._go_on()
        for did, waiting in answers.items():
            account = owners.get(did_digest(did))
            self._known.keep(did, account, age)
            for answer in waiting:
                answer.callback(account)

    def _failed(self, _: object, answers: dict[str, list[Deferred[str | None]]]) -> None:
        self._go_on()
        for waiting in answers.values():
            for answer in waiting:
                answer.errback(StoreUnavailable())

    def _go_on(self) -> None:
        self._asking = bool(self._waiting)
        if self._asking:
            self._server.clock.callLater(0, self._ask)
