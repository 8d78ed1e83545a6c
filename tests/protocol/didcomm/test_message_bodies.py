"""Bodies of coordination, pickup and the utility protocols (reference sections 5, 6, 7)."""

from typing import Any

import pytest

from mediatord.didcomm import utility_protocols
from mediatord.errors import InvalidBody, InvalidLimit, InvalidPagination, InvalidUpdates
from mediatord.protocol.didcomm import coordinate_mediation, message_pickup
from mediatord.protocol.didcomm.coordinate_mediation import MEDIATION_VERSIONS, RecipientPage, RecipientUpdate


def test_updates_in_order_under_both_names() -> None:
    """`recipient_did`, or Veramo's name; an unknown action is kept to be echoed (5.3, 10.3)."""
    body = {
        "updates": [
            {"recipient_did": "did:a:1", "action": "add"},
            {"recipient_key": "did:a:2", "action": "explode"},
        ]
    }
    assert coordinate_mediation.parse_updates(body) == [
        RecipientUpdate("did:a:1", "add"),
        RecipientUpdate("did:a:2", "explode"),
    ]


@pytest.mark.parametrize("updates", [None, {}, "x", [1], [{}], [{"recipient_did": 1, "action": "add"}], [{}] * 1001])
def test_invalid_updates(updates: object) -> None:
    """Section 11 row 22."""
    with pytest.raises(InvalidUpdates):
        coordinate_mediation.parse_updates({"updates": updates})


@pytest.mark.parametrize(
    "paginate",
    [
        [],
        {},
        {"limit": 1},
        {"offset": 0},
        {"limit": -1, "offset": 0},
        {"limit": 1, "offset": -1},
        {"limit": 1.0, "offset": 0},
        {"limit": True, "offset": 0},
        {"limit": "1", "offset": 0},
        {"limit": 2**40, "offset": 0},
    ],
)
def test_invalid_pages(paginate: object) -> None:
    """Both members, natural numbers (5.3)."""
    with pytest.raises(InvalidPagination):
        coordinate_mediation.parse_pagination({"paginate": paginate})


def test_page_size() -> None:
    """Without `paginate` up to 1000; never more."""
    assert coordinate_mediation.parse_pagination({}) == RecipientPage(0, 1000)
    assert coordinate_mediation.parse_pagination({"paginate": {"limit": 5000, "offset": 7}}) == RecipientPage(7, 1000)
    assert coordinate_mediation.parse_pagination({"paginate": {"limit": 0, "offset": 0}}) == RecipientPage(0, 0)


@pytest.mark.parametrize(
    ("dids", "page", "total", "pagination"),
    [
        (["a", "b"], RecipientPage(), 2, None),
        ([], RecipientPage(), 0, None),
        (["a"], RecipientPage(0, 1), 3, {"count": 1, "offset": 0, "remaining": 2}),
        (["c"], RecipientPage(2, 5), 3, {"count": 1, "offset": 2, "remaining": 0}),
        ([], RecipientPage(9, 5), 3, {"count": 0, "offset": 9, "remaining": 0}),
    ],
)
def test_pagination_only_if_incomplete(
    dids: list[str], page: RecipientPage, total: int, pagination: dict[str, int] | None
) -> None:
    """A strict test suite allows only the list when everything fits (5.2, 5.3)."""
    for version, member in ((2, "keys"), (3, "dids")):
        body = coordinate_mediation.make_query_response_body(MEDIATION_VERSIONS[version], dids, page, total)
        assert body.get("pagination") == pagination
        assert body[member] == [{"recipient_did": did} for did in dids]
        assert set(body) <= {member, "pagination"}


def test_routing_did_is_string_in_2_and_list_in_3() -> None:
    """Decision D13: each of two clients crashes on the other form."""
    assert coordinate_mediation.make_grant_body(MEDIATION_VERSIONS[2], "did:a:m") == {"routing_did": "did:a:m"}
    assert coordinate_mediation.make_grant_body(MEDIATION_VERSIONS[3], "did:a:m") == {"routing_did": ["did:a:m"]}


@pytest.mark.parametrize("limit", [None, 0, -1, 1.0, "1", True])
def test_invalid_limits(limit: object) -> None:
    """6.1: an integer of at least 1."""
    with pytest.raises(InvalidLimit):
        message_pickup.parse_limit({"limit": limit}, 100)


