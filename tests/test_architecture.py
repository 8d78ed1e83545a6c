"""What packages may use beyond their order, which `make lint` holds: libraries, clocks, the global reactor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import analytics
import mediatord
from mediatord.errors import MediatorError
from mediatord.protocol.error_codes import DECENTRL_CLOSE_CODES, DECENTRL_ERROR_CODES, DIDCOMM_ERROR_CODES

ROOT = Path(mediatord.__file__).parent

ANALYTICS = Path(analytics.__file__).parent
# What the batch jobs share with the daemon: the declaration of the events and the format of a line, and small things.
SHARED = {
    "mediatord",
    "mediatord.config.value_syntax",
    "mediatord.observability.event_schema",
    "mediatord.observability.pseudonyms",
    "mediatord.observability.segments",
    "mediatord.runtime.secret_files",
}
# Runs before there is a Java for Spark, or without any.
BEFORE_SPARK = "cli errors java job schema settings spark_session".split()
# The one module that asks Java itself, and the one that starts and ends it.
ASKS_JAVA = {"files.py", "spark_session.py"}
# Jobs that need a few rows to go on: for each epoch of the daemon's key, for each start of a node a day.
ASKS_FIRST = {name: {"collect"} for name in ("message_ledger.py", "reconciliation.py", "sessions.py")}

IMPURE = set(
    "asyncio concurrent http io logging multiprocessing os pathlib random select shutil signal socket sqlite3 "
    "subprocess sys tempfile threading time treq twisted".split()
)
CLOCKS = {"now", "utcnow", "today", "monotonic", "perf_counter", "time"}


class Import(NamedTuple):
    """:param function: the one it stands in; empty at the top of a module."""

    path: Path
    module: str
    function: str


def package_of(path: Path) -> str:
    """The package or module directly in mediatord that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    """All of ours."""
    return sorted(ROOT.rglob("*.py"))


def analysts() -> list[Path]:
    """All of the batch jobs."""
    return sorted(ANALYTICS.rglob("*.py"))


@cache
def imports(path: Path) -> list[Import]:
    """Every import in a file; `from a import b` counts as one of `a.b`."""
    return list(_imports(path, ast.parse(path.read_text("utf-8")), ""))


