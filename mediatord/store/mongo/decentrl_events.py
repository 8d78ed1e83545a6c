"""Slices of stored or public events, with what is long in them."""

from __future__ import annotations

from mediatord.interfaces.decentrl import Slice
from mediatord.store.mongo.decentrl_lists import Lists, Memory
from mediatord.store.mongo.decentrl_pages import Reading, check_slice
from mediatord.store.mongo.decentrl_parties import Party
from mediatord.store.mongo.decentrl_schema import Table
from mediatord.store.mongo.decentrl_search import Search
from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.server import finding


async def find_events(
    reading: Reading, memory: Memory, table: Table, party: Party, search: Search, part: Slice
) -> tuple[list[Document], int]:
    """
    The events of a slice, and how many match in all.

    :raise TooLarge: their payloads are more than a slice may have.
    """
    held: int = getattr(party, table.counter)
    if held <= memory.step:
        found, total = await reading.page(search.listing(table), part, held if search.is_all else None)
    else:
        edition = 0 if party.edition is None else int.from_bytes(party.edition.binary)
        reading = reading.patiently()
        found, total = await Lists(reading, table, memory, party.key, held, edition).read(search, part)
    check_slice(found)
    if not found:
        return [], total
    ids = [one["_id"] for one in found]
    payloads = await reading.ask(finding(table.payloads, {"_id": {"$in": ids}}, hint="_id_"))
    by_id = {one["_id"]: one for one in payloads}
    # What was taken back in between is not there.
    return [one | by_id[one["_id"]] for one in found if one["_id"] in by_id], total
