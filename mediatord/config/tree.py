"""YAML into plain values that remember the line they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

Key = str | int
Place = tuple[int, str]

# A few lines of aliases can stand for more values than there is memory for.
MAX_VALUES = 100_000
# What PyYAML raises for characters that YAML does not allow, for a tagged scalar that is no such thing, and for an
# alias of itself.
_UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


@dataclass
class Tree:
    """
    Values under their keys, and where each was written.

    :param name: of the file, as the user gave it.
    :param places: path of keys to (line for sorting, text in front of a problem).
    :param variables: keys that variables of the environment have set.
    :param problems: (line, place, text) of what is wrong already.
    :param complete: whether there is anything to check against the models.
    :param count: how many values there are, those of an alias counted wherever it stands.
    """

    name: str
    values: Any = field(default_factory=dict)
    places: dict[tuple[Key, ...], Place] = field(default_factory=dict)
    variables: set[tuple[Key, ...]] = field(default_factory=set)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    complete: bool = True
    count: int = 0

    def place(self, where: tuple[Key, ...]) -> Place:
        """Where this key is written, or the nearest above it."""
        for length in range(len(where), 0, -1):
            if where[:length] in self.places:
                return self.places[where[:length]]
        return 1, f"{self.name}:1"

    def note(self, where: tuple[Key, ...], mark: yaml.Mark) -> Place:
        """Remember that `where` is written at `mark`."""
        line = mark.line + 1
        self.places[where] = line, f"{self.name}:{line}"
        return self.places[where]


def read_tree(raw: bytes, name: str) -> Tree:
    """
    Parse one YAML document. Duplicate keys, too many values and what is no YAML are problems of the tree; an empty
    file is an empty mapping.
    """
    tree = Tree(name)
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(raw)
        root = loader.get_single_node()
        if root is not None:
            tree.values = _plain(loader, root, (), tree)
    except yaml.MarkedYAMLError as error:
        _refuse(tree, error.problem_mark or error.context_mark, error.problem or "unreadable")
    except _UNREADABLE:
        _refuse(tree, None, "unreadable")
    finally:
        if loader is not None:
            loader.dispose()
    return tree


def _refuse(tree: Tree, mark: yaml.Mark | None, problem: str) -> None:
    line = mark.line + 1 if mark else 1
    tree.complete = False
    tree.problems.append((line, f"{tree.name}:{line}", f"not YAML: {problem}"))


def _plain(loader: yaml.SafeLoader, node: yaml.Node, where: tuple[Key, ...], tree: Tree) -> Any:
    tree.count += 1
    if tree.count > MAX_VALUES:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_VALUES} values", problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, where, tree)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            tree.note((*where, index), item.start_mark)
        return [_plain(loader, item, (*where, index), tree) for index, item in enumerate(node.value)]
    return loader.construct_object(node)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, where: tuple[Key, ...], tree: Tree) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        # As written: `on:` and `8080:` are keys like any other.
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node.tag)
        if key in values:
            line, place = key_node.start_mark.line + 1, f"{tree.name}:{key_node.start_mark.line + 1}"
            first = tree.place((*where, key))[0]
            dotted = ".".join(str(part) for part in (*where, key))
            tree.problems.append((line, place, f"{dotted}: expected once; it is already in line {first}"))
            continue
        tree.note((*where, key), key_node.start_mark)
        values[key] = _plain(loader, value_node, (*where, key), tree)
    return values
