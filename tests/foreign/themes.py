"""What every foreign wallet does with a mediator: one coroutine per theme, one step per thing that has to work."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from conversation import (
    CM2,
    CM3,
    DISCOVER,
    FORWARD,
    PICKUP,
    PING,
    REPORT,
    Library,
    Mediator,
    Session,
    a_chat,
    a_message,
    a_session,
    plain_report,
    send_chat,
    signed_report,
)
from steps import ENCRYPTED, PATIENCE_SECONDS, Answer, Steps, get, socket


async def introduction(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Find the mediator, resolve it, greet it, and ask what it does."""
    with steps.step("invitation"):
        invitation = get(f"{mediator.url}/invitation").json
        assert invitation["type"] == "https://didcomm.org/out-of-band/2.0/invitation", invitation
        assert invitation["from"] == mediator.did, invitation
    with steps.step("resolve") as detail:
        detail["endpoints"] = endpoints = await library.endpoints(mediator.did)
        assert [endpoint.partition(":")[0] for endpoint in endpoints] == ["http", "ws"], endpoints
        assert endpoints[0] == mediator.http, endpoints
    session = await a_session(library, mediator)
    with steps.step("trust-ping"):
        pong = await session.ask(PING, {"response_requested": True}, pthid=invitation["id"])
        assert pong["type"].endswith("trust-ping/2.0/ping-response"), pong
    with steps.step("trust-ping-without-response"):
        ping = a_message(PING, session.wallet, mediator.did, {"response_requested": False})
        answer = await session.send(ping)
        assert (answer.status, answer.body) == (202, b""), answer
    with steps.step("discover-features") as detail:
        queries = [{"feature-type": "protocol", "match": "https://didcomm.org/*"}]
        reply = await session.ask(DISCOVER + "queries", {"queries": queries})
        assert reply["type"] == DISCOVER + "disclose", reply
        detail["disclosed"] = disclosed = {d["id"]: d.get("roles") for d in reply["body"]["disclosures"]}
        for served in (CM2, CM3, PICKUP, "https://didcomm.org/routing/2.0/"):
            assert disclosed.get(served.rstrip("/")) == ["mediator"], served
    with steps.step("one-address-for-both-transports"):
        assert endpoints[1] == mediator.http.replace("http", "ws", 1), endpoints


