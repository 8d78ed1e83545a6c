"""Steps of Decentrl identities, with the expected results."""

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

IDENTITIES = ("ann", "ben", "cyn")
MAX_SOCKETS = 3

# Some have more to do than others.
identity_names = st.sampled_from(["ann", "ann", "ben", "ben", "cyn"])
texts = st.sampled_from(["x", "x", "y" * 30, "ü" * 30])
garbage = st.sampled_from([b"", b"{}", b"[]", b"garbage", b'{"header":{},"payload":"","signature":""}', b"\xff"])


@dataclass(eq=False, slots=True)
class ExpectedEvent:
    """A pending or acknowledged event."""

    sender: str
    recipient: str
    payload: str


@dataclass(eq=False, slots=True)
class MirroredDecentrlSocket:
    """One socket at every mediator, authenticated as one identity."""

    name: str
    ends: dict[str, InMemoryDecentrlSocket]


class DecentrlSteps(MirroredWallets):
    """Registration, events and public channels."""

    def __init__(self) -> None:
        super().__init__()
        self.decentrl_identities = {name: InMemoryIdentity(self.mediators.first, name) for name in IDENTITIES}
        self.registered: set[str] = set()
        self.friends: set[tuple[str, str]] = set()
        self.events: list[ExpectedEvent] = []
        self.sent = 0
        self.event_ids: dict[str, ExpectedEvent] = {}
        self.published: dict[str, list[str]] = {name: [] for name in IDENTITIES}
        self.decentrl_sockets: list[MirroredDecentrlSocket] = []
        for name, peer in (("ann", "ben"), ("ben", "ann")):
            self.register(name)
            self.add_contract(name, peer)

    def run_command(self, raws: Mapping[str, bytes] | bytes) -> tuple[int, dict[str, Any]]:
        """Send a command to all; return status and reply."""

        def request(mediator_fixture: RestartableMediator) -> list[Any]:
            reply = mediator_fixture.receive_command(
                raws if isinstance(raws, bytes) else raws[mediator_fixture.backend]
            )
            return [reply.status, json.loads(reply.body)]

        status, reply = self.mediators.ask_all(request)
        return status, reply

    def make_commands(
        self, name: str, type_: str, channel: str | None = None, **members: Any
    ) -> tuple[int, dict[str, Any]]:
        """A command with these members."""
        options = {"channel": channel} if channel else {}
        return self.run_command(self.decentrl_identities[name].command({"type": type_, **members}, **options))

    def is_refused(self, name: str, status: int) -> bool:
        """Whether the identity is not registered, and the command was refused."""
        if name in self.registered:
            return False
        assert status in (401, 403), status
        return True

    def register(self, name: str) -> None:
        """Register once or more often."""
        members = self.decentrl_identities[name].registration_request()
        status, _ = self.make_commands(name, "REQUEST_COMMUNICATION_CONTRACT", **members)
        assert status == 200
        self.registered.add(name)

    def add_contract(self, name: str, peer: str) -> None:
        """Add a contract that admits a peer."""
        if name == peer:
            return
        signed = self.decentrl_identities[peer].contract_with(self.decentrl_identities[name])
        status, _ = self.make_commands(name, "SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=signed)
        if not self.is_refused(name, status):
            assert status == 200
            self.friends.add((name, peer))

    @rule(name=identity_names, to=identity_names, payloads=st.lists(texts, min_size=1, max_size=4))
    def send_events(self, name: str, to: str, payloads: list[str]) -> None:
        """Send events to one recipient."""
        for payload in payloads:
            self.send_one_event(name, to, payload)

    def send_one_event(self, name: str, to: str, payload: str) -> None:
        """Send one event; the same command again is refused."""
        raw = self.decentrl_identities[name].command(payload, to=self.decentrl_identities[to].did, channel=PRIVATE)
        status, reply = self.run_command(raw)
        waiting = self.list_waiting(to)
        size = sum(len(one.payload.encode()) for one in [*waiting, ExpectedEvent(name, to, payload)])
        fits = len(waiting) < CAPS.pending and size <= CAPS.pending_bytes
        succeeds = to in self.registered and (to, name) in self.friends and fits
        assert (status == 200) == succeeds, (status, reply)
        if succeeds:
            event = ExpectedEvent(name, to, payload)
            self.events.append(event)
            self.sent += 1
            self.event_ids[reply["pendingEventId"]] = event
        self.assert_events_pushed([event] if succeeds else [])
        repeated = self.run_command(raw)
        assert repeated[0] != 200
        assert not succeeds or repeated == (401, {"type": "ERROR", "code": "DUPLICATE_NONCE"}), repeated

    def list_waiting(self, name: str, sender: str | None = None) -> list[ExpectedEvent]:
        """Pending events of an identity, oldest first."""
        return [event for event in self.events if event.recipient == name and sender in (None, event.sender)]

    @rule(name=identity_names, sender=st.none() | identity_names, page=st.integers(0, 2), size=st.integers(1, 5))
    def query_pending(self, name: str, sender: str | None, page: int, size: int) -> None:
        wanted = {} if sender is None else {"sender_did": self.decentrl_identities[sender].did}
        pagination = {"page": page, "page_size": size}
        status, reply = self.make_commands(name, "QUERY_PENDING_EVENTS", filter=wanted, pagination=pagination)
        if self.is_refused(name, status):
            return
        waiting = self.list_waiting(name, sender)
        assert reply["payload"]["pagination"]["total"] == len(waiting)
        found = reply["payload"]["pending_events"]
        assert [self.event_ids[item["id"]] for item in found] == waiting[page * size : (page + 1) * size]
        for item in found:
            event = self.event_ids[item["id"]]
            assert (item["payload"], item["sender_did"]) == (
                event.payload,
                self.decentrl_identities[event.sender].did,
            )

    @rule(name=identity_names, data=st.data())
    def acknowledge_events(self, name: str, data: st.DataObject) -> None:
        """Own events are removed; foreign and unknown ids have no effect."""
        some = st.lists(st.sampled_from([*list(self.event_ids)[-8:], "unknown"]), max_size=3)
        aliases = data.draw(some)
        new_identity = self.decentrl_identities[name]
        raws = {
            mediator.backend: new_identity.command(
                {"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": self.mediators.get_ids(mediator, aliases)}
            )
            for mediator in self.mediators.mediator_fixtures
        }
        status, _ = self.run_command(raws)
        if self.is_refused(name, status):
            return
        assert status == 200
        acknowledged = [self.event_ids[alias] for alias in aliases if alias in self.event_ids]
        self.events = [event for event in self.events if event.recipient != name or event not in acknowledged]

    @rule(name=identity_names, data=st.data(), what=st.sampled_from(["publish", "publish", "withdraw", "read"]))
    def use_channel(self, name: str, data: st.DataObject, what: str) -> None:
        """Use a public channel."""
        if what == "publish":
            tags = data.draw(st.lists(st.sampled_from("ab"), max_size=2))
            self.publish(name, data.draw(st.sampled_from(["news", "n" * 90])), tags)
        elif what == "withdraw":
            self.unpublish(name, data)
        self.read_public(name)

    def publish(self, name: str, event: str, tags: list[str]) -> None:
        """The event is published unless it exceeds the quota."""
        seed, at = self.decentrl_identities[name].seed, int(self.mediators.now)
        members = {
            "event": event,
            "tags": tags,
            "timestamp": at,
            "event_signature": sign_event(event, tags, at, seed),
        }
        status, reply = self.make_commands(name, "PUBLISH_PUBLIC_EVENT", PUBLIC, **members)
        if status == 200:
            self.published[name].append(reply["public_event_id"])
        else:
            # A registered identity may have exceeded its quota.
            assert self.is_refused(name, status) or status == 429

    def unpublish(self, name: str, data: st.DataObject) -> None:
        """Foreign events cannot be unpublished."""
        every = [id_ for ids in self.published.values() for id_ in ids]
        alias = data.draw(st.sampled_from([*every, "unknown"]))
        new_identity = self.decentrl_identities[name]
        raws = {
            mediator.backend: new_identity.command(
                {"type": "DELETE_PUBLIC_EVENT", "public_event_id": self.mediators.get_ids(mediator, [alias])[0]},
                channel=PUBLIC,
            )
            for mediator in self.mediators.mediator_fixtures
        }
        status, _ = self.run_command(raws)
        if not self.is_refused(name, status):
            assert (status == 200) == (alias in self.published[name])
            self.published[name] = [event for event in self.published[name] if event != alias]

    def read_public(self, name: str) -> None:
        """Everyone reads the channel, without authentication."""
        did = self.decentrl_identities[name].did

        def request(mediator_fixture: RestartableMediator) -> Any:
            reply = mediator_fixture.run(
                mediator_fixture.decentrl.dispatcher.public(did, {b"page_size": [b"100"]}, "192.0.2.1")
            )
            return json.loads(reply.body)

        page = self.mediators.ask_all(request)
        assert sorted(event["id"] for event in page["events"]) == sorted(self.published[name])

    @rule(
        name=identity_names,
        payload=texts,
        tags=st.lists(st.sampled_from("xy"), max_size=2),
        wanted=st.sampled_from("xy"),
    )
    def save_event(self, name: str, payload: str, tags: list[str], wanted: str) -> None:
        """Save an event and query saved ones."""
        did = self.decentrl_identities[name].did
        times = {"timestamp": int(self.mediators.now), "encrypted_tags": tags}
        event = {"sender_did": did, "recipient_did": self.decentrl_identities["ann"].did, "payload": payload, **times}
        status, _ = self.make_commands(name, "SAVE_EVENTS", events=[event])
        found, reply = self.make_commands(name, "QUERY_EVENTS", filter={"encrypted_tags": [wanted]})
        if not self.is_refused(name, found) and status == 200 and wanted in tags:
            assert payload in [one["payload"] for one in reply["payload"]["events"]]

    @precondition(lambda self: len(self.decentrl_sockets) < MAX_SOCKETS)
    @rule(name=identity_names)
    def open_decentrl_socket(self, name: str) -> None:
        """Only a registered identity can open a socket."""
        greeting = self.decentrl_identities[name].authentication_frame()
        mirrored = MirroredDecentrlSocket(
            name,
            {mediator.backend: InMemoryDecentrlSocket(mediator) for mediator in self.mediators.mediator_fixtures},
        )
        for value in mirrored.ends.values():
            value.send(greeting)
        (answer,) = self.mediators.ask_all(lambda one: mirrored.ends[one.backend].take_frames())
        assert (answer["type"] == "AUTH_SUCCESS") == (name in self.registered)
        self.decentrl_sockets.append(mirrored)
        if name not in self.registered:
            self.disconnect(mirrored)

    @precondition(lambda self: self.decentrl_sockets)
    @rule(data=st.data())
    def close_decentrl_socket(self, data: st.DataObject) -> None:
        self.disconnect(data.draw(st.sampled_from(self.decentrl_sockets)))

    def disconnect(self, mirrored: MirroredDecentrlSocket) -> None:
        """Close a socket."""
        self.decentrl_sockets.remove(mirrored)
        for mediator in self.mediators.mediator_fixtures:
            mirrored.ends[mediator.backend].protocol.stop()
            mediator.disconnect(mirrored.ends[mediator.backend].socket)

    def assert_events_pushed(self, events: list[ExpectedEvent]) -> None:
        """Each socket of a recipient got these events in order, and no other socket got any."""
        for mirrored in self.decentrl_sockets:
            frames = self.mediators.ask_all(partial(_read_frames, mirrored))
            events_pushed = [
                event for frame in frames if frame["type"] == "PENDING_EVENTS" for event in frame["events"]
            ]
            assert [self.event_ids[event["id"]] for event in events_pushed] == [
                event for event in events if event.recipient == mirrored.name
            ]

    @rule(name=identity_names, data=st.data(), what=st.sampled_from(["register", "befriend", "malformed"]))
    def run_small_command(self, name: str, data: st.DataObject, what: str) -> None:
        """Commands with little variation."""
        if what == "register":
            self.register(name)
        elif what == "befriend":
            self.add_contract(name, data.draw(identity_names))
        else:
            assert 400 <= self.run_command(data.draw(garbage))[0] < 500


def _read_frames(mirrored: MirroredDecentrlSocket, mediator_fixture: RestartableMediator) -> list[dict[str, Any]]:
    return mirrored.ends[mediator_fixture.backend].take_frames()
