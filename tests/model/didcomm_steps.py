"""Steps of DIDComm wallets, with the expected results."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, build_forward
from tests.in_memory_mediator import CM3, MP, PING
from tests.model.mirrored_mediators import LIMITS
from tests.model.mirrored_wallets import MAX_SOCKETS, NAMES, Answer, MirroredSocket, MirroredWallets
from tests.model.reference_model import ExpectedMessage, ForwardedPayloads

TTL = 259_200.0
# One is a prefix of the other.
INBOXES = ("did:example:in", "did:example:inbox")

# Some have more to do than others.
names = st.sampled_from([*NAMES[:1] * 3, *NAMES[1:]])
sizes = st.sampled_from([20] * 6 + [100, 300, LIMITS.max_bytes + 1])
forms = st.sampled_from(["json", "base64"])
delays = st.sampled_from([0, 0, 0, 3_000, 20_000])
spans = st.sampled_from([None, None, None, 10, 15, 30, 0])
malformed = st.sampled_from(
    [b"", b"{}", b"garbage", b'{"ciphertext":"x","protected":"e30","recipients":[]}', b'{"type":"x"}', b"\xff"]
)


class DIDCommSteps(MirroredWallets):
    """Coordination, routing and pickup."""

    def __init__(self) -> None:
        super().__init__()
        for name, inbox in zip(NAMES, INBOXES, strict=False):
            self.enrol(name)
            self.update(name, [(self.get_did(name), "add"), (inbox, "add")])
        for _ in range(2):
            self.go_live(NAMES[0], self.open_didcomm_socket())

    def draw_did(self, data: st.DataObject) -> str:
        """A wallet's DID, or one that any wallet may have registered; some are more frequent."""
        popular = [self.get_did(NAMES[0])] * 4 + [INBOXES[1]] * 3
        return data.draw(st.sampled_from([*popular, *map(self.get_did, NAMES), *INBOXES]))

    def draw_socket(self, data: st.DataObject) -> MirroredSocket | None:
        """An open socket, or None."""
        index = data.draw(st.integers(-1, len(self.sockets) - 1))
        return None if index < 0 else self.sockets[index]

    def assert_answer(self, name: str, answer: Answer) -> Any:
        """An account gets this answer, others are refused; None for no account."""
        status, value, fault = answer
        if self.get_did(name) in self.expected.recipients:
            assert (status, fault) == (200, None), answer
            return value
        assert fault == "not_enrolled", answer
        return None

    def enrol(self, name: str) -> None:
        """Enrol once or more often."""
        status, grant, _ = self.request(name, f"{CM3}/mediate-request", {})
        assert (status, grant["type"]) == (200, f"{CM3}/mediate-grant")
        self.expected.recipients.setdefault(self.get_did(name), [])

    @rule(name=names, data=st.data(), actions=st.lists(st.sampled_from(["add", "remove"]), min_size=1, max_size=3))
    def update_several(self, name: str, data: st.DataObject, actions: list[str]) -> None:
        self.update(name, [(self.draw_did(data), action) for action in actions])

    def update(self, name: str, updates: list[tuple[str, str]]) -> None:
        """Each update has the result that follows from those before it."""
        body = {"updates": [{"recipient_did": did, "action": action} for did, action in updates]}
        answer = self.assert_answer(name, self.request(name, f"{CM3}/recipient-update", body))
        if answer is not None:
            results = [self.expected.update(self.get_did(name), did, action) for did, action in updates]
            assert [one["result"] for one in answer["body"]["updated"]] == results

    @rule(name=names, data=st.data(), what=st.sampled_from(["enrol", "query", "replay", "malformed"]))
    def send_small_request(self, name: str, data: st.DataObject, what: str) -> None:
        """Requests with little variation."""
        if what == "enrol":
            self.enrol(name)
        elif what == "query":
            self.list_recipients(name, data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3)))
        elif what == "replay":
            self.replay(name)
        else:
            status, _, fault = self.post(data.draw(malformed), None, self.draw_socket(data))
            assert 400 <= status < 500 and fault is not None

    def list_recipients(self, name: str, offset: int, limit: int) -> None:
        """A page of recipient DIDs, in order of registration."""
        body = {"paginate": {"offset": offset, "limit": limit}}
        answer = self.assert_answer(name, self.request(name, f"{CM3}/recipient-query", body))
        if answer is not None:
            dids = self.expected.recipients[self.get_did(name)][offset : offset + limit]
            assert answer["body"]["dids"] == [{"recipient_did": did} for did in dids]

    @rule(data=st.data(), times=st.integers(1, 4), sender=st.none() | names)
    def forward(self, data: st.DataObject, times: int, sender: str | None) -> None:
        """Several forwards for one recipient, and perhaps a time in which delayed ones come due."""
        did = self.draw_did(data)
        for _ in range(times):
            contents = data.draw(st.lists(sizes, min_size=1, max_size=3))
            self.forward_one(data, did, contents, sender)
        self.pass_time(data.draw(st.sampled_from([0, 4])))

    def forward_one(self, data: st.DataObject, did: str, contents: list[int], sender: str | None) -> None:
        """A forward is accepted as a whole or not at all."""
        form, delay, span = data.draw(forms), data.draw(delays), data.draw(spans)
        now = self.mediators.now
        payloads = [self.make_payload(size) for size in contents]
        headers = {"delay_milli": delay or None, "expires_time": None if span is None else int(now) + span}
        status, _, _ = self.send_forward(did, payloads, form, sender, self.draw_socket(data), headers)
        fits = all(len(payload) <= LIMITS.max_bytes for payload in payloads)
        succeeds = self.expected.find_owner(did) is not None and fits and span != 0
        assert status == 202 if succeeds else 400 <= status < 500, status
        expires = now + (TTL if span is None else span)
        forwarded = ForwardedPayloads(did, payloads, expires, now + delay / 1000 if delay else None)
        accepted = self.expected.accept([forwarded]) if succeeds else []
        self.assert_pushed([message for message in accepted if message.due_at is None])

    def send_forward(
        self,
        next_: str,
        payloads: list[bytes],
        form: Any,
        sender: str | None,
        socket: MirroredSocket | None,
        headers: Any,
    ) -> Answer:
        """Send a forward, authenticated or anonymous."""
        document = self.mediators.first.document
        if sender is None:
            return self.post(anoncrypt(build_forward(next_, payloads, form=form, **headers), document), None, socket)
        message = build_forward(next_, payloads, form=form, **headers, **{"from": self.get_did(sender)})
        return self.post(authcrypt(message, self.identities[sender], document), sender, socket)

    @rule(data=st.data(), contents=st.lists(st.lists(sizes, min_size=1, max_size=2), min_size=1, max_size=3))
    def forward_nested(self, data: st.DataObject, contents: list[list[int]]) -> None:
        """All nested payloads are accepted, or none."""
        inner = [(self.draw_did(data), [self.make_payload(size) for size in part]) for part in contents]
        document, now = self.mediators.first.document, self.mediators.now
        envelopes = [anoncrypt(build_forward(did, payloads), document) for did, payloads in inner]
        status, _, _ = self.send_forward(
            self.mediators.first.did, envelopes, "json", None, self.draw_socket(data), {}
        )
        fits = all(len(payload) <= LIMITS.max_bytes for _, payloads in inner for payload in payloads)
        succeeds = fits and all(self.expected.find_owner(did) is not None for did, _ in inner)
        assert status == 202 if succeeds else 400 <= status < 500, status
        forwarded_payloads = [ForwardedPayloads(did, payloads, now + TTL) for did, payloads in inner]
        self.assert_pushed(self.expected.accept(forwarded_payloads) if succeeds else [])

    @rule(name=names, data=st.data())
    def query_status(self, name: str, data: st.DataObject) -> None:
        did = data.draw(st.none() | st.just(self.draw_did(data)))
        answer = self.request(name, f"{MP}/status-request", {} if did is None else {"recipient_did": did})
        if did is not None and self.expected.find_owner(did) != self.get_did(name):
            assert answer[2] == "not_enrolled", answer
        elif (content := self.assert_answer(name, answer)) is not None:
            self.check_status(content["body"], self.expected.list_waiting(self.get_did(name), did))

    def check_status(self, body: dict[str, Any], waiting: list[ExpectedMessage]) -> None:
        """The status counts these messages."""
        assert body["message_count"] == len(waiting)
        assert body["total_bytes"] == sum(len(message.payload) for message in waiting)
        if waiting:
            times = [message.received_at for message in waiting]
            assert (body["oldest_received_time"], body["newest_received_time"]) == (times[0], times[-1])

    @rule(name=names, data=st.data(), limit=st.integers(-1, 6))
    def fetch(self, name: str, data: st.DataObject, limit: int) -> None:
        did = data.draw(st.none() | st.just(self.draw_did(data)))
        self.fetch_some(name, did, limit, self.draw_socket(data))

    def fetch_some(self, name: str, did: str | None, limit: int, socket: MirroredSocket | None) -> None:
        """The oldest visible messages of an account, of all or one of its recipient DIDs."""
        body = {"limit": limit} if did is None else {"limit": limit, "recipient_did": did}
        answer = self.request(name, f"{MP}/delivery-request", body, socket)
        if self.get_did(name) not in self.expected.recipients or limit < 1:
            assert answer[2] in ("not_enrolled", "bad_limit"), answer
        elif did is not None and self.expected.find_owner(did) != self.get_did(name):
            assert answer[2] == "not_enrolled", answer
        else:
            self.check_delivery(answer, self.expected.list_waiting(self.get_did(name), did)[:limit])

    def check_delivery(self, answer: Answer, messages: list[ExpectedMessage]) -> None:
        """A delivery has these messages; without any it is a status."""
        status, value, _ = answer
        assert status == 200
        if messages:
            assert value["type"] == f"{MP}/delivery"
            self.learn(value["attachments"], messages)
        else:
            assert (value["type"], value["body"]["message_count"]) == (f"{MP}/status", 0)

    @rule(name=st.sampled_from(NAMES), data=st.data(), digests=st.booleans(), answered=st.booleans())
    def acknowledge(self, name: str, data: st.DataObject, digests: bool, answered: bool) -> None:
        """Acknowledge known and unknown messages: own ones are removed, others stay."""
        for one in NAMES[:2]:
            self.fetch_some(one, None, 3, None)
        aliases = data.draw(st.lists(st.sampled_from([*list(self.known)[-12:], "unknown"]), max_size=4))
        chosen = [self.known[alias] for alias in aliases if alias in self.known]

        def body(mediator_fixture: Any) -> dict[str, Any]:
            ids = self.mediators.get_ids(mediator_fixture, aliases)
            return {"message_id_list": [sha256(item.payload).hexdigest() for item in chosen] if digests else ids}

        route = "all" if answered else "none"
        status, value, fault = self.request(name, f"{MP}/messages-received", body, return_route=route)
        if self.get_did(name) not in self.expected.recipients:
            assert fault == "not_enrolled"
            return
        assert (status, fault) == (200 if answered else 202, None)
        self.expected.acknowledge(self.get_did(name), chosen)
        if value is not None:
            self.check_status(value["body"], self.expected.list_waiting(self.get_did(name)))

    @rule(name=names, data=st.data(), on=st.booleans())
    def change_live_mode(self, name: str, data: st.DataObject, on: bool) -> None:
        socket = self.draw_socket(data)
        if socket is not None and on:
            self.go_live(name, socket)
            return
        value = self.request(name, f"{MP}/live-delivery-change", {"live_delivery": on}, socket)
        if socket is None and on and self.get_did(name) in self.expected.recipients:
            assert value[2] == "live_mode_unsupported"
        elif self.assert_answer(name, value) is not None and socket is not None:
            socket.live.discard(self.get_did(name))

    def go_live(self, name: str, socket: MirroredSocket) -> None:
        """From now on messages are pushed to the socket."""
        value = self.request(name, f"{MP}/live-delivery-change", {"live_delivery": True}, socket)
        if self.assert_answer(name, value) is not None:
            assert value[1]["body"]["live_delivery"] is True
            socket.live.add(self.get_did(name))

    @rule(data=st.data(), what=st.sampled_from(["open", "open", "close", "stuck", "reads"]))
    def change_socket(self, data: st.DataObject, what: str) -> None:
        """Open a live socket, close one, block one or unblock it."""
        if what == "open" and len(self.sockets) < MAX_SOCKETS:
            self.go_live(data.draw(names), self.open_didcomm_socket())
        elif what != "open" and self.sockets:
            socket = data.draw(st.sampled_from(self.sockets))
            if what == "close":
                self.close_socket(socket)
            for end in socket.ends.values():
                end.takes = what != "stuck"

    def replay(self, name: str) -> None:
        """The same request again is refused."""
        raw = self.guests[name, "memory"].pack(PING, {}, return_route="all")
        assert self.post(raw, name)[0] == 200
        assert self.post(raw, name)[2] == "replayed"
