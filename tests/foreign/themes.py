"""Checks of every third-party wallet against a mediator: one coroutine per theme, one step per check."""

from __future__ import annotations

import asyncio
import json
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
    compose_chat,
    compose_message,
    open_session,
    plain_report,
    send_chat,
    signed_report,
)
from steps import ENCRYPTED, TIMEOUT_SECONDS, Response, Steps, get, socket

FCM = "https://didcomm.org/push-notifications-fcm/1.0/"
APNS = "https://didcomm.org/push-notifications-apns/1.0/"
WEB_PUSH = "urn:mediatord:web-push/1.0/"


async def introduction(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Discover the mediator, resolve and ping it, and query its features."""
    with steps.step("invitation"):
        invitation = get(f"{mediator.url}/invitation").json
        assert invitation["type"] == "https://didcomm.org/out-of-band/2.0/invitation", invitation
        assert invitation["from"] == mediator.did, invitation
    with steps.step("resolve") as detail:
        detail["endpoints"] = endpoints = await library.endpoints(mediator.did)
        assert [endpoint.partition(":")[0] for endpoint in endpoints] == ["http", "ws"], endpoints
        assert endpoints[0] == mediator.http, endpoints
    session = await open_session(library, mediator)
    with steps.step("trust-ping"):
        pong = await session.request(PING, {"response_requested": True}, pthid=invitation["id"])
        assert pong["type"].endswith("trust-ping/2.0/ping-response"), pong
    with steps.step("trust-ping-without-response"):
        ping = compose_message(PING, session.wallet, mediator.did, {"response_requested": False})
        response = await session.send(ping)
        assert (response.status, response.body) == (202, b""), response
    with steps.step("discover-features") as detail:
        queries = [{"feature-type": "protocol", "match": "https://didcomm.org/*"}]
        reply = await session.request(DISCOVER + "queries", {"queries": queries})
        assert reply["type"] == DISCOVER + "disclose", reply
        detail["disclosed"] = disclosed = {d["id"]: d.get("roles") for d in reply["body"]["disclosures"]}
        for served in (CM2, CM3, PICKUP, "https://didcomm.org/routing/2.0/"):
            assert disclosed.get(served.rstrip("/")) == ["mediator"], served
    with steps.step("one-address-for-both-transports"):
        assert endpoints[1] == mediator.http.replace("http", "ws", 1), endpoints


async def mediation_3(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Coordinate Mediation 3.0, from the request to an empty list again."""
    session = await open_session(library, mediator)
    did = session.wallet.did
    with steps.step("mediate-request"):
        grant = await session.request(CM3 + "mediate-request")
        assert (grant["type"], grant["body"]) == (CM3 + "mediate-grant", {"routing_did": [mediator.did]}), grant
    for action, result in (("add", "success"), ("add", "no_change")):
        with steps.step(f"recipient-update-{action}-{result}"):
            updated = await _update(session, CM3 + "recipient-update", did, action)
            assert updated == {"recipient_did": did, "action": action, "result": result}, updated
    with steps.step("recipient-query"):
        listed = await session.request(CM3 + "recipient-query")
        assert (listed["type"], listed["body"]) == (CM3 + "recipient", {"dids": [{"recipient_did": did}]}), listed
    with steps.step("recipient-update-remove"):
        assert (await _update(session, CM3 + "recipient-update", did, "remove"))["result"] == "success"
        listed = await session.request(CM3 + "recipient-query", {"paginate": {"limit": 10, "offset": 0}})
        assert listed["body"] == {"dids": []}, listed


async def mediation_2(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Coordinate Mediation 2.0: one string as routing DID, and a list named `keys`."""
    session = await open_session(library, mediator)
    did = session.wallet.did
    with steps.step("mediate-request"):
        grant = await session.request(CM2 + "mediate-request")
        assert (grant["type"], grant["body"]) == (CM2 + "mediate-grant", {"routing_did": mediator.did}), grant
    with steps.step("keylist-update"):
        updated = await _update(session, CM2 + "keylist-update", did, "add")
        assert updated == {"recipient_did": did, "action": "add", "result": "success"}, updated
    with steps.step("keylist-query"):
        listed = await session.request(CM2 + "keylist-query")
        assert (listed["type"], listed["body"]) == (CM2 + "keylist", {"keys": [{"recipient_did": did}]}), listed


async def _update(session: Session, type_: str, did: str, action: str) -> dict[str, Any]:
    reply = await session.request(type_, {"updates": [{"recipient_did": did, "action": action}]})
    assert reply["type"] == type_ + "-response", reply
    (updated,) = reply["body"]["updated"]
    return dict(updated)


async def pickup(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Messages of a second wallet are queued, fetched, unpacked and removed by the acknowledgement."""
    bob, alice = await open_session(library, mediator), await open_session(library, mediator)
    with steps.step("enrol"):
        await bob.enrol()
        assert await bob.count() == 0
    messages = [(f"dear Bob, by {enc}: grüße ✓", enc, False) for enc in library.encs]
    messages.append(("guess who", library.encs[0], True))
    for content, enc, anonymous in messages:
        with steps.step(f"forward-{enc}{'-anonymous' if anonymous else ''}"):
            response = await send_chat(alice, bob.wallet.did, content, enc, anonymous=anonymous)
            assert (response.status, response.body) == (202, b""), response
    with steps.step("status-request"):
        assert await bob.count() == len(messages)
    with steps.step("delivery-request"):
        request = {"limit": 10, "recipient_did": bob.wallet.did}
        delivery = await bob.request(PICKUP + "delivery-request", request)
        assert delivery["type"] == PICKUP + "delivery", delivery
        assert delivery["body"] == {"recipient_did": bob.wallet.did}, delivery["body"]
    with steps.step("attachments-open"):
        opened = await bob.attached(delivery)
        assert [o.message["body"]["content"] for o in opened] == [message[0] for message in messages], opened
        senders = [o.sender_kid and o.sender_kid.partition("#")[0] for o in opened]
        assert senders == [alice.wallet.did] * (len(messages) - 1) + [None], senders
    with steps.step("messages-received"):
        ids = [attachment["id"] for attachment in delivery["attachments"]]
        assert await bob.acknowledge(ids[:1]) == len(messages) - 1
        assert await bob.acknowledge(ids) == 0
    with steps.step("delivery-request-of-nothing"):
        status = await bob.request(PICKUP + "delivery-request", {"limit": 1})
        assert status["type"] == PICKUP + "status", status
        assert status["body"]["message_count"] == 0, status


async def live(library: Library, mediator: Mediator, steps: Steps) -> None:
    """A message for a listening recipient is pushed, acknowledged on the socket, and removed."""
    bob, alice = await open_session(library, mediator), await open_session(library, mediator)
    with steps.step("enrol"):
        await bob.enrol()
    with steps.step("live-delivery-over-http-is-refused"):
        report = await bob.request(PICKUP + "live-delivery-change", {"live_delivery": True})
        assert (report["type"], report["body"]["code"]) == (REPORT, "e.m.live-mode-not-supported"), report
        assert report["body"]["comment"] == "Connection does not support Live Delivery", report
    _, address = await library.endpoints(mediator.did)
    async with socket(address) as connection:

        async def send(type_: str, body: dict[str, Any]) -> None:
            message = compose_message(type_, bob.wallet, mediator.did, body)
            await connection.send(await bob.wallet.authcrypt(message, mediator.did))

        async def receive() -> dict[str, Any]:
            frame = await asyncio.wait_for(connection.recv(), TIMEOUT_SECONDS)
            assert isinstance(frame, str), "the mediator sends text frames"
            return await bob.read(frame)

        with steps.step("live-delivery-change"):
            await send(PICKUP + "live-delivery-change", {"live_delivery": True})
            status = await receive()
            assert status["type"] == PICKUP + "status", status
            assert status["body"]["live_delivery"] is True, status
        with steps.step("push"):
            response = await send_chat(alice, bob.wallet.did, "now!", library.encs[0])
            assert (response.status, response.body) == (202, b""), response
            delivery = await receive()
            assert delivery["type"] == PICKUP + "delivery", delivery
            (opened,) = await bob.attached(delivery)
            assert opened.message["body"] == {"content": "now!"}, opened
        with steps.step("acknowledge"):
            assert await bob.count() == 1
            await send(PICKUP + "messages-received", {"message_id_list": [delivery["attachments"][0]["id"]]})
            status = await receive()
            assert (status["type"], status["body"]["message_count"]) == (PICKUP + "status", 0), status
            assert await bob.count() == 0
        with steps.step("push-of-two"):
            attachments = []
            for content in ("first", "second"):
                message = compose_chat(alice.wallet, bob.wallet.did, content)
                envelope = json.loads(await alice.wallet.authcrypt(message, bob.wallet.did))
                attachments.append({"id": content, "data": {"json": envelope}})
            body = {"next": bob.wallet.did}
            forward = compose_message(FORWARD, alice.wallet, mediator.did, body, attachments=attachments)
            response = await alice.send(forward)
            assert (response.status, response.body) == (202, b""), response
            delivery = await receive()
            contents = [opened.message["body"]["content"] for opened in await bob.attached(delivery)]
            assert contents == ["first", "second"], delivery


async def refusals(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Refusals of the mediator, readable by the library."""
    alice, unregistered = await open_session(library, mediator), await library.wallet(mediator.did)
    with steps.step("forward-to-unknown-recipient"):
        response = await send_chat(alice, unregistered.did, "anybody home?", library.encs[0])
        report = await signed_report(response, alice)
        assert report["code"] == "e.p.me.res.not-found", report
        assert report["comment"] == "Recipient not registered with this mediator", report
    with steps.step("pickup-without-grant"):
        report = await alice.request(PICKUP + "status-request")
        assert (report["type"], report["body"]["code"]) == (REPORT, "e.p.req.not_enroll"), report
    with steps.step("unsupported-message"):
        report = await alice.request("https://didcomm.org/basicmessage/100.0/message", {"content": "?"})
        assert (report["type"], report["body"]["code"]) == (REPORT, "e.p.msg.unsupported"), report
    with steps.step("anonymous-mediate-request"):
        request = compose_message(CM3 + "mediate-request", alice.wallet, mediator.did)
        report = plain_report(alice.post(await alice.wallet.anoncrypt(request, mediator.did)))
        assert report["code"] == "e.p.trust.authcrypt-required", report
    with steps.step("replay"):
        packed = await alice.wallet.authcrypt(
            compose_message(CM3 + "mediate-request", alice.wallet, mediator.did), mediator.did
        )
        first, second = alice.post(packed), alice.post(packed)
        assert (await alice.read(first.body))["type"] == CM3 + "mediate-grant"
        assert (await alice.read(second.body))["body"]["code"] == "e.p.crypto.message.dejavu"
    with steps.step("envelope-for-somebody-else"):
        packed = await alice.wallet.anoncrypt(
            compose_chat(alice.wallet, unregistered.did, "misdirected"), unregistered.did
        )
        report = plain_report(alice.post(packed))
        assert report["code"] == "e.p.trust.crypto", report


async def authcrypted_forward(library: Library, mediator: Mediator, steps: Steps) -> None:
    """A forward with authenticated sender and base64 payload; a refusal is packed for that sender."""
    bob, alice = await open_session(library, mediator), await open_session(library, mediator)

    async def forward() -> Response:
        inner = await alice.wallet.authcrypt(compose_chat(alice.wallet, bob.wallet.did, "signed off"), bob.wallet.did)
        inner = inner if isinstance(inner, bytes) else inner.encode()
        message = compose_message(FORWARD, alice.wallet, mediator.did, {"next": bob.wallet.did})
        payload = urlsafe_b64encode(inner).decode().rstrip("=")
        return await alice.send({**message, "attachments": [{"id": "1", "data": {"base64": payload}}]})

    with steps.step("unknown-recipient"):
        response = await forward()
        assert (response.status, response.media_type) == (400, ENCRYPTED), response
        assert (await alice.read(response.body))["body"]["code"] == "e.p.me.res.not-found"
    with steps.step("accepted"):
        await bob.enrol()
        response = await forward()
        assert (response.status, response.body) == (202, b""), response
    with steps.step("base64-stays-base64"):
        delivery = await bob.request(PICKUP + "delivery-request", {"limit": 1})
        (attachment,) = delivery["attachments"]
        assert set(attachment["data"]) == {"base64"}, set(attachment["data"])
        payload = attachment["data"]["base64"]
        opened = await bob.wallet.open(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        assert opened.message["body"] == {"content": "signed off"}, opened


async def push_registration(library: Library, mediator: Mediator, steps: Steps) -> None:
    """Devices are registered with FCM and Web Push, which alone are configured."""
    session = await open_session(library, mediator)
    await session.enrol()
    with steps.step("disclosed") as detail:
        queries = [{"feature-type": "protocol", "match": "*push*"}]
        reply = await session.request(DISCOVER + "queries", {"queries": queries})
        detail["disclosed"] = disclosed = {d["id"]: d for d in reply["body"]["disclosures"]}
        assert set(disclosed) == {FCM.rstrip("/"), WEB_PUSH.rstrip("/")}, disclosed
        key = disclosed[WEB_PUSH.rstrip("/")]["vapid_public_key"]
        assert len(urlsafe_b64decode(key + "=")) == 65, key
    device = {"device_token": "bk3RNwTe3H0:CI2k_HHwgIpoDKCIZvvDMExUdFQ3P1", "device_platform": "android"}
    with steps.step("fcm-set"):
        reply = await session.request(FCM + "set-device-info", device)
        assert (reply["type"], reply["body"], reply["ack"]) == (FCM + "ack", {"status": "OK"}, [reply["thid"]]), reply
    with steps.step("fcm-get"):
        reply = await session.request(FCM + "get-device-info")
        assert (reply["type"], reply["body"]) == (FCM + "device-info", device), reply
    with steps.step("fcm-missing-value"):
        reply = await session.request(FCM + "set-device-info", {**device, "device_platform": None})
        assert (reply["type"], reply["body"]["code"]) == (REPORT, "e.p.msg.missing-value"), reply
    with steps.step("fcm-remove"):
        await session.request(FCM + "set-device-info", dict.fromkeys(device))
        reply = await session.request(FCM + "get-device-info")
        assert reply["body"]["code"] == "e.p.req.not-registered-for-push-notifications", reply
    subscription = {
        "endpoint": "https://push.example.net/push/1",
        "expirationTime": None,
        # The mediator's key is as good as another one.
        "keys": {"p256dh": key, "auth": "BTBZMqHH6r4Tts7J_aSIgg"},
    }
    with steps.step("web-push"):
        reply = await session.request(WEB_PUSH + "set-subscription", {"subscription": subscription})
        assert (reply["type"], reply["body"]) == (WEB_PUSH + "ack", {"status": "OK"}), reply
        reply = await session.request(WEB_PUSH + "get-subscription")
        assert reply["type"] == WEB_PUSH + "subscription", reply
        assert reply["body"] == {"subscription": subscription, "vapid_public_key": key}, reply
    with steps.step("apns-is-not-configured"):
        reply = await session.request(APNS + "set-device-info", {"device_token": "ab" * 32})
        assert (reply["type"], reply["body"]["code"]) == (REPORT, "e.p.msg.unsupported"), reply


COMMON = {
    "introduction": introduction,
    "mediation-3": mediation_3,
    "mediation-2": mediation_2,
    "pickup": pickup,
    "live": live,
    "authcrypted-forward": authcrypted_forward,
    "refusals": refusals,
    "push-registration": push_registration,
}
