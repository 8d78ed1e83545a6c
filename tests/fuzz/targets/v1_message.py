"""Messages of DIDComm v1 to a mediator, with arbitrary content, from wallets that have connected and from others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import MediatorError
from mediatord.protocol.didcomm_v1.connections import sign_field
from mediatord.protocol.didcomm_v1.did_document import DIDForm, make_own_document
from mediatord.protocol.didcomm_v1.did_exchange import make_signed_attachment
from mediatord.protocol.didcomm_v1.envelope import open_envelope, pack_anoncrypt, pack_authcrypt, parse_envelope
from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, parse_message
from mediatord.protocol.encoding import dumps
from mediatord.ratelimit.admission import RequestReply
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, get_identity, make_key
from tests.fuzz.fuzz_mediator import STATUSES, FuzzMediator
from tests.fuzz.targets import replace_words
from tests.http.in_memory_site import InMemorySite
from tests.in_memory_mediator import PEER
from tests.push.registries import APNS, FCM, make_core_registry

_NEWCOMER = make_key("newcomer")
# Longer than a forward to an unknown key waits.
_LONGEST_WAIT = (0.3,) * 5


class V1MessageTarget:
    """
    Plaintexts, packed as the mode says: `c` by an enrolled wallet, `a` anonymously to the routing key, `f` by that
    wallet to the routing key, `i` by a newcomer to the key of the invitation. A capital letter sends it by a socket.
    """

    words = (
        *(b'"@type"', b'"@id"', b'"~thread"', b'"~transport"', b'"~timing"', b'"return_route":"all"', b'"~attach"'),
        *(b"@OWN@", b"@KEY@", b"@BASE58@", b"@ROUTING@", b"@INVITATION@", b'"protected"', b'"msg"', b'"to"'),
        *(b'"recipient_key"', b'"updates"', b'"action":"add"', b'"did_doc~attach"', b'"connection"', b'"jws"'),
        *(b'"message_id_list"', b'"batch_size"', b'"limit"', b"https://didcomm.org/", OLD_PREFIX.encode(), b"/1.0/"),
    )
    longest = 16_384
    most_calls = (15_000, 30)
    most_memory = (4_000_000, 600)

    def __init__(self) -> None:
        self._mediator = FuzzMediator(self._prepare, devices=make_core_registry)
        self._guest: InMemoryV1Wallet = None  # type: ignore[assignment]  # there is one as soon as there is a mediator

    def _prepare(self, site_fixture: InMemorySite) -> None:
        self._guest = InMemoryV1Wallet(site_fixture, "guest").enrol()

    def close(self) -> None:
        """Stop the mediator."""
        self._mediator.close()

    def run(self, data: bytes) -> None:
        """Send the input, and check the reply and the store."""
        site_fixture = self._mediator.enter()
        identity, guest = get_identity(site_fixture), self._guest
        words = {
            b"@OWN@": guest.own_key.did_key,
            b"@KEY@": guest.recipient.did_key,
            b"@BASE58@": guest.recipient_base58,
            b"@ROUTING@": identity.routing_key.did_key,
            b"@INVITATION@": identity.invitation_key.did_key,
        }
        mode, plaintext = data[:1], replace_words(data[1:], words)
        is_newcomer = mode.lower() == b"i"
        sender = _NEWCOMER if is_newcomer else guest.key
        # Any message of a wallet that has connected completes its connection.
        without = () if is_newcomer else ("v1_connection",)
        raw = self._pack(mode.lower(), plaintext, sender)
        kept = self._mediator.store_content(*without)
        reply = self._send(site_fixture, raw, is_socket=mode.isupper())
        self._mediator.assert_no_failures()
        if self._is_refusal(reply, sender):
            assert self._mediator.store_content(*without) == kept, "stored, although it was refused"

    def _pack(self, mode: bytes, plaintext: bytes, sender: SigningKey) -> bytes:
        identity = get_identity(self._mediator.enter())
        if mode == b"a":
            return pack_anoncrypt(plaintext, identity.routing_key.did_key)
        if mode == b"i":
            return pack_authcrypt(plaintext, identity.invitation_key.did_key, sender)
        own_key = identity.routing_key if mode == b"f" else self._guest.own_key
        return pack_authcrypt(plaintext, own_key.did_key, sender)

    def _send(self, site_fixture: InMemorySite, raw: bytes, *, is_socket: bool) -> RequestReply:
        socket = site_fixture.socket() if is_socket else None
        receiving = Deferred.fromCoroutine(site_fixture.didcomm.receive(raw, MessageOrigin(PEER, socket), None))
        if not receiving.called:
            site_fixture.clock.pump(_LONGEST_WAIT)
        reply: RequestReply = site_fixture.test.successResultOf(receiving)
        if socket is not None:
            site_fixture.base.connections.closed(socket)
        site_fixture.clock.advance(0)
        return reply

    def _is_refusal(self, reply: RequestReply, sender: SigningKey) -> bool:
        """Whether the reply is a refusal; it has an envelope that the sender opens, or nothing."""
        assert reply.status in STATUSES | {404}, reply.status
        if not reply.body:
            return reply.status not in (200, 202)
        envelope = parse_envelope(reply.body)
        try:
            opened = open_envelope(envelope, envelope.recipients[0], sender)
        except MediatorError:
            raise AssertionError("an answer that its recipient cannot read") from None
        assert opened.sender is not None, "an anonymous answer"
        message = parse_message(opened.plaintext)
        assert message.type.prefix in (DIDCOMM_ORG, OLD_PREFIX), message.type
        assert 8 <= len(message.id) <= 64, "an id that Credo refuses"
        return message.type.name == "problem-report"

    def seeds(self) -> Iterable[bytes]:
        """One input for each message, in either prefix, by HTTP and socket, and handshakes in each form."""
        for type_, members in _MESSAGES:
            for number, mode in enumerate((b"c", b"C")):
                yield mode + _compose((DIDCOMM_ORG, OLD_PREFIX)[number] + type_, members)
        for members in _FORWARDS:
            for mode in (b"a", b"f", b"A"):
                yield mode + _compose(f"{DIDCOMM_ORG}routing/1.0/forward", members)
        yield from (b"i" + one for one in _make_handshakes())
        yield from (b"c", b"c{}", b"c[]", b'a{"@id":1}', b'c{"@type":"a","@id":"b"}', b"x", b"I")


def _compose(type_: str, members: dict[str, Any]) -> bytes:
    defaults = {"@type": type_, "@id": "message-1", "~transport": {"return_route": "all"}}
    return json.dumps({**defaults, **members}).encode()


def _make_handshakes() -> Iterable[bytes]:
    """Requests of a newcomer, who has made them with the same functions as the mediator makes its own documents."""
    thread = {"thid": "message-1", "pthid": "invitation"}
    forms: tuple[DIDForm, ...] = ("did:peer:1", "did:peer:2", "did:peer:4", "nym")
    for form in forms:
        own = make_own_document(form, _NEWCOMER, ["https://wallet.example/"])
        members: dict[str, Any] = {"did": own.did, "label": "a", "~thread": thread}
        if own.document is not None:
            attachment = make_signed_attachment(dumps(own.document), "application/json", _NEWCOMER)
            members["did_doc~attach"] = {"@id": "x", **attachment}
        for version in ("1.0", "1.1"):
            yield _compose(f"{DIDCOMM_ORG}didexchange/{version}/request", members)
    own = make_own_document("nym", _NEWCOMER, ["didcomm:transport/queue"])
    connection = {"DID": own.did, "DIDDoc": own.document}
    yield _compose(f"{OLD_PREFIX}connections/1.0/request", {"connection": connection, "label": "a"})
    signed = sign_field(connection, _NEWCOMER, 1, OLD_PREFIX)
    yield _compose(f"{OLD_PREFIX}connections/1.0/response", {"connection~sig": signed})
    yield _compose(f"{DIDCOMM_ORG}out-of-band/1.1/handshake-reuse", {"~thread": thread})
    yield _compose(f"{DIDCOMM_ORG}didexchange/1.1/complete", {"~thread": thread})


_INNER = {"protected": "e30", "iv": "AAAA", "ciphertext": "AAAA", "tag": "AAAA"}
_FORWARDS: tuple[dict[str, Any], ...] = (
    {"to": "@KEY@", "msg": _INNER},
    {"to": "@BASE58@", "msg": json.dumps(_INNER)},
    {"to": "@KEY@#a", "msg": {**_INNER, "recipients": []}, "~timing": {"expires_time": "2001-01-01T00:00:00Z"}},
    {"to": "@ROUTING@", "msg": _INNER},
    {"to": "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH", "msg": _INNER},
    {"to": "did:example:a", "msg": _INNER},
)
_UPDATES = [{"recipient_key": "@BASE58@", "action": "add"}, {"recipient_key": "did:key:z6Mk", "action": "add"}]
_NEW_KEY = {"recipient_key": "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH", "action": "add"}
_MESSAGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("coordinate-mediation/1.0/mediate-request", {}),
    ("coordinate-mediation/1.0/keylist-update", {"updates": [*_UPDATES, _NEW_KEY]}),
    ("coordinate-mediation/1.0/keylist-query", {"paginate": {"limit": 10, "offset": 0}}),
    ("messagepickup/2.0/status-request", {"recipient_key": "@KEY@"}),
    ("messagepickup/2.0/delivery-request", {"limit": 10, "recipient_key": "@BASE58@"}),
    ("messagepickup/2.0/messages-received", {"message_id_list": ["a", "b"]}),
    ("messagepickup/2.0/live-delivery-change", {"live_delivery": True}),
    ("messagepickup/1.0/batch-pickup", {"batch_size": 10}),
    ("messagepickup/1.0/status-request", {}),
    ("messagepickup/1.0/list-pickup", {"message_ids": ["a"]}),
    ("messagepickup/1.0/noop", {}),
    ("trust_ping/1.0/ping", {"response_requested": True}),
    ("trust_ping/1.0/ping", {"response_requested": False, "~timing": {"expires_time": "x"}}),
    ("discover-features/1.0/query", {"query": "https://didcomm.org/*"}),
    ("discover-features/2.0/queries", {"queries": [{"feature-type": "protocol", "match": "*"}]}),
    ("push-notifications-fcm/1.0/set-device-info", dict(FCM)),
    ("push-notifications-fcm/1.0/get-device-info", {}),
    ("push-notifications-apns/1.0/set-device-info", dict(APNS)),
    ("notification/1.0/problem-report", {"description": {"en": "a", "code": "b"}, "~thread": {"pthid": "x"}}),
    ("notification/1.0/ack", {"status": "OK"}),
    ("didexchange/1.1/complete", {"~thread": {"thid": "request of guest", "pthid": "invitation"}}),
    ("did-rotate/1.0/rotate", {"to_did": "did:example:a"}),
    ("out-of-band/1.1/handshake-reuse", {"~thread": {"pthid": "x"}}),
)


def make() -> V1MessageTarget:
    """Create the target."""
    return V1MessageTarget()
