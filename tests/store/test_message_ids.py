"""Ids of messages that mediatord writes."""

from uuid import RFC_4122, UUID

from mediatord.store.interfaces.messages import new_didcomm_message_id


def test_didcomm_message_ids() -> None:
    """Different random UUIDs in their usual form, of all variants of RFC 9562, version 4."""
    texts = {new_didcomm_message_id() for _ in range(500)}
    assert len(texts) == 500
    ids = [UUID(text) for text in texts]
    assert {str(id_) for id_ in ids} == texts
    assert {(id_.version, id_.variant) for id_ in ids} == {(4, RFC_4122)}
    assert {text[19] for text in texts} == set("89ab")
