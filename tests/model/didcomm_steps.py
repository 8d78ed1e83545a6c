"""Steps of DIDComm wallets, and what must come of each."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, build_forward
from tests.in_memory_mediator import CM3, MP, PING
from tests.model.mirrored_mediators import LIMITS
from tests.model.mirrored_wallets import MOST_SOCKETS, NAMES, Answer, MirroredSocket, MirroredWallets
from tests.model.reference_model import ExpectedMessage, ForwardedPayloads

TTL = 259_200.0
# The one is the beginning of the other.
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
            self.update(name, [(self.did(name), "add"), (inbox, "add")])
        for _ in range(2):
            self.live(NAMES[0], self.open_socket())

    def any_did(self, data: st.DataObject) -> str:
        """That of a wallet, or one that anybody may have registered; some are more popular."""
        popular = [self.did(NAMES[0])] * 4 + [INBOXES[1]] * 3
        return data.draw(st.sampled_from([*popular, *map(self.did, NAMES), *INBOXES]))

    def a_socket(self, data: st.DataObject) -> MirroredSocket | None:
        """An open one, or none."""
        index = data.draw(st.integers(-1, len(self.sockets) - 1))
        return None if index < 0 else self.sockets[index]

    def for_account(self, name: str, answer: Answer) -> Any:
        """What an account is answered, and that nobody else is; None for who is none."""
        status, value, fault = answer
        if self.did(name) in self.expected.recipients:
            assert (status, fault) == (200, None), answer
            return value
        assert fault == "not_enrolled", answer
        return None

    def enrol(self, name: str) -> None:
        """Once or more often."""
        status, grant, _ = self.ask(name, f"{CM3}/mediate-request", {})
        assert (status, grant["type"]) == (200, f"{CM3}/mediate-grant")
        self.expected.recipients.setdefault(self.did(name), [])

    @rule(name=names, data=st.data(), actions=st.lists(st.sampled_from(["add", "remove"]), min_size=1, max_size=3))
    def update_some(self, name: str, data: st.DataObject, actions: list[str]) -> None:
        self.update(name, [(self.any_did(data), action) for action in actions])

    def update(self, name: str, updates: list[tuple[str, str]]) -> None:
        """Each entry has the result that those before it leave it."""
        body = {"updates": [{"recipient_did": did, "action": action} for did, action in updates]}
        answer = self.for_account(name, self.ask(name, f"{CM3}/recipient-update", body))
        if answer is not None:
            results = [self.expected.update(self.did(name), did, action) for did, action in updates]
            assert [one["result"] for one in answer["body"]["updated"]] == results

    @rule(name=names, data=st.data(), what=st.sampled_from(["enrol", "query", "replay", "malformed"]))
    def small_request(self, name: str, data: st.DataObject, what: str) -> None:
        """What there is little to go wrong with."""
        if what == "enrol":
            self.enrol(name)
        elif what == "query":
            self.recipients(name, data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3)))
        elif what == "replay":
            self.replay(name)
        else:
            status, _, fault = self.post(data.draw(malformed), None, self.a_socket(data))
            assert 400 <= status < 500 and fault is not None

    def recipients(self, name: str, offset: int, limit: int) -> None:
        """A page of recipient DIDs, in order of registration."""
        body = {"paginate": {"offset": offset, "limit": limit}}
        answer = self.for_account(name, self.ask(name, f"{CM3}/recipient-query", body))
        if answer is not None:
            dids = self.expected.recipients[self.did(name)][offset : offset + limit]
            assert answer["body"]["dids"] == [{"recipient_did": did} for did in dids]

    @rule(data=st.data(), times=st.integers(1, 4), sender=st.none() | names)
    def forward(self, data: st.DataObject, times: int, sender: str | None) -> None:
        """Several, for one recipient, and then perhaps a while in which some of them come due."""
        did = self.any_did(data)
        for _ in range(times):
            contents = data.draw(st.lists(sizes, min_size=1, max_size=3))
            self.forward_one(data, did, contents, sender)
        self.let_pass(data.draw(st.sampled_from([0, 4])))

    def forward_one(self, data: st.DataObject, did: str, contents: list[int], sender: str | None) -> None:
        """It is taken as a whole or not at all."""
        form, delay, span = data.draw(forms), data.draw(delays), data.draw(spans)
        now = self.mediators.now
        payloads = [self.payload(size) for size in contents]
        headers = {"delay_milli": delay or None, "expires_time": None if span is None else int(now) + span}
        status, _, _ = self.send(did, payloads, form, sender, self.a_socket(data), headers)
        fits = all(len(one) <= LIMITS.max_bytes for one in payloads)
        fine = self.expected.owner(did) is not None and fits and span != 0
        assert status == 202 if fine else 400 <= status < 500, status
        expires = now + (TTL if span is None else span)
        parcel = ForwardedPayloads(did, payloads, expires, now + delay / 1000 if delay else None)
        accepted = self.expected.accept([parcel]) if fine else []
        self.pushed([one for one in accepted if one.due_at is None])

    def send(
        self,
        next_: str,
        payloads: list[bytes],
        form: Any,
        sender: str | None,
        socket: MirroredSocket | None,
        headers: Any,
    ) -> Answer:
        """A forward, of somebody or of nobody."""
        document = self.mediators.first.document
        if sender is None:
            return self.post(anoncrypt(build_forward(next_, payloads, form=form, **headers), document), None, socket)
        message = build_forward(next_, payloads, form=form, **headers, **{"from": self.did(sender)})
        return self.post(authcrypt(message, self.identities[sender], document), sender, socket)

    @rule(data=st.data(), contents=st.lists(st.lists(sizes, min_size=1, max_size=2), min_size=1, max_size=3))
    def forward_to_ourselves(self, data: st.DataObject, contents: list[list[int]]) -> None:
        """All that is nested is taken, or nothing."""
        inner = [(self.any_did(data), [self.payload(size) for size in part]) for part in contents]
        document, now = self.mediators.first.document, self.mediators.now
        envelopes = [anoncrypt(build_forward(did, payloads), document) for did, payloads in inner]
        status, _, _ = self.send(self.mediators.first.did, envelopes, "json", None, self.a_socket(data), {})
        fits = all(len(one) <= LIMITS.max_bytes for _, payloads in inner for one in payloads)
        fine = fits and all(self.expected.owner(did) is not None for did, _ in inner)
        assert status == 202 if fine else 400 <= status < 500, status
        parcels = [ForwardedPayloads(did, payloads, now + TTL) for did, payloads in inner]
        self.pushed(self.expected.accept(parcels) if fine else [])

    @rule(name=names, data=st.data())
    def status(self, name: str, data: st.DataObject) -> None:
        did = data.draw(st.none() | st.just(self.any_did(data)))
        answer = self.ask(name, f"{MP}/status-request", {} if did is None else {"recipient_did": did})
        if did is not None and self.expected.owner(did) != self.did(name):
            assert answer[2] == "not_enrolled", answer
        elif (told := self.for_account(name, answer)) is not None:
            self.check_status(told["body"], self.expected.waiting(self.did(name), did))

    def check_status(self, body: dict[str, Any], waiting: list[ExpectedMessage]) -> None:
        """A status is about these messages."""
        assert body["message_count"] == len(waiting)
        assert body["total_bytes"] == sum(len(one.payload) for one in waiting)
        if waiting:
            times = [one.received_at for one in waiting]
            assert (body["oldest_received_time"], body["newest_received_time"]) == (times[0], times[-1])

    @rule(name=names, data=st.data(), limit=st.integers(-1, 6))
    def fetch(self, name: str, data: st.DataObject, limit: int) -> None:
        did = data.draw(st.none() | st.just(self.any_did(data)))
        self.fetch_some(name, did, limit, self.a_socket(data))

    def fetch_some(self, name: str, did: str | None, limit: int, socket: MirroredSocket | None) -> None:
        """The oldest that an account can see, of all or of one of its recipient DIDs."""
        body = {"limit": limit} if did is None else {"limit": limit, "recipient_did": did}
        answer = self.ask(name, f"{MP}/delivery-request", body, socket)
        if self.did(name) not in self.expected.recipients or limit < 1:
            assert answer[2] in ("not_enrolled", "bad_limit"), answer
        elif did is not None and self.expected.owner(did) != self.did(name):
            assert answer[2] == "not_enrolled", answer
        else:
            self.check_delivery(answer, self.expected.waiting(self.did(name), did)[:limit])

    def check_delivery(self, answer: Answer, letters: list[ExpectedMessage]) -> None:
        """A delivery has these messages; where there are none it is a status."""
        status, value, _ = answer
        assert status == 200
        if letters:
            assert value["type"] == f"{MP}/delivery"
            self.learn(value["attachments"], letters)
        else:
            assert (value["type"], value["body"]["message_count"]) == (f"{MP}/status", 0)

    @rule(name=st.sampled_from(NAMES), data=st.data(), digests=st.booleans(), answered=st.booleans())
    def acknowledge(self, name: str, data: st.DataObject, digests: bool, answered: bool) -> None:
        """Of what any wallet has seen, and of what nobody has: own messages go, others stay."""
        for one in NAMES[:2]:
            self.fetch_some(one, None, 3, None)
        aliases = data.draw(st.lists(st.sampled_from([*list(self.known)[-12:], "unknown"]), max_size=4))
        chosen = [self.known[one] for one in aliases if one in self.known]

        def body(mediator_fixture: Any) -> dict[str, Any]:
            ids = self.mediators.ids(mediator_fixture, aliases)
            return {"message_id_list": [sha256(one.payload).hexdigest() for one in chosen] if digests else ids}

        route = "all" if answered else "none"
        status, value, fault = self.ask(name, f"{MP}/messages-received", body, return_route=route)
        if self.did(name) not in self.expected.recipients:
            assert fault == "not_enrolled"
            return
        assert (status, fault) == (200 if answered else 202, None)
        self.expected.acknowledge(self.did(name), chosen)
        if value is not None:
            self.check_status(value["body"], self.expected.waiting(self.did(name)))

    @rule(name=names, data=st.data(), on=st.booleans())
    def change_live(self, name: str, data: st.DataObject, on: bool) -> None:
        socket = self.a_socket(data)
        if socket is not None and on:
            self.live(name, socket)
            return
        value = self.ask(name, f"{MP}/live-delivery-change", {"live_delivery": on}, socket)
        if socket is None and on and self.did(name) in self.expected.recipients:
            assert value[2] == "live_mode_unsupported"
        elif self.for_account(name, value) is not None and socket is not None:
            socket.live.discard(self.did(name))

    def live(self, name: str, socket: MirroredSocket) -> None:
        """From now on it is pushed to."""
        value = self.ask(name, f"{MP}/live-delivery-change", {"live_delivery": True}, socket)
        if self.for_account(name, value) is not None:
            assert value[1]["body"]["live_delivery"] is True
            socket.live.add(self.did(name))

    @rule(data=st.data(), what=st.sampled_from(["open", "open", "close", "stuck", "reads"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        """A socket comes and is live, goes, gets stuck, or reads again."""
        if what == "open" and len(self.sockets) < MOST_SOCKETS:
            self.live(data.draw(names), self.open_socket())
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
