"""What a mediator answers, read as strictly as it is specified (DCTRL-0004 section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from mediatord.protocol.decentrl.shapes import Shape
from mediatord.wallet.packing import Unreadable

Item = TypeVar("Item", bound=Shape)


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """:param total: how many there are in all."""

    items: tuple[Item, ...]
    page: int
    page_size: int
    total: int


class ContractRequest(Shape):
    """A request for a contract that waits for us."""

    id: str
    sender_did: str
    encrypted_contract_request: Annotated[str, Field(repr=False)]
    requestor_ephemeral_public_key: Annotated[str, Field(repr=False)]


class KeptContract(Shape):
    """A contract that the mediator keeps for us."""

    id: str
    signed_communication_contract: Annotated[dict[str, Any], Field(repr=False)]


class PendingEvent(Shape):
    """An event that waits for us."""

    id: str
    sender_did: str
    payload: Annotated[str, Field(repr=False)]


class StoredEvent(Shape):
    """An event that the mediator keeps for us, as it keeps it; the time is the one that we gave."""

    id: str
    payload: Annotated[str, Field(repr=False)]
    encrypted_tags: Annotated[list[str], Field(repr=False)]
    timestamp: float


class PublicEvent(Shape):
    """An event of a public channel; the time is Unix seconds."""

    id: str
    event: Annotated[str, Field(repr=False)]
    tags: Annotated[list[str], Field(repr=False)]
    timestamp: float
    event_signature: Annotated[str, Field(repr=False)]
    channel_id: str | None = None


class _Pagination(Shape):
    page: int
    page_size: int
    total: int


@dataclass(frozen=True, slots=True)
class Query(Generic[Item]):
    """:param name: what the reply calls its list."""

    command: str
    name: str
    kind: type[Item]


PENDING_REQUESTS = Query(
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS", "pending_communication_contract_requests", ContractRequest
)
CONTRACTS = Query("QUERY_COMMUNICATION_CONTRACTS", "communication_contracts", KeptContract)
PENDING_EVENTS = Query("QUERY_PENDING_EVENTS", "pending_events", PendingEvent)
EVENTS = Query("QUERY_EVENTS", "events", StoredEvent)


def read_page(value: Any, name: str, kind: type[Item]) -> Page[Item]:
    """
    A page of results.

    :param value: what has `name` and `pagination`.
    :raise Unreadable: it is not.
    """
    try:
        items = tuple(kind.model_validate(one) for one in value[name])
        pagination = _Pagination.model_validate(value["pagination"])
    except (KeyError, TypeError, ValueError):
        raise Unreadable(f"not a page of {name}") from None
    return Page(items, pagination.page, pagination.page_size, pagination.total)


def read_pushed(frame: Mapping[str, Any]) -> tuple[PendingEvent, ...]:
    """
    The events that a socket was told of; none when the frame is about contracts.

    :raise Unreadable: it is something else.
    """
    if frame.get("type") == "CONTRACTS_UPDATED":
        return ()
    try:
        if frame["type"] != "PENDING_EVENTS":
            raise ValueError
        return tuple(PendingEvent.model_validate(one) for one in frame["events"])
    except (KeyError, TypeError, ValueError):
        raise Unreadable("not a push") from None