async def mediation_3(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Coordinate mediation 3.0, from the request to an empty list again."""
    session = await a_session(library, mediator)
    did = session.wallet.did
    with steps.step("mediate-request"):
        grant = await session.ask(CM3 + "mediate-request")
        assert (grant["type"], grant["body"]) == (CM3 + "mediate-grant", {"routing_did": [mediator.did]}), grant
    for action, result in (("add", "success"), ("add", "no_change")):
        with steps.step(f"recipient-update-{action}-{result}"):
            updated = await _update(session, CM3 + "recipient-update", did, action)
            assert updated == {"recipient_did": did, "action": action, "result": result}, updated
    with steps.step("recipient-query"):
        listed = await session.ask(CM3 + "recipient-query")
        assert (listed["type"], listed["body"]) == (CM3 + "recipient", {"dids": [{"recipient_did": did}]}), listed
    with steps.step("recipient-update-remove"):
        assert (await _update(session, CM3 + "recipient-update", did, "remove"))["result"] == "success"
        listed = await session.ask(CM3 + "recipient-query", {"paginate": {"limit": 10, "offset": 0}})
        assert listed["body"] == {"dids": []}, listed


async def mediation_2(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Coordinate mediation 2.0: one string for the routing DID, and a list that is called `keys`."""
    session = await a_session(library, mediator)
    did = session.wallet.did
    with steps.step("mediate-request"):
        grant = await session.ask(CM2 + "mediate-request")
        assert (grant["type"], grant["body"]) == (CM2 + "mediate-grant", {"routing_did": mediator.did}), grant
    with steps.step("keylist-update"):
        updated = await _update(session, CM2 + "keylist-update", did, "add")
        assert updated == {"recipient_did": did, "action": "add", "result": "success"}, updated
    with steps.step("keylist-query"):
        listed = await session.ask(CM2 + "keylist-query")
        assert (listed["type"], listed["body"]) == (CM2 + "keylist", {"keys": [{"recipient_did": did}]}), listed


async def _update(session: Session, type_: str, did: str, action: str) -> dict[str, Any]:
    reply = await session.ask(type_, {"updates": [{"recipient_did": did, "action": action}]})
    assert reply["type"] == type_ + "-response", reply
    (updated,) = reply["body"]["updated"]
    return dict(updated)


async def pickup(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Messages of a second wallet wait, are fetched, open, and go once they are acknowledged."""
    bob, alice = await a_session(library, mediator), await a_session(library, mediator)
    with steps.step("enrol"):
        await bob.enrol()
        assert await bob.count() == 0
    letters = [(f"dear Bob, by {enc}: grüße ✓", enc, False) for enc in library.encs]
    letters.append(("guess who", library.encs[0], True))
    for content, enc, anonymous in letters:
        with steps.step(f"forward-{enc}{'-anonymous' if anonymous else ''}"):
            answer = await send_chat(alice, bob.wallet.did, content, enc, anonymous=anonymous)
            assert (answer.status, answer.body) == (202, b""), answer
    with steps.step("status-request"):
        assert await bob.count() == len(letters)
    with steps.step("delivery-request"):
        request = {"limit": 10, "recipient_did": bob.wallet.did}
        delivery = await bob.ask(PICKUP + "delivery-request", request)
        assert delivery["type"] == PICKUP + "delivery", delivery
        assert delivery["body"] == {"recipient_did": bob.wallet.did}, delivery["body"]
    with steps.step("attachments-open"):
        opened = await bob.attached(delivery)
        assert [o.message["body"]["content"] for o in opened] == [letter[0] for letter in letters], opened
        senders = [o.sender_kid and o.sender_kid.partition("#")[0] for o in opened]
        assert senders == [alice.wallet.did] * (len(letters) - 1) + [None], senders
    with steps.step("messages-received"):
        ids = [attachment["id"] for attachment in delivery["attachments"]]
        assert await bob.acknowledge(ids[:1]) == len(letters) - 1
        assert await bob.acknowledge(ids) == 0
    with steps.step("delivery-request-of-nothing"):
        status = await bob.ask(PICKUP + "delivery-request", {"limit": 1})
        assert status["type"] == PICKUP + "status", status
        assert status["body"]["message_count"] == 0, status


async def live(library: Library, mediator: Mediator, steps: Steps) -> None:
    """A message forwarded while the recipient listens is pushed, acknowledged on the socket, and gone."""
    bob, alice = await a_session(library, mediator), await a_session(library, mediator)
    with steps.step("enrol"):
        await bob.enrol()
    with steps.step("live-delivery-over-http-is-refused"):
        report = await bob.ask(PICKUP + "live-delivery-change", {"live_delivery": True})
        assert (report["type"], report["body"]["code"]) == (REPORT, "e.m.live-mode-not-supported"), report
        assert report["body"]["comment"] == "Connection does not support Live Delivery", report
    _, address = await library.endpoints(mediator.did)
    async with socket(address) as connection:

        async def say(type_: str, body: dict[str, Any]) -> None:
            message = a_message(type_, bob.wallet, mediator.did, body)
            await connection.send(await bob.wallet.authcrypt(message, mediator.did))

        async def hear() -> dict[str, Any]:
            frame = await asyncio.wait_for(connection.recv(), PATIENCE_SECONDS)
            assert isinstance(frame, str), "the mediator sends text frames"
            return await bob.read(frame)

        with steps.step("live-delivery-change"):
            await say(PICKUP + "live-delivery-change", {"live_delivery": True})
            status = await hear()
            assert status["type"] == PICKUP + "status", status
            assert status["body"]["live_delivery"] is True, status
        with steps.step("push"):
            answer = await send_chat(alice, bob.wallet.did, "now!", library.encs[0])
            assert (answer.status, answer.body) == (202, b""), answer
            delivery = await hear()
            assert delivery["type"] == PICKUP + "delivery", delivery
            (opened,) = await bob.attached(delivery)
            assert opened.message["body"] == {"content": "now!"}, opened
        with steps.step("acknowledge"):
            assert await bob.count() == 1
            await say(PICKUP + "messages-received", {"message_id_list": [delivery["attachments"][0]["id"]]})
            status = await hear()
            assert (status["type"], status["body"]["message_count"]) == (PICKUP + "status", 0), status
            assert await bob.count() == 0


async def refusals(library: Library, mediator: Mediator, steps: Steps) -> None:
    """What the mediator says no to, in the form that a foreign wallet can read."""
    alice, stranger = await a_session(library, mediator), await library.wallet(mediator.did)
    with steps.step("forward-to-unknown-recipient"):
        answer = await send_chat(alice, stranger.did, "anybody home?", library.encs[0])
        report = await signed_report(answer, alice)
        assert report["code"] == "e.p.me.res.not-found", report
        assert report["comment"] == "Recipient not registered with this mediator", report
    with steps.step("pickup-without-grant"):
        report = await alice.ask(PICKUP + "status-request")
        assert (report["type"], report["body"]["code"]) == (REPORT, "e.p.req.not_enroll"), report
    with steps.step("unsupported-message"):
        report = await alice.ask("https://didcomm.org/basicmessage/100.0/message", {"content": "?"})
        assert (report["type"], report["body"]["code"]) == (REPORT, "e.p.msg.unsupported"), report
    with steps.step("anonymous-mediate-request"):
        request = a_message(CM3 + "mediate-request", alice.wallet, mediator.did)
        report = plain_report(alice.post(await alice.wallet.anoncrypt(request, mediator.did)))
        assert report["code"] == "e.p.trust.authcrypt-required", report
    with steps.step("replay"):
        packed = await alice.wallet.authcrypt(
            a_message(CM3 + "mediate-request", alice.wallet, mediator.did), mediator.did
        )
        first, second = alice.post(packed), alice.post(packed)
        assert (await alice.read(first.body))["type"] == CM3 + "mediate-grant"
        assert (await alice.read(second.body))["body"]["code"] == "e.p.crypto.message.dejavu"
    with steps.step("envelope-for-somebody-else"):
        packed = await alice.wallet.anoncrypt(a_chat(alice.wallet, stranger.did, "misdirected"), stranger.did)
        report = plain_report(alice.post(packed))
        assert report["code"] == "e.p.trust.crypto", report


async def authcrypted_forward(library: Library, mediator: Mediator, steps: Steps) -> None:
    """A forward that says who sends it, with the payload in base64; a refusal is packed for that sender."""
    bob, alice = await a_session(library, mediator), await a_session(library, mediator)

    async def forward() -> Answer:
        inner = await alice.wallet.authcrypt(a_chat(alice.wallet, bob.wallet.did, "signed off"), bob.wallet.did)
        inner = inner if isinstance(inner, bytes) else inner.encode()
        message = a_message(FORWARD, alice.wallet, mediator.did, {"next": bob.wallet.did})
        payload = urlsafe_b64encode(inner).decode().rstrip("=")
        return await alice.send({**message, "attachments": [{"id": "1", "data": {"base64": payload}}]})

    with steps.step("unknown-recipient"):
        answer = await forward()
        assert (answer.status, answer.media_type) == (400, ENCRYPTED), answer
        assert (await alice.read(answer.body))["body"]["code"] == "e.p.me.res.not-found"
    with steps.step("accepted"):
        await bob.enrol()
        answer = await forward()
        assert (answer.status, answer.body) == (202, b""), answer
    with steps.step("base64-stays-base64"):
        delivery = await bob.ask(PICKUP + "delivery-request", {"limit": 1})
        (attachment,) = delivery["attachments"]
        assert set(attachment["data"]) == {"base64"}, set(attachment["data"])
        payload = attachment["data"]["base64"]
        opened = await bob.wallet.open(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        assert opened.message["body"] == {"content": "signed off"}, opened


COMMON = {
    "introduction": introduction,
    "mediation-3": mediation_3,
    "mediation-2": mediation_2,
    "pickup": pickup,
    "live": live,
    "authcrypted-forward": authcrypted_forward,
    "refusals": refusals,
}
