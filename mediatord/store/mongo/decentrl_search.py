"""
Finding stored and public events by their labels.

An event has a label for each thing that it is found by, all of them in one index with time and order of arrival; so
what one label is asked for is a range of that index. Of several things at once one is looked up, and the events are
looked at for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mediatord.store.mongo.decentrl_keys import Kind, label_of
from mediatord.store.mongo.decentrl_pages import Listing
from mediatord.store.mongo.decentrl_schema import LABELLED, Table
from mediatord.store.mongo.requests import Document

Group = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """
    What is looked for.

    :param everything: the label of all that is searched.
    :param groups: of each of these an event has to have at least one label.
    :param after: inclusive, like `before`.
    """

    everything: bytes
    groups: tuple[Group, ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return not self.groups and self.after is None and self.before is None

    def one_by_one(self) -> list[Search]:
        """A search for each of the groups alone."""
        return [replace(self, groups=(group,)) for group in self.groups]

    def beginning_at(self, time: float) -> Search:
        """The same from this time on, in the order of the search."""
        return replace(self, before=time) if self.newest_first else replace(self, after=time)

    def listing(self, table: Table, *, planned: bool = False) -> Listing:
        """
        What it finds.

        :param planned: the first group is looked up; else that is the server's choice.
        """
        order = -1 if self.newest_first else 1
        return Listing(
            collection=table.name,
            filter={"$and": [*self._labels(planned), *self._bounds()]},
            sort={"at": order, "seq": order},
            hint=LABELLED,
            projection={"tags": 1, "at": 1, "size": 1},
        )

    def _labels(self, planned: bool) -> list[Document]:
        first, *others = self.groups or ((self.everything,),)
        if planned:
            return [{"labels": _any_of(first)}, *[{"$nor": [{"labels": {"$nin": list(group)}}]} for group in others]]
        return [{"labels": _any_of(group)} for group in (first, *others)]

    def _bounds(self) -> list[Document]:
        bounds = {"$gte": self.after, "$lte": self.before}
        given = {operator: float(bound) for operator, bound in bounds.items() if bound is not None}
        return [{"at": given}] if given else []


def group_of(owner: bytes, kind: Kind, *texts: str, unprocessed: bool = False) -> Group:
    """Labels, each once."""
    return tuple([label_of(owner, kind, text, unprocessed=unprocessed) for text in dict.fromkeys(texts)])


def _any_of(group: Group) -> bytes | Document:
    return group[0] if len(group) == 1 else {"$in": list(group)}
