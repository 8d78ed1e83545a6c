"""What a reader of a public channel asks for in a URL (DCTRL-0007, reference 10.3)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from mediatord.errors import InvalidCommand
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.shapes import OPTIONAL, Label, PageNumber, PageSize, Shape, Tags, Time

# A number as JSON has it, and nothing around it: Python itself would take `1_0`, ` 1`, `+1` and `inf`.
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBERS = (b"after", b"before", b"page", b"page_size")


class PublicQuery(Shape):
    """All of it has to match; of the tags one is enough; bounds are inclusive, in the unit of the events."""

    tags: Tags = ()
    after: Annotated[Time | None, OPTIONAL] = None
    before: Annotated[Time | None, OPTIONAL] = None
    channel_id: Annotated[Label | None, OPTIONAL] = None
    page: PageNumber = 0
    page_size: PageSize = 20


def read_public_query(arguments: Mapping[bytes, Sequence[bytes]]) -> PublicQuery:
    """
    Read the query part of a URL; parameters that are unknown are passed over.

    :param arguments: all values of each parameter, percent-decoded.
    :raise InvalidCommand: a value that its parameter cannot have, or several where there is one at most.
    """
    try:
        asked: dict[str, Any] = {"tags": _tags(arguments.get(b"tags", ()))}
        asked |= {name.decode("ascii"): _number(arguments[name]) for name in _NUMBERS if name in arguments}
        if b"channel_id" in arguments:
            asked["channel_id"] = _single(arguments[b"channel_id"]).decode("utf-8")
        return PublicQuery.model_validate(asked)
    except ValueError:
        raise InvalidCommand from None


def _tags(values: Sequence[bytes]) -> list[str]:
    """Joined by commas, repeated, or both; between two commas with nothing in between there is no tag."""
    return [tag for value in values for tag in value.decode("utf-8").split(",") if tag]


def _number(values: Sequence[bytes]) -> Any:
    text = _single(values)
    if not _NUMBER.fullmatch(text):
        raise ValueError("not a number")
    return jsontext.loads(text)


def _single(values: Sequence[bytes]) -> bytes:
    if len(values) != 1:
        raise ValueError("not one value")
    return values[0]
