"""Steps of Decentrl identities, and what must come of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from mediatord.protocol.decentrl.crypto import sign_event
from tests.in_memory_identities import PRIVATE, PUBLIC, InMemoryDecentrlSocket, InMemoryIdentity
from tests.model.mirrored_mediators import CAPS
from tests.model.mirrored_wallets import MirroredWallets
from tests.model.restartable_mediator import RestartableMediator

PEOPLE = ("ann", "ben", "cyn")
MOST_LINES = 3

# Some have more to do than others.
people = st.sampled_from(["ann", "ann", "ben", "ben", "cyn"])
texts = st.sampled_from(["x", "x", "y" * 30, "ü" * 30])
garbage = st.sampled_from([b"", b"{}", b"[]", b"garbage", b'{"header":{},"payload":"","signature":""}', b"\xff"])


@dataclass(eq=False, slots=True)
class ExpectedEvent:
    """An event that waits, or did."""

    sender: str
    recipient: str
    payload: str


@dataclass(eq=False, slots=True)
class MirroredDecentrlSocket:
    """One and the same socket at every mediator, authenticated as one of the people."""

    name: str
    ends: dict[str, InMemoryDecentrlSocket]


class DecentrlSteps(MirroredWallets):
    """Registration, events and public channels."""

    def __init__(self) -> None:
        super().__init__()
        self.decentrl_identities = {name: InMemoryIdentity(self.mediators.first, name) for name in PEOPLE}
        self.registered: set[str] = set()
        self.friends: set[tuple[str, str]] = set()
        self.events: list[ExpectedEvent] = []
        self.sent = 0
        self.event_ids: dict[str, ExpectedEvent] = {}
        self.published: dict[str, list[str]] = {name: [] for name in PEOPLE}
        self.lines: list[MirroredDecentrlSocket] = []
        for name, peer in (("ann", "ben"), ("ben", "ann")):
            self.register(name)
            self.befriend(name, peer)

    def obey(self, raws: Mapping[str, bytes] | bytes) -> tuple[int, dict[str, Any]]:
        """A command to all: status and reply."""

        def ask(mediator_fixture: RestartableMediator) -> list[Any]:
            reply = mediator_fixture.obey(raws if isinstance(raws, bytes) else raws[mediator_fixture.backend])
            return [reply.status, json.loads(reply.body)]

        status, reply = self.mediators.same(ask)
        return status, reply

    def command(
        self, name: str, type_: str, channel: str | None = None, **members: Any
    ) -> tuple[int, dict[str, Any]]:
        """A command with these members."""
        options = {"channel": channel} if channel else {}
        return self.obey(self.decentrl_identities[name].command({"type": type_, **members}, **options))

    def refused(self, name: str, status: int) -> bool:
        """Whether somebody is not registered, and so is refused."""
        if name in self.registered:
            return False
        assert status in (401, 403), status
        return True

    def register(self, name: str) -> None:
        """Once or more often."""
        members = self.decentrl_identities[name].registration()
        status, _ = self.command(name, "REQUEST_COMMUNICATION_CONTRACT", **members)
        assert status == 200
        self.registered.add(name)

    def befriend(self, name: str, peer: str) -> None:
        """Let a peer write."""
        if name == peer:
            return
        signed = self.decentrl_identities[peer].contract_with(self.decentrl_identities[name])
        status, _ = self.command(name, "SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=signed)
        if not self.refused(name, status):
            assert status == 200
            self.friends.add((name, peer))

    @rule(name=people, to=people, payloads=st.lists(texts, min_size=1, max_size=4))
    def send_events(self, name: str, to: str, payloads: list[str]) -> None:
        """Some, to one recipient."""
        for payload in payloads:
            self.send_one(name, to, payload)

    def send_one(self, name: str, to: str, payload: str) -> None:
        """Once; the same command again is refused."""
        raw = self.decentrl_identities[name].command(payload, to=self.decentrl_identities[to].did, channel=PRIVATE)
        status, reply = self.obey(raw)
        waiting = self.waiting(to)
        size = sum(len(one.payload.encode()) for one in [*waiting, ExpectedEvent(name, to, payload)])
        fits = len(waiting) < CAPS.pending and size <= CAPS.pending_bytes
        fine = to in self.registered and (to, name) in self.friends and fits
        assert (status == 200) == fine, (status, reply)
        if fine:
            event = ExpectedEvent(name, to, payload)
            self.events.append(event)
            self.sent += 1
            self.event_ids[reply["pendingEventId"]] = event
        self.heard([event] if fine else [])
        again = self.obey(raw)
        assert again[0] != 200
        assert not fine or again == (401, {"type": "ERROR", "code": "DUPLICATE_NONCE"}), again

    def waiting(self, name: str, sender: str | None = None) -> list[ExpectedEvent]:
        """What waits for somebody, oldest first."""
        return [one for one in self.events if one.recipient == name and sender in (None, one.sender)]

    @rule(name=people, sender=st.none() | people, page=st.integers(0, 2), size=st.integers(1, 5))
    def pending(self, name: str, sender: str | None, page: int, size: int) -> None:
        wanted = {} if sender is None else {"sender_did": self.decentrl_identities[sender].did}
        pagination = {"page": page, "page_size": size}
        status, reply = self.command(name, "QUERY_PENDING_EVENTS", filter=wanted, pagination=pagination)
        if self.refused(name, status):
            return
        waiting = self.waiting(name, sender)
        assert reply["payload"]["pagination"]["total"] == len(waiting)
        found = reply["payload"]["pending_events"]
        assert [self.event_ids[one["id"]] for one in found] == waiting[page * size : (page + 1) * size]
        for one in found:
            event = self.event_ids[one["id"]]
            assert (one["payload"], one["sender_did"]) == (event.payload, self.decentrl_identities[event.sender].did)

    @rule(name=people, data=st.data())
    def acknowledge_events(self, name: str, data: st.DataObject) -> None:
        """Own ones go; those of others and unknown ones do nothing."""
        some = st.lists(st.sampled_from([*list(self.event_ids)[-8:], "unknown"]), max_size=3)
        aliases = data.draw(some)
        new_identity = self.decentrl_identities[name]
        raws = {
            one.backend: new_identity.command(
                {"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": self.mediators.ids(one, aliases)}
            )
            for one in self.mediators.mediator_fixtures
        }
        status, _ = self.obey(raws)
        if self.refused(name, status):
            return
        assert status == 200
        gone = [self.event_ids[one] for one in aliases if one in self.event_ids]
        self.events = [one for one in self.events if one.recipient != name or one not in gone]

    @rule(name=people, data=st.data(), what=st.sampled_from(["publish", "publish", "withdraw", "read"]))
    def channel(self, name: str, data: st.DataObject, what: str) -> None:
        """Of one of the people."""
        if what == "publish":
            tags = data.draw(st.lists(st.sampled_from("ab"), max_size=2))
            self.publish(name, data.draw(st.sampled_from(["news", "n" * 90])), tags)
        elif what == "withdraw":
            self.withdraw(name, data)
        self.read_public(name)

    def publish(self, name: str, event: str, tags: list[str]) -> None:
        """It is there, unless it is too much."""
        seed, at = self.decentrl_identities[name].seed, int(self.mediators.now)
        members = {
            "event": event,
            "tags": tags,
            "timestamp": at,
            "event_signature": sign_event(event, tags, at, seed),
        }
        status, reply = self.command(name, "PUBLISH_PUBLIC_EVENT", PUBLIC, **members)
        if status == 200:
            self.published[name].append(reply["public_event_id"])
        else:
            # Registered, it may have been too much.
            assert self.refused(name, status) or status == 429

    def withdraw(self, name: str, data: st.DataObject) -> None:
        """What is somebody else's is not there."""
        every = [id_ for ids in self.published.values() for id_ in ids]
        alias = data.draw(st.sampled_from([*every, "unknown"]))
        new_identity = self.decentrl_identities[name]
        raws = {
            one.backend: new_identity.command(
                {"type": "DELETE_PUBLIC_EVENT", "public_event_id": self.mediators.ids(one, [alias])[0]},
                channel=PUBLIC,
            )
            for one in self.mediators.mediator_fixtures
        }
        status, _ = self.obey(raws)
        if not self.refused(name, status):
            assert (status == 200) == (alias in self.published[name])
            self.published[name] = [one for one in self.published[name] if one != alias]

    def read_public(self, name: str) -> None:
        """Everybody sees it, without being asked who they are."""
        did = self.decentrl_identities[name].did

        def ask(mediator_fixture: RestartableMediator) -> Any:
            reply = mediator_fixture.done(
                mediator_fixture.decentrl.dispatcher.public(did, {b"page_size": [b"100"]}, "192.0.2.1")
            )
            return json.loads(reply.body)

        page = self.mediators.same(ask)
        assert sorted(one["id"] for one in page["events"]) == sorted(self.published[name])

    @rule(name=people, payload=texts, tags=st.lists(st.sampled_from("xy"), max_size=2), wanted=st.sampled_from("xy"))
    def archive(self, name: str, payload: str, tags: list[str], wanted: str) -> None:
        """Something is kept, and what is kept comes back."""
        did = self.decentrl_identities[name].did
        times = {"timestamp": int(self.mediators.now), "encrypted_tags": tags}
        event = {"sender_did": did, "recipient_did": self.decentrl_identities["ann"].did, "payload": payload, **times}
        status, _ = self.command(name, "SAVE_EVENTS", events=[event])
        found, reply = self.command(name, "QUERY_EVENTS", filter={"encrypted_tags": [wanted]})
        if not self.refused(name, found) and status == 200 and wanted in tags:
            assert payload in [one["payload"] for one in reply["payload"]["events"]]

    @precondition(lambda self: len(self.lines) < MOST_LINES)
    @rule(name=people)
    def call(self, name: str) -> None:
        """A socket is open for who is registered, and for nobody else."""
        greeting = self.decentrl_identities[name].greeting()
        line = MirroredDecentrlSocket(
            name, {one.backend: InMemoryDecentrlSocket(one) for one in self.mediators.mediator_fixtures}
        )
        for one in line.ends.values():
            one.say(greeting)
        (answer,) = self.mediators.same(lambda one: line.ends[one.backend].heard())
        assert (answer["type"] == "AUTH_SUCCESS") == (name in self.registered)
        self.lines.append(line)
        if name not in self.registered:
            self.hang_up(line)

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def end_call(self, data: st.DataObject) -> None:
        self.hang_up(data.draw(st.sampled_from(self.lines)))

    def hang_up(self, line: MirroredDecentrlSocket) -> None:
        """One less."""
        self.lines.remove(line)
        for one in self.mediators.mediator_fixtures:
            line.ends[one.backend].conversation.stop()
            one.hang_up(line.ends[one.backend].socket)

    def heard(self, events: list[ExpectedEvent]) -> None:
        """Every socket of a recipient has heard of these, in order, and nobody of anything else."""
        for line in self.lines:
            heard = self.mediators.same(partial(_read_frames, line))
            told = [one for frame in heard if frame["type"] == "PENDING_EVENTS" for one in frame["events"]]
            assert [self.event_ids[one["id"]] for one in told] == [
                one for one in events if one.recipient == line.name
            ]

    @rule(name=people, data=st.data(), what=st.sampled_from(["register", "befriend", "malformed"]))
    def small_command(self, name: str, data: st.DataObject, what: str) -> None:
        """What there is little to go wrong with."""
        if what == "register":
            self.register(name)
        elif what == "befriend":
            self.befriend(name, data.draw(people))
        else:
            assert 400 <= self.obey(data.draw(garbage))[0] < 500


def _read_frames(line: MirroredDecentrlSocket, mediator_fixture: RestartableMediator) -> list[dict[str, Any]]:
    return line.ends[mediator_fixture.backend].heard()
