"""The documents agree with the code: commands, settings, protocols, metrics, events, links."""

from __future__ import annotations

import pydoc
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from mediatord.cli.commands import cli
from mediatord.config.settings import Config
from mediatord.didcomm.utility_protocols import select_features
from mediatord.observability.event_schema import EVENTS
from mediatord.observability.metrics import Metrics
from mediatord.protocol.decentrl.commands import DirectPayload, PublicPayload
from mediatord.protocol.error_codes import DECENTRL_CLOSE_CODES, DECENTRL_ERROR_CODES, DIDCOMM_ERROR_CODES
from mediatord.workers.metrics_aggregator import MetricsAggregator
from tests.cli.test_commands import list_subcommands
from tests.push.registries import make_registry

PROJECT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in sorted((*PROJECT.glob("*.rst"), *PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")))
    if path.name != "CHANGELOG.rst"
]
FILES_OF_LOG = {"log.key"}
SYSTEMD_UNITS = {"mediatord.service", "mediatord.socket"}
GENERATED = {"cli.md", "configuration.md"}

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def read_document(name: str) -> str:
    """A document of the project."""
    return (PROJECT / name).read_text("utf-8")


def find_literals(document: str) -> list[str]:
    """Texts between back quotes, single or double, on one line."""
    return [found[2] for found in re.finditer(r"(?<!`)(``?)(?!`)([^`\n]+?)\1(?!`)", document)]


def list_settings() -> dict[str, type[BaseModel] | None]:
    """Every setting by its dotted name; sections with their models."""

    def below(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel] | None]]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            section = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
            yield prefix + name, section
            if section is not None:
                yield from below(section, f"{prefix}{name}.")

    return dict(below(Config, ""))


def read_list_items(document: str, begin: str, end: str) -> list[str]:
    """Paragraphs between two comments that begin with a literal, or items of a list there, each on one line."""
    body = document.partition(begin)[2].partition(end)[0]
    found = re.split(r"\n\n|^\* ", body, flags=re.MULTILINE)[1:]
    return [" ".join(item.split()) for item in found if item.startswith("`")]


def split_item(item: str) -> list[str]:
    """The values before the colon of an item, and the text behind it."""
    named, _, cause = item.partition(": ")
    return [*named.split(", "), cause]


# --- commands -----------------------------------------------------------------------------------------------------


def find_commands(document: str) -> list[str]:
    """Commands of a document: lines after a dollar, with continuations, and literals that begin with a command."""
    typed = re.findall(r"^\s*\$ ((?:.*[\\|]\n)*.+)$", document, re.MULTILINE)
    named = [item for item in find_literals(document) if re.match(r"(?:make|mediatord|\.venv/bin/\S+|twistd) ", item)]
    return typed + named


def check_mediatord(words: list[str]) -> None:
    """Assert that the subcommand exists and has these options."""
    command: click.Command = cli
    if words and not words[0].startswith("-"):
        command = dict(list_subcommands(cli))[words[0]]
        if isinstance(command, click.Group):
            command = command.commands[words[1]]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known, words


def check_make(words: list[str]) -> None:
    """Assert that the targets exist, and that the Makefile reads the variables."""
    makefile = read_document("Makefile")
    for word in words:
        if "=" in word:
            assert f"$({word.partition('=')[0]})" in makefile, word
        else:
            assert re.search(rf"^(?:\S+ )*{re.escape(word)}(?: \S+)*:", makefile, re.MULTILINE), word


@each_document
def test_commands_exist(document: Path) -> None:
    """Make targets, subcommands and options."""
    for line in find_commands(document.read_text("utf-8")):
        program, *words = shlex.split(line)
        match program.removeprefix(".venv/bin/"):
            case "make":
                check_make(words)
            case "mediatord":
                check_mediatord(words)


def test_readme_begins_with_make_run_test_and_demo() -> None:
    """Contract section 1."""
    typed = re.findall(r"^\s*\$ (.+)$", read_document("README.rst"), re.MULTILINE)
    assert typed[:3] == ["make run", "make test", "make demo"]


def test_every_subcommand_is_documented() -> None:
    """In the README or on a page written by hand."""
    contents = "".join(path.read_text("utf-8") for path in DOCUMENTS if path.name not in GENERATED)
    visible = [name for name, command in list_subcommands(cli) if not command.hidden]
    assert [name for name in visible if not re.search(rf"(?:mediatord|make) {name}\b", contents)] == []


# --- configuration ------------------------------------------------------------------------------------------------


