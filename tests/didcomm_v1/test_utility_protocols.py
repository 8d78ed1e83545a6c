"""Trust ping, discover features, and messages of DIDComm v1 that are never answered."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, V1Message, parse_type
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose
from tests.in_memory_mediator import InMemoryMediator
from tests.push.registries import MEDIATOR_ID, VAPID_PUBLIC_KEY, make_core_registry

PING = "trust_ping/1.0/ping"
QUERY = "discover-features/1.0/query"
QUERIES = "discover-features/2.0/queries"
ALL = {"~transport": {"return_route": "all"}}
SERVED = {
    "connections/1.0",
    "coordinate-mediation/1.0",
    "didexchange/1.0",
    "didexchange/1.1",
    "discover-features/1.0",
    "discover-features/2.0",
    "messagepickup/1.0",
    "messagepickup/2.0",
    "notification/1.0",
    "out-of-band/1.0",
    "out-of-band/1.1",
    "report-problem/1.0",
    "routing/1.0",
    "trust_ping/1.0",
}


class UtilityTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.wallet = InMemoryV1Wallet(self.in_memory)

    def ask_with_prefix(self, prefix: str, type_: str, **members: Any) -> V1Message:
        """The answer to a request whose type has this prefix, and which has it, too."""
        raw = self.wallet.pack(compose(type_, prefix, **ALL, **members))
        answer = self.wallet.open(self.in_memory.receive(raw).body)
        self.assertEqual(answer.type.prefix, prefix)
        return answer

    def code_of(self, type_: str, **members: Any) -> str:
        """Problem code of a refused request."""
        report = self.wallet.answer(type_, **members)
        self.assertEqual((report.type.family, report.type.name), ("notification", "problem-report"))
        code: str = report.members["description"]["code"]
        return code


class PingTests(UtilityTestCase):
    def test_response(self) -> None:
        """A response in the thread of the ping, unless none is requested; a connection is enough."""
        for prefix in (DIDCOMM_ORG, OLD_PREFIX):
            answer = self.ask_with_prefix(prefix, PING, comment="hello")
            self.assertEqual((answer.type.family, answer.type.name), ("trust_ping", "ping-response"))
            self.assertIn("/trust_ping/1.0/ping_response", "/" + answer.members["@type"])
        self.assertEqual(self.wallet.answer(PING, **{"~thread": {"thid": "thread-0001"}}).thid, "thread-0001")
        self.assertEqual(self.wallet.answer(PING, response_requested=True).type.name, "ping-response")

    def test_no_response(self) -> None:
        """None is sent where none is requested."""
        reply = self.wallet.ask(PING, response_requested=False)
        self.assertEqual((reply.status, reply.body), (202, b""))

    def test_malformed_wish(self) -> None:
        """What is not false asks for a response, as by default."""
        wishes: list[Any] = [None, "false", 0, [], {"response_requested": False}]
        for wish in wishes:
            self.assertEqual(self.wallet.answer(PING, response_requested=wish).type.name, "ping-response", wish)


class FeatureTests(UtilityTestCase):
    def list_protocols(self, query: str) -> dict[str, list[str]]:
        """Roles by the protocols that a query of 1.0 is told."""
        answer = self.wallet.answer(QUERY, query=query, comment="what do you speak?")
        self.assertEqual((answer.type.family, answer.type.name), ("discover-features", "disclose"))
        return {one["pid"]: one["roles"] for one in answer.members["protocols"]}

    def list_features(self, *queries: tuple[str, str]) -> list[dict[str, Any]]:
        """What queries of 2.0 are told."""
        entries = [{"feature-type": kind, "match": match} for kind, match in queries]
        answer = self.wallet.answer(QUERIES, queries=entries)
        self.assertEqual(answer.type.name, "disclosures")
        disclosures: list[dict[str, Any]] = answer.members["disclosures"]
        return disclosures

    def test_all(self) -> None:
        """All that is served, in both versions."""
        served = {DIDCOMM_ORG + name for name in SERVED}
        self.assertEqual(set(self.list_protocols("*")), served)
        self.assertEqual({one["id"] for one in self.list_features(("protocol", "*"))}, served)

    def test_disclosed_is_served(self) -> None:
        """Nothing is disclosed that the dispatcher does not serve, and nothing is kept back."""
        assert self.in_memory.didcomm.v1 is not None
        served = {key[:2] for key in self.in_memory.didcomm.v1._dispatcher._names}
        # Only one of its two requests, hangup, is carried out.
        served.remove(("did-rotate", 1))
        disclosed = {parse_type(f"{pid}/message").key[:2] for pid in self.list_protocols("*")}
        self.assertEqual(disclosed, served)

    def test_questions_of_wallets(self) -> None:
        """What Credo asks at its start."""
        pickup = f"{DIDCOMM_ORG}messagepickup/2.0"
        self.assertEqual(self.list_protocols(pickup), {pickup: ["mediator"]})
        (feature,) = self.list_features(("protocol", pickup))
        self.assertEqual(feature, {"feature-type": "protocol", "id": pickup, "roles": ["mediator"]})
        self.assertEqual(set(self.list_protocols(f"{DIDCOMM_ORG}messagepickup/3.*")), set())
        mediation = f"{DIDCOMM_ORG}coordinate-mediation/*"
        self.assertEqual(self.list_protocols(mediation), {f"{DIDCOMM_ORG}coordinate-mediation/1.0": ["mediator"]})
        self.assertEqual(
            self.list_features(("goal-code", "aries.vc.*")), [{"feature-type": "goal-code", "id": "aries.vc.mediate"}]
        )

    def test_former_prefix(self) -> None:
        """A query with the former prefix is answered in it."""
        for name in ("messagepickup/2.0", "messagepickup/2*"):
            self.assertEqual(set(self.list_protocols(OLD_PREFIX + name)), {f"{OLD_PREFIX}messagepickup/2.0"})
            (feature,) = self.list_features(("protocol", OLD_PREFIX + name))
            self.assertEqual(feature["id"], f"{OLD_PREFIX}messagepickup/2.0")
        self.ask_with_prefix(OLD_PREFIX, QUERY, query="*")

    def test_once(self) -> None:
        """A feature is disclosed once; unknown types contribute nothing."""
        pickup = f"{DIDCOMM_ORG}messagepickup/2.0"
        self.assertEqual(len(self.list_features(("protocol", "*"), ("protocol", pickup))), len(SERVED))
        self.assertEqual(self.list_features(("gov-fw", "*"), ("protocol", "none")), [])

    def test_push(self) -> None:
        """Protocols of push notifications where they are configured."""
        self.in_memory = InMemoryMediator(self, devices=make_core_registry)
        self.wallet = InMemoryV1Wallet(self.in_memory)
        fcm, apns = (f"{DIDCOMM_ORG}push-notifications-{name}/1.0" for name in ("fcm", "apns"))
        found = self.list_protocols("*push*")
        self.assertEqual(found, dict.fromkeys((fcm, apns, "urn:mediatord:web-push/1.0"), ["notification-sender"]))
        (feature,) = self.list_features(("protocol", "urn:mediatord:*"))
        self.assertEqual((feature["mediator"], feature["vapid_public_key"]), (MEDIATOR_ID, VAPID_PUBLIC_KEY))

    def test_malformed_queries(self) -> None:
        """Of either version."""
        for query in (None, 1, ["*"], {"query": "*"}, "x" * 513):
            self.assertEqual(self.code_of(QUERY, query=query), "e.p.msg.bad-body", query)
        entry = {"feature-type": "protocol", "match": "*"}
        malformed: list[Any] = [None, "*", entry, [None], [{}], [{**entry, "match": 1}], [entry] * 101]
        malformed += [[{**entry, "feature-type": []}], [{**entry, "match": "*" * 513}]]
        for queries in malformed:
            self.assertEqual(self.code_of(QUERIES, queries=queries), "e.p.msg.bad-body", queries)

    def test_hostile_wildcards(self) -> None:
        """Many wildcards cost no more than others: a hundred queries of them are answered."""
        self.assertEqual(self.list_features(*[("protocol", "*h*t*" * 100 + "!")] * 100), [])
        self.assertEqual(len(self.list_features(*[("protocol", "*" * 512)] * 100)), len(SERVED))


class UnansweredTests(UtilityTestCase):
    def test_never_answered(self) -> None:
        """Answers, acks and problem reports, whatever they say; however many of the latter come."""
        for type_ in (
            "trust_ping/1.0/ping_response",
            "trust_ping/1.0/ping-response",
            "discover-features/1.0/disclose",
            "discover-features/2.0/disclosures",
            "notification/1.0/ack",
            "notification/1.0/problem-report",
            "report-problem/1.0/problem-report",
            "coordinate-mediation/1.0/problem-report",
        ):
            descriptions: list[Any] = [{}, {"en": "x" * 10_000, "code": [[]]}]
            for description in descriptions:
                reply = self.wallet.ask(type_, description=description, status={})
                self.assertEqual((reply.status, reply.body), (202, b""), type_)
        replies = {self.wallet.ask("notification/1.0/problem-report").body for _ in range(30)}
        self.assertEqual(replies, {b""})

    def test_unknown_report(self) -> None:
        """Also of protocols that are not served."""
        self.assertEqual(self.wallet.ask("issue-credential/2.0/problem-report").body, b"")
