"""Refusals of Decentrl commands over HTTP; nothing of a refused command is stored (DCTRL-0004 11, reference 12)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from mediatord.wallet.decentrl_client import PRIVATE_CHANNEL, PUBLIC_CHANNEL
from tests.integration.raw_decentrl_client import JSON, RawDecentrlClient, send_request_on, unix_time
from tests.integration.refusal_test_case import (
    HTTP_PATH_HEADERS,
    OTHER_MEDIATOR,
    REQUEST,
    SAVE,
    SEALED,
    RefusalDaemonTestCase,
)
from tests.protocol.decentrl.mutations import replaced, to_json


class CodeTests(RefusalDaemonTestCase):
    """Refused commands; Bob has a contract with Alice, who has none."""

    alice: ClassVar[RawDecentrlClient]
    bob: ClassVar[RawDecentrlClient]
    carol: ClassVar[RawDecentrlClient]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.alice, cls.bob, cls.carol = (
            RawDecentrlClient(cls.daemon_client, alias) for alias in ("alice", "bob", "carol")
        )
        for one in (cls.alice, cls.bob):
            one.register()
        cls.bob.permit_sender(cls.alice)

    def test_refused_commands_store_nothing(self) -> None:
        """A command for each error code."""
        alice, bob, carol = self.alice, self.bob, self.carol
        save: dict[str, Any] = {"type": "SAVE_EVENTS", "events": [alice.stored_event("x")]}
        unsigned = replaced(bob.contract_with(alice), ("requestor_signature",), "")
        stale = int(unix_time() * 1000) - 301_000
        publish = {"type": "PUBLISH_PUBLIC_EVENT", **alice.public_event("news"), "event_signature": ""}
        delete = {"type": "DELETE_PUBLIC_EVENT", "public_event_id": "unknown"}
        done = alice.command("once", to=bob.did, channel=PRIVATE_CHANNEL)
        self.assertEqual(self.daemon_client.post_command(done).status, 200)
        cases: tuple[tuple[int, str, Callable[[], bytes]], ...] = (
            (400, "INVALID_COMMAND", lambda: b"{"),
            (401, "TIMESTAMP_OUT_OF_RANGE", partial(alice.command, save, timestamp_ms=stale)),
            (401, "DUPLICATE_NONCE", lambda: done),
            (404, "SENDER_NOT_FOUND", partial(alice.command, save, sender_did=OTHER_MEDIATOR)),
            (404, "SENDER_SIGNING_KEY_NOT_FOUND", partial(alice.command, save, sender_signing_key_id="#signing")),
            (401, "INVALID_SIGNATURE", lambda: to_json({**json.loads(alice.command(save)), "signature": "AAAA"})),
            (401, "UNAUTHORIZED_COMMAND", partial(carol.command, save)),
            (404, "RECIPIENT_NOT_FOUND", partial(alice.command, "x", to=OTHER_MEDIATOR, channel=PRIVATE_CHANNEL)),
            (404, "RECIPIENT_NOT_REGISTERED", partial(alice.command, "x", to=carol.did, channel=PRIVATE_CHANNEL)),
            (
                404,
                "COMMUNICATION_CONTRACT_NOT_FOUND",
                partial(bob.command, "x", to=alice.did, channel=PRIVATE_CHANNEL),
            ),
            (
                401,
                "INVALID_SIGNATURES",
                partial(alice.command, {"type": SAVE, "signed_communication_contract": unsigned}),
            ),
            (401, "INVALID_EVENT_SIGNATURE", partial(alice.command, publish, channel=PUBLIC_CHANNEL)),
            (404, "PUBLIC_EVENT_NOT_FOUND", partial(alice.command, delete, channel=PUBLIC_CHANNEL)),
        )
        for status, code, make in cases:
            with self.subTest(code=code):
                self.assert_refused(make, status, code)

    def test_concurrent_copies_are_carried_out_once(self) -> None:
        """One of many copies that arrive at the same time."""
        dave = self.register_identity("dave")
        dave.permit_sender(self.alice)
        for round_ in range(5):
            raw = self.alice.command(f"round {round_}", to=dave.did, channel=PRIVATE_CHANNEL)
            answers = self.daemon_client.post_concurrently([raw] * 12)
            self.assertEqual(sorted(answer.status for answer in answers), [200] + [401] * 11)
            for answer in answers:
                if answer.status == 401:
                    self.assert_error(answer, 401, "DUPLICATE_NONCE")
        self.assertEqual(
            [one["payload"] for one in dave.pending_events()], [f"round {number}" for number in range(5)]
        )

    def test_concurrent_commands_do_not_interfere(self) -> None:
        """Valid and invalid commands that arrive together are answered and stored independently."""
        dave, eve = self.register_identity("dave"), self.register_identity("eve")
        dave.permit_sender(self.alice)
        for _ in range(5):
            doubled = self.alice.command("twice", to=dave.did, channel=PRIVATE_CHANNEL)
            commands = list(self.mixed_commands(dave, eve))
            responses = [
                response.json
                for response in self.daemon_client.post_concurrently(
                    [*(raw for raw, _ in commands), doubled, doubled]
                )
            ]
            codes = [response["code"] if response["type"] == "ERROR" else "SUCCESS" for response in responses]
            self.assertEqual(codes[:-2], [code for _, code in commands])
            self.assertEqual(sorted(codes[-2:]), ["DUPLICATE_NONCE", "SUCCESS"])
        self.assertEqual(sorted(one["payload"] for one in dave.pending_events()), ["kept"] * 10 + ["twice"] * 5)
        self.assertEqual([one["payload"] for one in dave.query("EVENTS", "events")], ["kept"] * 20)
        self.assertEqual(len(dave.query("COMMUNICATION_CONTRACTS", "communication_contracts")), 6)
        self.assertEqual(len(dave.contract_requests()), 5)
        self.assertEqual(len(self.daemon_client.request("GET", f"/public/{dave.did}").json["events"]), 5)

    def mixed_commands(self, dave: RawDecentrlClient, eve: RawDecentrlClient) -> Iterator[tuple[bytes, str]]:
        """Commands and their outcomes; only Alice may send to Dave."""
        alice, carol = self.alice, self.carol
        save = {"type": "SAVE_EVENTS", "events": [dave.stored_event("kept", tags=("a",)), dave.stored_event("kept")]}
        contract = dave.contract_with(RawDecentrlClient(self.daemon_client, "somebody"))
        yield alice.command("kept", to=dave.did, channel=PRIVATE_CHANNEL), "SUCCESS"
        yield eve.command("never", to=dave.did, channel=PRIVATE_CHANNEL), "COMMUNICATION_CONTRACT_NOT_FOUND"
        yield alice.command("never", to=carol.did, channel=PRIVATE_CHANNEL), "RECIPIENT_NOT_REGISTERED"
        yield alice.command("kept", to=dave.did, channel=PRIVATE_CHANNEL), "SUCCESS"
        yield alice.command("never", to=OTHER_MEDIATOR, channel=PRIVATE_CHANNEL), "RECIPIENT_NOT_FOUND"
        yield dave.command(save), "SUCCESS"
        yield carol.command({"type": "SAVE_EVENTS", "events": [carol.stored_event("never")]}), "UNAUTHORIZED_COMMAND"
        yield dave.command(save), "SUCCESS"
        yield to_json({**json.loads(dave.command(save)), "signature": ""}), "INVALID_SIGNATURE"
        yield dave.command({"type": SAVE, "signed_communication_contract": contract}), "SUCCESS"
        yield eve.command({"type": SAVE, "signed_communication_contract": {}}), "INVALID_COMMAND"
        yield carol.command({"type": REQUEST, **SEALED}, to=dave.did), "SUCCESS"
        for event, code in (
            (dave.public_event("kept"), "SUCCESS"),
            (eve.public_event("never"), "INVALID_EVENT_SIGNATURE"),
        ):
            yield dave.command({"type": "PUBLISH_PUBLIC_EVENT", **event}, channel=PUBLIC_CHANNEL), code

    def test_connection_stays_open_after_refusals(self) -> None:
        """Refusals and then a success on one connection, each response to its own request."""
        query = {"type": "QUERY_EVENTS"}
        for way in HTTP_PATH_HEADERS:
            with contextlib.closing(self.daemon_client.connection()) as connection:
                for raw, code in (
                    (b"{", "INVALID_COMMAND"),
                    (self.carol.command(query), "UNAUTHORIZED_COMMAND"),
                    (self.alice.command(query, sender_signing_key_id="#x"), "SENDER_SIGNING_KEY_NOT_FOUND"),
                    (b"", "INVALID_COMMAND"),
                ):
                    answered = send_request_on(connection, "POST", "/", raw, {"Content-Type": JSON, **way})
                    self.assert_error(answered, answered.status, code)
                self.assertEqual(send_request_on(connection, "POST", "/", self.alice.command(query), way).status, 200)


class PageTests(RefusalDaemonTestCase):
    """Bounds of responses (reference 9, 12)."""

    def test_page_over_response_limit(self) -> None:
        """413 for a page too large for one response; smaller ones are served."""
        alice = self.register_identity("alice")
        filler = "x" * 900_000
        for _ in range(20):
            alice.execute("SAVE_EVENTS", events=[alice.stored_event(filler)])
            alice.publish(filler)
        query = {"type": "QUERY_EVENTS", "pagination": {"page_size": 1000}}
        self.assert_refused(partial(alice.command, query), 413, "PAYLOAD_TOO_LARGE")
        found = alice.execute("QUERY_EVENTS", pagination={"page": 1, "page_size": 10})["payload"]
        self.assertEqual((len(found["events"]), found["pagination"]["total"]), (10, 20))
        path = f"/public/{alice.did}?page_size="
        self.assert_error(self.daemon_client.request("GET", f"{path}1000"), 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(len(self.daemon_client.request("GET", f"{path}10").json["events"]), 10)

    def test_full_queue_can_be_read_by_pages(self) -> None:
        """A client that requests pages of a hundred events gets all of them (reference 9)."""
        alice, bob = self.register_identity("alice"), self.register_identity("bob")
        alice.permit_sender(bob)
        statuses = [bob.send_event(alice, "x" * 900_000).status for _ in range(20)]
        self.assertEqual(sorted(set(statuses)), [200, 429])
        found = alice.execute("QUERY_PENDING_EVENTS", pagination={"page_size": 100})["payload"]
        self.assertEqual(len(found["pending_events"]), statuses.count(200))
