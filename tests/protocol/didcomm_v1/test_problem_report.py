"""Problem reports of DIDComm v1: their codes, their threads, and the protocol that they belong to."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import (
    DeviceNotRegistered,
    InvalidUpdates,
    MediationNotGranted,
    MediatorError,
    MissingDeviceValue,
    RegistrationLimitExceeded,
)
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, parse_type, serialize_answer
from mediatord.protocol.didcomm_v1.problem_report import find_report_family, make_ack, make_problem_report
from mediatord.protocol.error_codes import DIDCOMM_ERROR_CODES


def _serialize(error: MediatorError, family: str | None = None, prefix: str = DIDCOMM_ORG) -> dict[str, Any]:
    answer = make_problem_report(error, "cause-0001", family)
    value: dict[str, Any] = json.loads(serialize_answer(answer, "report-0001", prefix, "thread-0001"))
    return value


class ProblemReportTests(SynchronousTestCase):
    def test_report(self) -> None:
        report = _serialize(InvalidUpdates(), prefix=OLD_PREFIX)
        self.assertEqual(
            report,
            {
                "@type": "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/notification/1.0/problem-report",
                "@id": "report-0001",
                "~thread": {"thid": "thread-0001", "pthid": "cause-0001"},
                "description": {"en": "updates must be a list of recipient updates", "code": "e.p.msg.bad-updates"},
            },
        )

    def test_codes_that_libraries_know(self) -> None:
        for error, code in (
            (MediationNotGranted(), "mediation_not_granted"),
            (MissingDeviceValue(), "missing-value"),
            (DeviceNotRegistered(), "not-registered-for-push-notifications"),
            (RegistrationLimitExceeded(), "e.m.req.registration-limited"),
        ):
            self.assertEqual(_serialize(error)["description"]["code"], code)

    def test_want_of_a_grant_is_reported_by_coordinate_mediation(self) -> None:
        wanted = "https://didcomm.org/coordinate-mediation/1.0/problem-report"
        self.assertEqual(_serialize(MediationNotGranted())["@type"], wanted)

    def test_family_of_the_request(self) -> None:
        report = _serialize(MediationNotGranted(), "push-notifications-fcm/1.0")
        self.assertEqual(report["@type"], "https://didcomm.org/push-notifications-fcm/1.0/problem-report")

    def test_every_error_has_texts(self) -> None:
        for error in DIDCOMM_ERROR_CODES:
            description = _serialize(error())["description"]
            self.assertTrue(description["en"] and description["code"], error)

    def test_families_with_reports_of_their_own(self) -> None:
        for type_, family in (
            ("coordinate-mediation/1.0/keylist-update", "coordinate-mediation/1.0"),
            ("push-notifications-apns/1.3/set-device-info", "push-notifications-apns/1.0"),
            ("coordinate-mediation/2.0/keylist-update", None),
            ("messagepickup/2.0/status-request", None),
            ("no type", None),
        ):
            for prefix in (DIDCOMM_ORG, OLD_PREFIX):
                self.assertEqual(find_report_family(parse_type(prefix + type_)), family)

    def test_ack(self) -> None:
        ack = json.loads(serialize_answer(make_ack(), "ack-0001", DIDCOMM_ORG, "thread-0001"))
        self.assertEqual(ack["@type"], "https://didcomm.org/notification/1.0/ack")
        self.assertEqual((ack["status"], ack["~thread"]), ("OK", {"thid": "thread-0001"}))