def test_limits_are_capped_silently() -> None:
    """6.1."""
    assert (message_pickup.parse_limit({"limit": 1}, 100), message_pickup.parse_limit({"limit": 10**9}, 100)) == (
        1,
        100,
    )


@pytest.mark.parametrize(("value", "live"), [(True, True), (False, False), ("true", True), ("false", False)])
def test_live_delivery_as_boolean_or_string(value: object, live: bool) -> None:
    """A public test suite sends a string (6.3)."""
    assert message_pickup.parse_live_delivery({"live_delivery": value}) is live


@pytest.mark.parametrize("value", [None, 1, 0, "yes", [], {}])
def test_live_delivery_as_other_value(value: object) -> None:
    """1 is not true, unlike in Python."""
    with pytest.raises(InvalidBody):
        message_pickup.parse_live_delivery({"live_delivery": value})


@pytest.mark.parametrize("ids", [None, "x", [1], ["a"] * 10_001])
def test_invalid_acknowledgements(ids: object) -> None:
    """Section 11 row 22."""
    with pytest.raises(InvalidBody):
        message_pickup.parse_message_ids({"message_id_list": ids})


def test_status_omits_unknown_members() -> None:
    """No nulls and no times of an empty queue; the recipient DID only if requested (6, 6.1)."""
    empty = message_pickup.make_status_body(
        count=0, total_bytes=0, oldest=None, newest=None, now=5.0, recipient_did=None, live=False
    )
    assert empty == {"message_count": 0, "total_bytes": 0, "live_delivery": False}
    full = message_pickup.make_status_body(
        count=2, total_bytes=9, oldest=10.9, newest=20.2, now=30.5, recipient_did="did:a:b", live=True
    )
    assert full == {
        "message_count": 2,
        "total_bytes": 9,
        "live_delivery": True,
        "longest_waited_seconds": 19,
        "oldest_received_time": 10,
        "newest_received_time": 20,
        "recipient_did": "did:a:b",
    }


@pytest.mark.parametrize(
    ("came", "form", "member"),
    [
        ("json", "as-received", "json"),
        ("base64", "as-received", "base64"),
        ("json", "base64", "base64"),
        ("base64", "json", "json"),
    ],
)
def test_exactly_one_data_member(came: Any, form: Any, member: str) -> None:
    """Decision D10: the received form or the configured one, never both."""
    attachment = message_pickup.make_delivery_attachment("1", b'{"ciphertext":"c"}', came, form)
    assert list(attachment["data"]) == [member]
    assert attachment["media_type"] == "application/didcomm-encrypted+json"


def found(*queries: tuple[str, str]) -> set[str]:
    return {feature["id"] for feature in utility_protocols.select_features(list(queries), 1024)}


def test_disclosed_features() -> None:
    """`*` anywhere is the only wildcard, the whole string must match, unknown feature types are ignored (7.2)."""
    assert found(("protocol", "https://didcomm.org/messagepickup/*")) == {"https://didcomm.org/messagepickup/3.0"}
    assert found(("protocol", "*mediation*")) == {
        "https://didcomm.org/coordinate-mediation/2.0",
        "https://didcomm.org/coordinate-mediation/3.0",
    }
    assert found(("protocol", "https://didcomm.org/routing/2.0")) == {"https://didcomm.org/routing/2.0"}
    assert found(("protocol", "https://didcomm.org/routing/2")) == set()
    assert found(("protocol", "https://didcomm.org/routing/2.")) == set()
    assert found(("goal-code", "*"), ("header", "*")) == {"request-mediate", "return_route"}
    assert found(("moon", "*")) == set()
    assert found(("protocol", "*a*b*c*d*e*f*g*")) == set()


def test_size_limit_is_disclosed_as_string() -> None:
    """As in the specification's example (7.2)."""
    assert (
        utility_protocols.select_features([("constraint", "max_receive_bytes")], 1024)[0]["max_receive_bytes"]
        == "1024"
    )


@pytest.mark.parametrize(
    "queries", [None, {}, [1], [{}], [{"feature-type": "protocol"}], [{"feature-type": 1, "match": "*"}], [{}] * 101]
)
def test_invalid_queries(queries: object) -> None:
    """Section 11 row 22."""
    with pytest.raises(InvalidBody):
        utility_protocols.parse_queries({"queries": queries})
