"""Problem reports and acks of DIDComm v1 (Aries RFC 0035, 0015): the answers to a refusal and to a success."""

from __future__ import annotations

from mediatord.errors import MediationNotGranted, MediatorError
from mediatord.protocol.didcomm_v1.message import V1Answer, V1MessageType
from mediatord.protocol.error_codes import V1_PROBLEM_CODES, get_didcomm_error_code

NOTIFICATION = "notification/1.0"
COORDINATE_MEDIATION = "coordinate-mediation/1.0"
# Protocols that have a problem report of their own; refusals of others are reported by the general one.
_REPORTING_FAMILIES = frozenset({"coordinate-mediation", "push-notifications-fcm", "push-notifications-apns"})


def make_problem_report(error: MediatorError, cause_id: str, family: str | None = None) -> V1Answer:
    """
    The report of an error to a known sender, in the thread of the message that caused it.

    :param cause_id: `@id` of that message.
    :param family: with version, of the protocol whose problem report it is, such as `coordinate-mediation/1.0`; None
        for the general one, or, for want of a grant, that of coordinate mediation.
    """
    wire = get_didcomm_error_code(error)
    if family is None:
        family = COORDINATE_MEDIATION if isinstance(error, MediationNotGranted) else NOTIFICATION
    description = {"en": wire.comment, "code": V1_PROBLEM_CODES.get(type(error), wire.code)}
    return V1Answer(f"{family}/problem-report", {"description": description}, pthid=cause_id)


def make_handshake_report(error: MediatorError, type_: V1MessageType, request_id: str) -> V1Answer:
    """
    The report of DID Exchange or Connections that refuses a request to connect, in the thread of the request.

    Its name is that of the RFC in DID Exchange 1.0, which ACA-Py speaks, and else that of Credo.

    :param type_: of the request.
    :param request_id: its `@id`.
    """
    wire = get_didcomm_error_code(error)
    code = "request_not_accepted" if wire.retry_after is None else "request_processing_error"
    members = {"problem-code": code, "explain": wire.comment, "description": {"en": wire.comment, "code": code}}
    name = "problem_report" if (type_.family, type_.minor) == ("didexchange", 0) else "problem-report"
    return V1Answer(f"{type_.family}/1.{min(type_.minor, 1)}/{name}", members, thid=request_id)


def find_report_family(type_: V1MessageType) -> str | None:
    """The protocol whose problem report refuses a request of this type; None for the general one."""
    return f"{type_.family}/1.0" if type_.family in _REPORTING_FAMILIES and type_.major == 1 else None


def make_ack() -> V1Answer:
    """Confirms that a request was carried out (Aries RFC 0015)."""
    return V1Answer(f"{NOTIFICATION}/ack", {"status": "OK"})
