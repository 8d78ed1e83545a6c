"""Statistics of a MongoDB store."""

from __future__ import annotations

from typing import Any

from mediatord.store.mongo.driver.collection import Document
from mediatord.store.mongo.driver.operation import Operation
from tests.store.mongo.mongo_test_case import MongoTestCase


class TableSizesTests(MongoTestCase):
    """Bytes of each collection."""

    async def test_collection_without_sizes_counts_nothing(self) -> None:
        """
        A collection that is just being created or dropped counts nothing, and the others are counted.

        The server's reply is modified, as the moment in which it has no sizes cannot be reproduced.
        """
        store = await self.open_store()
        complete = await store.table_sizes()
        self.assertGreater(complete["accounts"], 0)
        query, names = Operation.query, iter(sorted(complete))

        async def forget_first(run: Operation, *args: Any, **options: Any) -> list[Document]:
            found = await query(run, *args, **options)
            if next(names) == sorted(complete)[0]:
                found[0]["bytes"] = None
            return found

        self.patch(Operation, "query", forget_first)
        sizes = await store.table_sizes()
        self.assertEqual((sizes.keys(), list(sizes.values()).count(0)), (complete.keys(), 1))
