"""The content of attachments as it was sent (reference 2.2, 4.4)."""

from __future__ import annotations

from mediatord.protocol.didcomm.message import Message
from mediatord.protocol.json_source import EACH, JSONSource


def json_texts(message: Message) -> list[bytes | None]:
    """
    How the sender wrote `data.json` of each attachment; None where an attachment has none.

    :raise ValueError: more members than any message has, or values nested too deep.
    """
    attachments = message.attachments or ()
    if not any(_has_json(one.get("data")) for one in attachments):
        return [None] * len(attachments)
    source = JSONSource(message.source)
    spans = source.find("attachments", EACH, "data", "json")
    return [None if span is None else source.text(span) for span in spans]


def _has_json(data: object) -> bool:
    return isinstance(data, dict) and "json" in data