@each_document
def test_settings_exist(document: Path) -> None:
    """Every dotted key in a document is a setting."""
    known = list_settings()
    sections = {name for name, model in known.items() if model is not None and "." not in name}
    for literal in find_literals(document.read_text("utf-8")):
        name = literal.partition(":")[0]
        if not re.fullmatch(r"[a-z_0-9]+(?:\.(?!py$)[a-z_0-9]+)+", name) or name.partition(".")[0] not in sections:
            continue
        assert name in known or name in EVENTS or name in FILES_OF_LOG, name


@each_document
def test_variables_exist(document: Path) -> None:
    """Every MEDIATORD_ variable stands for a setting, or names the configuration file."""
    for name in re.findall(r"MEDIATORD_([A-Z_0-9]+)=", document.read_text("utf-8")):
        assert name == "CONFIG" or name.lower().replace("__", ".") in list_settings(), name


def test_settings_of_readme_exist() -> None:
    """Also in etc/mediator.yaml."""
    table = read_document("README.rst").partition("Configuration\n---")[2].partition("Where to read on\n---")[0]
    names = re.findall(r"^``([a-z_.]+)``", table, re.MULTILINE)
    assert len(names) == 5
    for name in names:
        value = yaml.safe_load(read_document("etc/mediator.yaml"))
        for part in name.split("."):
            assert part in value, name
            value = value[part]


# --- situations and protocols -------------------------------------------------------------------------------------


def test_problem_report_list_agrees() -> None:
    """The list of problem reports is DIDCOMM_ERROR_CODES, item by item; the cause is free text."""
    found = read_list_items(read_document("docs/reference/protocols.md"), "<!-- situations", "<!-- end of situations")
    assert [split_item(item)[:-1] for item in found] == [
        [
            f"`{kind.reason}`",
            f"{wire.status}/{wire.encrypted_status or '-'}",
            f"`{wire.code}`",
        ]
        for kind, wire in DIDCOMM_ERROR_CODES.items()
    ]
    assert all(split_item(item)[-1] for item in found)


def test_decentrl_error_lists_agree() -> None:
    """The two Decentrl lists match mediatord.protocol.error_codes item by item; the cause is free text."""
    document = read_document("docs/reference/protocols.md")
    found = read_list_items(document, "<!-- decentrl", "<!-- end of decentrl")
    assert [split_item(item)[:3] for item in found] == [
        [f"`{kind.reason}`", str(wire.status), f"`{wire.code}`"] for kind, wire in DECENTRL_ERROR_CODES.items()
    ]
    sockets = read_list_items(document, "<!-- socket", "<!-- end of socket")
    assert [split_item(item)[:2] for item in sockets] == [
        [f"`{wire.code}`", str(wire.close_code)] for wire in DECENTRL_CLOSE_CODES.values()
    ]


def test_decentrl_commands_are_listed() -> None:
    """Every command that is served has its item, and no other."""
    described = read_list_items(read_document("docs/reference/protocols.md"), "<!-- commands", "<!-- end of commands")
    named = {re.findall(r"`([A-Z_]+)`", item)[0] for item in described}
    models = [*get_args(DirectPayload), *get_args(PublicPayload)]
    assert named == {get_args(model.model_fields["type"].annotation)[0] for model in models} | {"TWO_WAY_PRIVATE"}


@each_document
def test_problem_codes_exist(document: Path) -> None:
    """Every code in a document is one of DIDCOMM_ERROR_CODES."""
    codes = {wire.code for wire in DIDCOMM_ERROR_CODES.values()}
    named = {
        item for item in find_literals(document.read_text("utf-8")) if re.fullmatch(r"[ew]\.[pm]\.[a-z._-]+", item)
    }
    assert named <= codes


def test_disclosed_protocols_have_rows() -> None:
    """Exactly those that discover-features discloses."""
    devices = make_registry(None, None)
    disclosed = {feature["id"] for feature in select_features([("protocol", "*")], 1, devices)}
    named = re.findall(
        r"`((?:https://didcomm\.org/|urn:mediatord:)[a-z-]+/\d\.\d)(?:/[a-z-]+)?`",
        read_document("docs/reference/protocols.md"),
    )
    assert set(named) == disclosed


# --- metrics and events -------------------------------------------------------------------------------------------


