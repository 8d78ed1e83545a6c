"""Forwarded payloads are opaque: the JSON text of an attachment arrives unchanged."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.forward import FORWARD, MAX_PAYLOAD_DEPTH
from mediatord.protocol.didcomm.jwe import encrypt_anoncrypt, encrypt_authcrypt
from mediatord.ratelimit.admission import RequestReply
from mediatord.wallet.didcomm_client import read_delivery
from tests.in_memory_mediator import MP, PEER, FakeSocket, InMemoryMediator, InMemoryWallet, code_of
from tests.protocol.json_texts import NO_JSON, NUMBERS, UNREADABLE, payloads

_BOUNDS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate]
)


def data_of(text: str) -> str:
    """A payload as `json`."""
    return f'{{"json":{text}}}'


def base64_of(text: str) -> str:
    """A payload as `base64`."""
    return f'{{"base64":"{encoding.encode_base64url(text.encode())}"}}'


class Sender:
    """Writes forwards by hand, as a library would reformat the payload."""

    def __init__(self, in_memory: InMemoryMediator, recipient: InMemoryWallet) -> None:
        self.in_memory, self.recipient = in_memory, recipient
        self.identity = InMemoryWallet(in_memory).identity
        self.keys = [(method.id, method.key) for method in in_memory.document.key_agreement]

    def plaintext(self, *data: str, headers: str = "") -> bytes:
        """A forward with one attachment per `data`; `headers` end with a comma."""
        attachments = ", ".join(f'{{"id" : "a", "data": {text} }}' for text in data)
        return (
            f'{{"id":"f-1","type":"{FORWARD}",{headers}"body":{{"next":"{self.recipient.did}"}},'
            f'"attachments":[ {attachments} ]}}'
        ).encode()

    def anonymous(self, *data: str, headers: str = "") -> bytes:
        """An anonymous forward."""
        return encrypt_anoncrypt(self.plaintext(*data, headers=headers), self.keys)

    def authenticated(self, *data: str) -> bytes:
        """An authenticated forward."""
        own = self.identity.agreement
        plaintext = self.plaintext(*data, headers=f'"from":"{self.identity.did}",')
        return encrypt_authcrypt(plaintext, (own.kid, own.private), self.keys)


class OpaqueTests(SynchronousTestCase):
    def setUp(self) -> None:
        limits = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}
        self.in_memory = InMemoryMediator(self, limits=limits)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.sender = Sender(self.in_memory, self.bob)

    def send_by_general_path(self, raw: bytes) -> RequestReply:
        """Post on the general path and return the reply."""
        return self.successResultOf(
            Deferred.fromCoroutine(self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER)))
        )

    def fetch_and_acknowledge(self, guest: InMemoryWallet | None = None) -> list[bytes]:
        """Fetch and acknowledge all messages."""
        guest = guest or self.bob
        delivered = read_delivery(guest.answer(f"{MP}/delivery-request", {"limit": 100}).message)
        guest.ask(f"{MP}/messages-received", {"message_id_list": [element.id for element in delivered]})
        return [item.payload for item in delivered]

    def last_push(self, socket: FakeSocket) -> list[bytes]:
        """Acknowledge the last push; its texts are in the frame unchanged."""
        opened = self.bob.open(socket.frames.pop())
        delivered = read_delivery(opened.message)
        self.bob.ask(f"{MP}/messages-received", {"message_id_list": [one.id for one in delivered]})
        for one in delivered:
            if one.form == "json":
                self.assertIn(b'"json":' + one.payload + b"}", opened.plaintext)
        return [one.payload for one in delivered]

    def test_all_paths(self) -> None:
        """
        Fast and general path, HTTP and socket, anonymous and authenticated, one and several, delayed, fetched and
        live.
        """
        socket = self.bob.go_live()
        talking = self.in_memory.socket()

        @_BOUNDS
        @given(payloads, payloads)
        def run(text: str, other: str) -> None:
            ways = (
                lambda: self.in_memory.receive(self.sender.anonymous(data_of(text))),
                lambda: self.send_by_general_path(self.sender.anonymous(data_of(text))),
                lambda: self.send_by_general_path(self.sender.authenticated(data_of(text))),
                lambda: self.in_memory.receive(self.sender.anonymous(data_of(text)), talking),
                lambda: self.in_memory.receive(self.sender.anonymous(base64_of(text))),
                lambda: self.send_by_general_path(self.sender.anonymous(base64_of(text))),
            )
            for way in ways:
                self.assertEqual(way().status, 202)
                self.assertEqual(self.last_push(socket), [text.encode()])
            several = [data_of(text), base64_of(other), data_of(other), data_of(text)]
            self.in_memory.receive(self.sender.anonymous(*several, headers='"delay_milli":1000,'))
            self.in_memory.clock.advance(2)
            self.assertEqual(self.last_push(socket), [item.encode() for item in (text, other, other, text)])

        run()
        self.assertEqual(talking.frames, [])

    def test_fetched_payloads(self) -> None:
        """In order of arrival, each unchanged."""

        @_BOUNDS
        @given(st.lists(payloads, min_size=1, max_size=5))
        def run(texts: list[str]) -> None:
            for text in texts:
                self.assertEqual(self.in_memory.receive(self.sender.anonymous(data_of(text))).status, 202)
            self.assertEqual(self.fetch_and_acknowledge(), [text.encode() for text in texts])

        run()

    def test_forms_are_equivalent(self) -> None:
        """The text is the same if requested in one form and sent in the other."""
        for form in ("json", "base64"):
            in_memory = InMemoryMediator(self, didcomm={"delivery_form": form}, limits={"ip_per_minute": 1000})
            bob = InMemoryWallet(in_memory).enrol()
            sender = Sender(in_memory, bob)
            for number in NUMBERS:
                text = f'{{"ciphertext": "\\u0041", "n" : [{number}],\n "ciphertext":"B"}}'
                for data in (data_of(text), base64_of(text)):
                    self.assertEqual(in_memory.receive(sender.anonymous(data)).status, 202)
            delivered = bob.fetch(100)
            self.assertEqual({element.form for element in delivered}, {form})
            self.assertTrue(all(b"\\u0041" in member.payload for member in delivered))
            numbers = [item.payload.partition(b"[")[2].partition(b"]")[0].decode() for item in delivered]
            self.assertEqual(numbers, [number for number in NUMBERS for _ in range(2)])

    def test_wrapped_payload(self) -> None:
        """Inside a forward of the mediator the text is unchanged too."""
        in_memory = InMemoryMediator(self, didcomm={"rewrap": True})
        bob = InMemoryWallet(in_memory).enrol()
        text = '{"n": 123456789012345678901234567890, "ciphertext":"\\u0041", "n":-0}'
        self.assertEqual(in_memory.receive(Sender(in_memory, bob).anonymous(data_of(text))).status, 202)
        (delivered,) = bob.fetch()
        self.assertIn(f'"data":{{"json":{text}}}'.encode(), bob.open(delivered.payload).plaintext)

    def test_long_payloads(self) -> None:
        """Whatever the length and its position."""
        long = "A" * 300_000
        for text in (
            f'{{"n" : 1e5, "ciphertext" : "{long}", "tag":1.0}}',
            f'{{"n" : 1e5, "ciphertext":"{long}\\u0041"}}',
            f'{{"n" : 1e5, "ciphertext":"", "tag" :"{long}"}}',
            f'{{"payload":"{long}", "signatures":[{{"n":-0}}]}}',
            f'{{"ciphertext":"{long}","ciphertext":"x"}}',
            f'{{"ciphertext":"x","ciphertext":"{long}"}}',
        ):
            for send in (self.in_memory.receive, self.send_by_general_path):
                self.assertEqual(send(self.sender.anonymous(data_of(text))).status, 202)
                self.assertEqual(self.fetch_and_acknowledge(), [text.encode()])

    def test_payload_position(self) -> None:
        """With duplicate members, of which the last counts, and other texts that look like the payload."""
        right, wrong = '{"ciphertext": "right"}', '{"ciphertext":"wrong"}'
        for data, headers in (
            (f'{{"json":{wrong},"json":{right}}}', ""),
            (f'{{"json":{wrong},"js\\u006fn":{right}}}', ""),
            (f'{{"js\\u006fn":{right}}}', ""),
            (f'{{"x":{{"json":{wrong}}},"json":{right}}}', ""),
            (f'{{"json":{right},"x":{{"json":{wrong}}}}}', ""),
            (f'{{"base64":"e30","json":{right}}}', ""),
            (data_of(right), f'"note":{{"json":{wrong}}},'),
            (data_of(right), f'"attachments":[{{"data":{{"json":{wrong}}}}}],'),
            (data_of(right), f'"note":"\\"json\\":{{","n":{data_of(wrong)},'),
            (f'{{"json":1,"json":{right}}},"data":{{"json":{right}}}, "x":{{}}', ""),
        ):
            for send in (self.in_memory.receive, self.send_by_general_path):
                reply = send(self.sender.anonymous(data, headers=headers))
                self.assertEqual((reply.status, self.fetch_and_acknowledge()), (202, [right.encode()]), data)

    def test_refuses_payload_that_recipients_cannot_parse(self) -> None:
        """It would block the recipient's queue; the same bytes as text are refused as well."""
        for bad in (*UNREADABLE, *NO_JSON):
            text = f'{{"ciphertext":"c","n":{bad}}}'
            for send in (self.in_memory.receive, self.send_by_general_path):
                reply = send(self.sender.anonymous(data_of(text)))
                self.assertEqual((reply.status, code_of(reply)), (400, "e.p.msg"), bad)
                reply = send(self.sender.anonymous(base64_of(text)))
                self.assertEqual((reply.status, code_of(reply)), (400, "e.p.msg.bad-attachment"), bad)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_depth_limit(self) -> None:
        """The depth limit is the same in either form."""
        for depth, status in ((MAX_PAYLOAD_DEPTH, 202), (MAX_PAYLOAD_DEPTH + 1, 400)):
            inner = f"{'[' * (depth - 1)}{']' * (depth - 1)}"
            text = f'{{"ciphertext":{inner}}}'
            for data in (data_of(text), base64_of(text)):
                for send in (self.in_memory.receive, self.send_by_general_path):
                    self.assertEqual(send(self.sender.anonymous(data)).status, status)
        self.assertEqual(
            {len(item) for item in self.fetch_and_acknowledge()},
            {len('{"ciphertext":}') + 2 * (MAX_PAYLOAD_DEPTH - 1)},
        )

    def test_many_members(self) -> None:
        """A payload may have any number of members; the message around it is limited."""
        members = ",".join(f'"{number}":0' for number in range(3000))
        fine = f'{{{members},"ciphertext":""}}'
        for send in (self.in_memory.receive, self.send_by_general_path):
            self.assertEqual(send(self.sender.anonymous(data_of(fine))).status, 202)
            self.assertEqual(self.fetch_and_acknowledge(), [fine.encode()])
            reply = send(self.sender.anonymous(data_of(fine), headers=f"{members},"))
            self.assertEqual((reply.status, code_of(reply)), (400, "e.p.msg.bad-attachment"))

    def test_forward_to_mediator_itself(self) -> None:
        """A nested forward is parsed from its own text."""
        text = '{"ciphertext" : "\\u0041", "n":18446744073709551616}'
        inner = self.sender.anonymous(data_of(text)).decode()
        outer = self.sender.plaintext(data_of(inner)).replace(self.bob.did.encode(), self.in_memory.did.encode())
        self.assertEqual(self.in_memory.receive(encrypt_anoncrypt(outer, self.sender.keys)).status, 202)
        self.assertEqual(self.fetch_and_acknowledge(), [text.encode()])