def _imports(path: Path, node: ast.AST, function: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(path, alias.name, function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(path, f"{child.module}.{alias.name}", function) for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(path, child, child.name)
        else:
            yield from _imports(path, child, function)


def _module_of(imported: str) -> str:
    """The module that `a.b.name` is of, where `a.b` is a file or package of ours."""
    path = ROOT.parent.joinpath(*imported.split("."))
    return imported if path.with_suffix(".py").exists() or path.is_dir() else imported.rpartition(".")[0] or imported


def test_nothing_imports_the_tests_or_the_analytics() -> None:
    """The contract with analytics is the schema of the events, not code."""
    foreign = {one.module.split(".")[0] for path in sources() for one in imports(path)}
    assert not foreign & {"tests", "analytics"}


def test_analytics_knows_little_of_the_daemon() -> None:
    """The declaration of the events, how tags and files with secrets are made, its version; and no test."""
    used = {_module_of(one.module) for path in analysts() for one in imports(path)}
    assert {module for module in used if module.split(".")[0] in {"mediatord", "tests", "twisted"}} <= SHARED


@pytest.mark.parametrize("name", BEFORE_SPARK)
def test_spark_is_imported_once_there_is_a_java(name: str) -> None:
    """What runs before knows pyspark for its types only, and so does all that it imports at once."""
    waiting, seen = [f"analytics.{name}"], set[str]()
    while waiting:
        path = module_file(waiting.pop())
        if path and path not in seen:
            seen.add(path)
            imported = _at_once(Path(path))
            assert [one for one in imported if one.split(".")[0] in {"pyspark", "py4j"}] == [], path
            waiting += imported


def module_file(module: str) -> str | None:
    """The file of ours that `analytics.x` or `analytics.x.name` stands for."""
    here = ANALYTICS.parent / module.replace(".", "/")
    found = (here.with_suffix(".py"), here / "__init__.py", here.parent.with_suffix(".py"))
    inside = [path for path in found if path.is_relative_to(ANALYTICS) and path.exists()]
    return str(inside[0]) if inside else None


def _at_once(path: Path) -> set[str]:
    """Modules that are imported when a file is, and not for types alone or by a function."""
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    ]
    return {one.module for one in _imports(path, tree, "") if not one.function}


@pytest.mark.parametrize("path", analysts(), ids=lambda path: path.stem)
def test_jobs_are_frames_in_and_frames_out(path: Path) -> None:
    """
    No RDDs, no code of Python for each row, no schema that is guessed; Java is asked in one place.

    Jobs begin no query themselves, but for few small ones, and depend on neither clock nor chance.
    """
    banned = {"rdd", "udf", "pandas_udf", "inferSchema", "mapInPandas", "applyInPandas", "mapInArrow", "foreach"}
    if path.name not in ASKS_JAVA:
        banned |= {"_jvm", "_jsc", "_jdf", "_jsparkSession"}
    if path.parent.name == "jobs":
        banned |= {"collect", "toPandas", "toLocalIterator", "rand", "current_timestamp", "now"}
        banned -= ASKS_FIRST.get(path.name, set())
    tree = ast.parse(path.read_text("utf-8"))
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {one.module.rpartition(".")[2] for one in imports(path) if one.module.startswith("pyspark.")}
    named |= {
        "inferSchema" for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "inferSchema"
    }
    assert sorted(named & banned) == []


def test_the_global_reactor() -> None:
    """It is named where the daemon begins and nowhere else; importing a module never installs one."""
    named = [
        (package_of(one.path), one.function)
        for path in sources()
        for one in imports(path)
        if one.module.startswith("twisted.internet.reactor") and package_of(path) not in {"bench", "cli"}
    ]
    assert sorted(named) == [("service", "makeService"), ("tap", "makeService")]
    everywhere = [one for path in sources() for one in imports(path) if one.module == "twisted.internet.reactor"]
    assert [one for one in everywhere if not one.function] == []


@pytest.mark.parametrize("path", sorted((ROOT / "protocol").rglob("*.py")), ids=lambda path: path.stem)
def test_protocol_is_pure(path: Path) -> None:
    """Bytes and values in, values out: no I/O, no clock, no chance but keys and nonces (`secrets`)."""
    used = {one.module.split(".")[0] for one in imports(path)}
    assert not used & IMPURE
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func
            assert not (isinstance(called, ast.Name) and called.id in {"open", "print", "input"})
            assert not (isinstance(called, ast.Attribute) and called.attr in CLOCKS)


def situations(kind: type[MediatorError]) -> Iterator[type[MediatorError]]:
    """All classes below `kind`."""
    for child in kind.__subclasses__():
        yield child
        yield from situations(child)


def test_every_situation_has_a_row() -> None:
    """And every row a situation (DIDComm reference section 11, Decentrl reference section 12)."""
    ours = {kind for kind in situations(MediatorError) if kind.__module__.startswith("mediatord.")}
    assert ours == {*DIDCOMM_ERROR_CODES, *DECENTRL_ERROR_CODES, *DECENTRL_CLOSE_CODES}


def test_decentrl_rows_are_well_formed() -> None:
    """Statuses of HTTP, close codes for applications or of RFC 6455; what may be tried again says when."""
    for kind, wire in DECENTRL_ERROR_CODES.items():
        assert 400 <= wire.status < 600 and wire.code.isupper(), kind
        assert (wire.retry_after is not None) == (wire.status in (429, 503)), kind
    for kind, socket in DECENTRL_CLOSE_CODES.items():
        assert socket.close_code in (1011, 1013) or 4001 <= socket.close_code <= 4007, kind
        assert socket.code.isupper(), kind


def test_rows_are_well_formed() -> None:
    """Statuses of HTTP, codes of Report Problem 2.0; what may be tried again says when."""
    for kind, wire in DIDCOMM_ERROR_CODES.items():
        assert 400 <= wire.status < 600, kind
        assert wire.encrypted_status in (None, 200, wire.status), kind
        sorter, scope, *_ = wire.code.split(".")
        assert sorter in ("e", "w") and scope in ("p", "m"), kind
        assert (wire.retry_after is not None) == (wire.status in (429, 503)), kind
        assert "{" not in wire.comment, kind