def test_metrics_page_agrees() -> None:
    """Every metric with kind and labels, and no other."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, version="0")
    # A family has labels only after its first series.
    metrics.requests.inc("didcomm", "accepted")
    metrics.request_duration.observe(1.0, "didcomm")
    metrics.rejected.inc("undecryptable")
    metrics.delivery_latency.observe(1.0, "live")
    metrics.observe_store_operation("commit", 1.0)
    metrics.cluster_pushes.inc("pushed")
    metrics.refused_peer_requests.inc("seal")
    metrics.set_queue_sizes([("did:example:bob", 1)], 0)
    metrics.read_readiness = lambda: True
    metrics.probe_failures.inc("store")
    metrics.certificate_expiry.labels("*:443").set(1.0)
    metrics.set_table_sizes({"message": 1})
    metrics.set_queued_messages(1, 1.0)
    metrics.set_accounts(1, 60)
    metrics.accounts_expired.inc("unused")
    metrics.set_v1_connections(1, 1)
    metrics.ledgers["didcomm"] = {"accepted": 1}, 0
    metrics.set_store_read_time(1.0, 1)
    metrics.register_buffer("any", lambda: (1, 1))
    metrics.push_requests.inc("fcm", "sent")
    metrics.push_duration.observe(1.0, "fcm")
    metrics.push_devices_forgotten.inc("fcm")
    metrics.push_devices = {"fcm": 1}
    metrics.count_push_hosts_backing_off = lambda: {"fcm": 1}
    real, texts = {}, {}
    for family in text_string_to_metric_families(MetricsAggregator().page({1: metrics.render().decode()}, 1, 1)):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        real[name], texts[name] = (family.type, labels), family.documentation.rstrip(".")
    document = read_document("docs/reference/metrics.md")
    found = (
        re.fullmatch(r"`(\w+)` \((\w+)(.*?)\): (.+)", item)
        for item in read_list_items(document, "<!-- metrics", "<!-- end of metrics")
    )
    listed = [item for item in found if item]
    assert {item[1]: (item[2], set(re.findall(r"`(\w+)`", item[3]))) for item in listed} == real
    assert {item[1]: item[4] for item in listed} == texts
    contents = set(re.findall(r"\bmediator_[a-z0-9_]+", "".join(path.read_text("utf-8") for path in DOCUMENTS)))
    assert contents <= set(real)


def test_events_page_agrees() -> None:
    """Every event with level, fields and meaning, and no other."""
    levels = {"info": "", "warn": ", warn"}
    assert read_list_items(read_document("docs/reference/log-events.md"), "<!-- events", "<!-- end of events") == [
        f"`{name}`{levels[event.level]}: {event.meaning}. {', '.join(f'`{field}`' for field in event.fields)}"
        for name, event in EVENTS.items()
    ]


@each_document
def test_events_exist(document: Path) -> None:
    """Every event named in a document is declared, unless it may be an option of a section with the same name."""
    families = {name.partition(".")[0] for name in EVENTS if "." in name} - {"log", "push"}
    for literal in find_literals(document.read_text("utf-8")):
        if re.fullmatch(r"[a-z]+\.[a-z]+", literal) and literal.partition(".")[0] in families:
            assert literal in EVENTS, literal


# --- links --------------------------------------------------------------------------------------------------------


def list_anchors(path: Path) -> set[str]:
    """Anchors of a document, derived from its headings: lower case, hyphens, no punctuation."""
    document = path.read_text("utf-8")
    if path.suffix == ".md":
        titles = re.findall(r"^#+ (.+)$", document, re.MULTILINE)
    else:
        titles = re.findall(r"^(.+)\n(?:=|-){3,}$", document, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def list_links(document: Path) -> list[str]:
    """Targets of a document's links within the project."""
    pattern = r"\]\(([^)\s]+)\)" if document.suffix == ".md" else r"`[^`<]*<([^>`\s]+)>`__?"
    found = re.findall(pattern, document.read_text("utf-8"))
    return [target for target in found if "://" not in target]


@each_document
def test_links_resolve(document: Path) -> None:
    """To a file, and an anchor to a heading."""
    for target in list_links(document):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        assert not anchor or anchor in list_anchors(path), target


@each_document
def test_named_files_exist(document: Path) -> None:
    """Paths in literals exist."""
    for literal in find_literals(document.read_text("utf-8")):
        if re.fullmatch(r"(?:tests|docs|etc|systemd|mediatord)/[\w./-]+", literal):
            assert (PROJECT / literal).exists(), literal


@each_document
def test_dotted_names_exist(document: Path) -> None:
    """Modules, classes and functions with full names can be imported."""
    for literal in find_literals(document.read_text("utf-8")):
        found = re.match(r"mediatord(?:\.[A-Za-z_]\w*)+(?=$|\()", literal)
        if found and found[0] not in SYSTEMD_UNITS:
            assert pydoc.locate(found[0]) is not None, found[0]


def test_news_fragments_are_one_sentence() -> None:
    """And of a type that towncrier knows."""
    for fragment in (PROJECT / "newsfragments").glob("*.*.rst"):
        assert fragment.name.split(".")[1] in ("feature", "bugfix", "doc", "removal", "misc"), fragment.name
        sentence = fragment.read_text("utf-8").strip()
        assert sentence.endswith(".") and "\n" not in sentence, fragment.name
