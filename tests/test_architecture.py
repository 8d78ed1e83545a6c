"""Import rules beyond the layers that `make lint` checks: libraries, clocks, the global reactor."""

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
from tests.structure import count_words, list_analytics_modules, list_documents

ROOT = Path(mediatord.__file__).parent

ANALYTICS = Path(analytics.__file__).parent
# Modules that the analytics may import from the daemon: event declarations, line format, helpers.
SHARED = {
    "mediatord",
    "mediatord.config.value_syntax",
    "mediatord.observability.event_schema",
    "mediatord.observability.pseudonyms",
    "mediatord.observability.segments",
    "mediatord.runtime.progress_bar",
    "mediatord.runtime.secret_files",
}
# Run before Java is available for Spark, or without it.
BEFORE_SPARK = "cli errors java job schema settings spark_session".split()
# The module that calls Java, and the one that starts and stops it.
CALLS_JAVA = {"files.py", "spark_session.py"}
# Jobs that collect a few rows: for each epoch of the daemon's key, for each start of a node per day.
COLLECTS = {name: {"collect"} for name in ("message_ledger.py", "reconciliation.py", "sessions.py")}

IMPURE = set(
    "asyncio concurrent http io logging multiprocessing os pathlib random select shutil signal socket sqlite3 "
    "subprocess sys tempfile threading time treq twisted".split()
)
CLOCKS = {"now", "utcnow", "today", "monotonic", "perf_counter", "time"}


class Import(NamedTuple):
    """:param function: enclosing function; empty at module level."""

    path: Path
    module: str
    function: str


def package_of(path: Path) -> str:
    """Package or module directly below mediatord that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    """Source files of the daemon."""
    return sorted(ROOT.rglob("*.py"))


def analytics_sources() -> list[Path]:
    """Source files of the batch jobs."""
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
    """Module of `a.b.name`, where `a.b` is a file or package of the project."""
    path = ROOT.parent.joinpath(*imported.split("."))
    return imported if path.with_suffix(".py").exists() or path.is_dir() else imported.rpartition(".")[0] or imported


def test_nothing_imports_the_tests_or_the_analytics() -> None:
    """Daemon and analytics share the event schema, not code."""
    foreign = {one.module.split(".")[0] for path in sources() for one in imports(path)}
    assert not foreign & {"tests", "analytics"}


def test_analytics_imports_only_shared_modules() -> None:
    """Event declarations, pseudonyms, secret files and the version; and no tests."""
    used = {_module_of(one.module) for path in analytics_sources() for one in imports(path)}
    assert {module for module in used if module.split(".")[0] in {"mediatord", "tests", "twisted"}} <= SHARED


@pytest.mark.parametrize("name", BEFORE_SPARK)
def test_modules_before_spark_import_pyspark_for_types_only(name: str) -> None:
    """Includes all that they import at load time."""
    waiting, seen = [f"analytics.{name}"], set[str]()
    while waiting:
        path = module_file(waiting.pop())
        if path and path not in seen:
            seen.add(path)
            imported = _load_time_imports(Path(path))
            assert [one for one in imported if one.split(".")[0] in {"pyspark", "py4j"}] == [], path
            waiting += imported


def module_file(module: str) -> str | None:
    """Project file for `analytics.x` or `analytics.x.name`."""
    here = ANALYTICS.parent / module.replace(".", "/")
    found = (here.with_suffix(".py"), here / "__init__.py", here.parent.with_suffix(".py"))
    inside = [path for path in found if path.is_relative_to(ANALYTICS) and path.exists()]
    return str(inside[0]) if inside else None


def _load_time_imports(path: Path) -> set[str]:
    """Modules imported when a file is loaded, other than those for types or within functions."""
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    ]
    return {one.module for one in _imports(path, tree, "") if not one.function}


@pytest.mark.parametrize("path", analytics_sources(), ids=lambda path: path.stem)
def test_jobs_only_transform_frames(path: Path) -> None:
    """
    No RDDs, Python row functions or inferred schemas; Java is called in one module.

    Jobs run no queries themselves, except a few small ones, and depend on neither clock nor chance.
    """
    banned = {"rdd", "udf", "pandas_udf", "inferSchema", "mapInPandas", "applyInPandas", "mapInArrow", "foreach"}
    if path.name not in CALLS_JAVA:
        banned |= {"_jvm", "_jsc", "_jdf", "_jsparkSession"}
    if path.parent.name == "jobs":
        banned |= {"collect", "toPandas", "toLocalIterator", "rand", "current_timestamp", "now"}
        banned -= COLLECTS.get(path.name, set())
    tree = ast.parse(path.read_text("utf-8"))
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {one.module.rpartition(".")[2] for one in imports(path) if one.module.startswith("pyspark.")}
    named |= {
        "inferSchema" for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "inferSchema"
    }
    assert sorted(named & banned) == []


def test_global_reactor_is_used_only_at_start() -> None:
    """Only the entry points name it; importing a module never installs one."""
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
def test_protocol_does_no_io(path: Path) -> None:
    """No I/O, clock or randomness, except for keys and nonces (`secrets`)."""
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


def test_every_situation_has_an_error_code() -> None:
    """And every error code a situation (DIDComm reference section 11, Decentrl reference section 12)."""
    ours = {kind for kind in situations(MediatorError) if kind.__module__.startswith("mediatord.")}
    assert ours == {*DIDCOMM_ERROR_CODES, *DECENTRL_ERROR_CODES, *DECENTRL_CLOSE_CODES}


def test_decentrl_error_codes_are_well_formed() -> None:
    """HTTP status codes; close codes for applications or of RFC 6455; retryable errors have a Retry-After."""
    for kind, wire in DECENTRL_ERROR_CODES.items():
        assert 400 <= wire.status < 600 and wire.code.isupper(), kind
        assert (wire.retry_after is not None) == (wire.status in (429, 503)), kind
    for kind, socket in DECENTRL_CLOSE_CODES.items():
        assert socket.close_code in (1011, 1013) or 4001 <= socket.close_code <= 4007, kind
        assert socket.code.isupper(), kind


def test_didcomm_error_codes_are_well_formed() -> None:
    """HTTP status codes, Report Problem 2.0 codes; retryable errors have a Retry-After."""
    for kind, wire in DIDCOMM_ERROR_CODES.items():
        assert 400 <= wire.status < 600, kind
        assert wire.encrypted_status in (None, 200, wire.status), kind
        sorter, scope, *_ = wire.code.split(".")
        assert sorter in ("e", "w") and scope in ("p", "m"), kind
        assert (wire.retry_after is not None) == (wire.status in (429, 503)), kind
        assert "{" not in wire.comment, kind


def test_documents_and_analytics_keep_their_size() -> None:
    """At most 32,000 words of documents and 45 modules of the analysis; `make structure` prints the counts."""
    words, modules = sum(map(count_words, list_documents())), len(list_analytics_modules())
    assert words <= 32_000, f"the documents have {words:,} words, at most 32,000 are allowed: shorten a page"
    assert modules <= 45, f"analytics/ has {modules} modules, at most 45 are allowed: merge two"
