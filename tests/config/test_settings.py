"""The configuration: defaults, validation and messages (contract section 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from twisted.internet.endpoints import clientFromString, serverFromString
from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactor

from mediatord.app.lifecycle import check_setting_combinations
from mediatord.config.file import ConfigError, load_config, render_config
from mediatord.config.settings import Config
from mediatord.config.value_syntax import DEFAULT_CONFIG_PATH, format_duration, format_size, get_default_config_path
from mediatord.config.value_types import find_value_kind
from mediatord.errors import StartupError

ETC = Path(__file__).parents[2] / "etc" / "mediator.yaml"
# A file without keys is refused.
SOME_KEY = "workers: 1"


def read_problems(text: str, tmp_path: Path, environ: dict[str, str] | None = None) -> list[str]:
    """Problems of a file `m.yaml` with this content, without its directory."""
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ or {})
    return [problem.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


def read_config(text: str, tmp_path: Path, environ: dict[str, str] | None = None) -> Config:
    """The configuration of a file with this content."""
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return load_config(path, environ or {})


def list_setting_paths(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Paths of all settings of a model, without sections."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, *rest) for rest in list_setting_paths(kind))
        else:
            yield (name,)


def list_yaml_paths(tree: object) -> Iterator[tuple[str, ...]]:
    """Paths of all leaf keys of a YAML tree."""
    if isinstance(tree, dict) and tree:
        for name, below in tree.items():
            yield from ((name, *rest) for rest in list_yaml_paths(below))
    else:
        yield ()


def test_example_has_defaults() -> None:
    assert load_config(ETC, {}) == Config().resolved(ETC.parent.absolute())


def test_example_has_every_key_with_comment() -> None:
    """And no other keys."""
    assert set(list_yaml_paths(yaml.safe_load(ETC.read_text()))) == set(list_setting_paths(Config))
    lines = ETC.read_text().splitlines()
    for above, line in zip(lines, lines[1:], strict=False):
        if ":" in line and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("# "), line


def test_example_is_rendered_from_models() -> None:
    assert ETC.read_text() == render_config()


def test_defaults_of_contract() -> None:
    config = Config()
    assert config.queue.ttl == 72 * 3600
    assert (config.queue.max_messages, config.queue.max_bytes) == (1000, 67_108_864)
    assert (config.limits.did_per_minute, config.limits.ip_per_minute) == (60, 120)
    assert config.storage.backend == "sqlite"
    assert config.listen == ("tcp:8080:interface=127.0.0.1",)
    assert config.metrics.allow == (ip_network("127.0.0.0/8"), ip_network("::1/128"))
    assert config.decentrl.contract_lifetime == 365 * 86400


def test_accepts_empty_sections(tmp_path: Path) -> None:
    """Such as sections with all keys commented out."""
    assert read_config("queue:\nlog:\n  rotate:\n", tmp_path) == Config().resolved(tmp_path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "\n\n", "{}\n", "---\n"])
def test_refuses_file_without_keys(text: str, tmp_path: Path) -> None:
    """It would configure another mediator. Environment variables may set the keys."""
    refused = ["the file contains no settings; restore it, or write one for a new mediator"]
    for environ in ({}, {"MEDIATORD_LISTEN": '["tcp:8080"]'}):
        (line,) = read_problems(text, tmp_path, environ)
        assert refused[0] in line
    environ = {"MEDIATORD_PUBLIC_URL": "https://m.example"}
    assert read_config(text, tmp_path, environ).public_url == "https://m.example"


def test_refuses_truncated_file(tmp_path: Path) -> None:
    """If `init` wrote it, wherever it was truncated; other files have no end marker."""
    whole = render_config(Config(public_url="https://m.example"))
    assert read_config(whole, tmp_path).public_url == "https://m.example"
    assert read_config(whole + "\n", tmp_path).public_url == "https://m.example"
    for length in range(60, len(whole) - 2, 97):
        assert read_problems(whole[:length], tmp_path), length
    lines = whole.splitlines(keepends=True)
    for length in range(1, len(lines)):
        assert read_problems("".join(lines[:length]), tmp_path), length
    (line,) = read_problems("".join(lines[:20]), tmp_path)
    assert ":21: the file is truncated: its last line is not '# end of mediator.yaml'; restore it" in line
    assert read_config("".join(lines[1:20]), tmp_path).public_url == "https://m.example"


def test_accepts_older_file_without_end_marker(tmp_path: Path) -> None:
    old = (
        "# mediatord: every setting, at its default unless changed. Unknown keys and impossible values are refused "
        "at start;\n# `mediatord check-config --config FILE` tells which.\n\npublic_url: https://m.example\n"
    )
    assert read_config(old, tmp_path).public_url == "https://m.example"


def test_end_marker_may_be_surrounded(tmp_path: Path) -> None:
    """Lines before the beginning or after the marker are valid; a missing marker is still detected."""
    whole = render_config(Config(public_url="https://m.example"))
    for text in (
        f"{whole}node: b-2\n",
        whole.replace("\n", "\r\n") + "node: b-2\r\n",
        f"# by hand\n{whole}node: b-2",
    ):
        text = text.replace("node: null", "# node: null", 1)
        assert read_config(text, tmp_path).node == "b-2"
    cut = whole.replace("# end of mediator.yaml\n", "")
    for text in (cut, f"# by hand\n{cut}", f"{cut}# end of\n"):
        assert "the file is truncated" in read_problems(text, tmp_path)[0]


def test_rendered_configuration_round_trip(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "public_url": "https://m.example/path",
            "node": "a-1",
            "drain_timeout": "1500ms",
            "trusted_proxies": ["10.0.0.0/8", "::1"],
            "queue": {"ttl": "90s", "delivered_timeout": 0.25},
            "didcomm": {
                "endpoints": {"did:web:a.example": "https://b.example/x"},
                "routing_keys": {"did:web:c.example": ["did:key:z6Mk#z6Mk"]},
                "allow": ["did:peer:2.Ez6LS"],
            },
        }
    )
    assert read_config(render_config(config), tmp_path) == config.resolved(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("67108864", 67_108_864),
        ("'4096'", 4096),
        ("67_108_864", 67_108_864),
        ("64MiB", 67_108_864),
        ("64 MiB", 67_108_864),
        ("64mib", 67_108_864),
        ("64M", 67_108_864),
        ("64 MB", 64_000_000),
        ("1k", 1024),
        ("1KB", 1000),
        ("2GiB", 2**31),
        ("1T", 2**40),
        ("1.5MiB", 1_572_864),
        ("7B", 7),
    ],
)
def test_parses_sizes(text: str, size: int, tmp_path: Path) -> None:
    """A number with a unit, or a number of bytes, in file and environment."""
    assert read_config(f"queue: {{max_bytes: {text}}}", tmp_path).queue.max_bytes == size
    environ = {"MEDIATORD_QUEUE__MAX_BYTES": text.strip("'").replace("_", "")}
    assert read_config(SOME_KEY, tmp_path, environ).queue.max_bytes == size


@pytest.mark.parametrize("size", [1, 1000, 1024, 65_536, 1_048_577, 5 * 2**29, 2**40, 2**63 - 1])
def test_formatted_size_round_trip(size: int, tmp_path: Path) -> None:
    assert read_config(f"queue: {{max_bytes: {format_size(size)}}}", tmp_path).queue.max_bytes == size
    assert [format_size(one) for one in (67_108_864, 2**30, 5 * 2**29, 1000)] == ["64MiB", "1GiB", "2560MiB", "1000"]


@pytest.mark.parametrize(
    "text", ["-1", "big", "true", "1.5", ".inf", "10 bushels", "[1]", "1MiB2", "64 Mi", "MiB", "null", "9" * 5000]
)
def test_refuses_invalid_sizes(text: str, tmp_path: Path) -> None:
    """In one line with file, line and key."""
    (only,) = read_problems(f"queue:\n  max_bytes: {text}\n", tmp_path)
    assert only.startswith(("m.yaml:2: queue.max_bytes: expected ", "m.yaml:2: invalid YAML"))


def test_bounds_of_sizes(tmp_path: Path) -> None:
    """Positive, and small enough for a database; log segments have another bound."""
    assert read_problems("queue: {max_bytes: 0}", tmp_path) == ["m.yaml:1: queue.max_bytes: expected at least 1"]
    assert read_problems("queue: {max_bytes: 9999999999TiB}", tmp_path) == [
        "m.yaml:1: queue.max_bytes: expected at most 9223372036854775807 bytes"
    ]
    assert read_problems("log: {rotate: {bytes: 63KiB}}", tmp_path) == [
        "m.yaml:1: log.rotate.bytes: expected at least 64KiB"
    ]


def test_every_byte_setting_accepts_units() -> None:
    """And the example uses them."""
    found = {key: default for key, default in list_byte_settings(Config(), "")}
    assert {"queue.max_bytes", "limits.max_message_bytes", "log.rotate.bytes"} <= found.keys()
    assert [key for key, (is_size, _) in found.items() if not is_size] == []
    lines = [line.strip() for line in ETC.read_text().splitlines()]
    for key, (_, default) in found.items():
        shown = "null" if default is None else format_size(default)
        assert f"{key.rpartition('.')[2]}: {shown}" in lines


def list_byte_settings(section: BaseModel, prefix: str) -> Iterator[tuple[str, tuple[bool, int | None]]]:
    """Settings whose names contain bytes; whether each is a size, and its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from list_byte_settings(value, f"{prefix}{name}.")
        elif name.endswith("bytes"):
            kind = find_value_kind(field.annotation, field.metadata)
            yield prefix + name, (kind is not None and kind.words == "size", value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("72h", 259200.0),
        ("60s", 60.0),
        ("5m", 300.0),
        ("500ms", 0.5),
        ("365d", 31536000.0),
        ("1.5h", 5400.0),
        ("7", 7),
    ],
)
def test_parses_durations(text: str, seconds: float, tmp_path: Path) -> None:
    """A number with a unit, or a number of seconds."""
    assert read_config(f"queue: {{ttl: {text}}}", tmp_path).queue.ttl == seconds


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1.0, 90.0, 600.0, 3600.0, 86400.0, 259200.0, 31536000.0])
def test_formatted_duration_round_trip(seconds: float, tmp_path: Path) -> None:
    assert read_config(f"didcomm: {{max_delay: {format_duration(seconds)}}}", tmp_path).didcomm.max_delay == seconds


@pytest.mark.parametrize("text", ["-1", "forever", "true", ".nan", ".inf", "10 parsecs", "[1]", "1h30m"])
def test_refuses_invalid_durations(text: str, tmp_path: Path) -> None:
    """In one line with file, line and key."""
    expected = "m.yaml:2: queue.ttl: expected a duration such as 72h, 60s, 500ms or a number of seconds"
    assert read_problems(f"queue:\n  ttl: {text}\n", tmp_path) == [expected]


def test_reports_all_problems(tmp_path: Path) -> None:
    """In the order of the file."""
    text = """\
public_url: ftp://x
listen: tcp:8080
listne: [tcp:8080]
queue:
  max_mesages: 3
  max_bytes: 1
  max_bytes: 2
limits:
  did_per_minute: "60"
  ip_per_minute: 0
didcomm:
  delivery_form: xml
  endpoints: {nope: "https://x", "did:web:a": 3}
  live_default_on: 1
metrics:
  allow: [127.0.0.1/8, '::1']
storage: memory
drain_timeout: 20
"""
    assert read_problems(text, tmp_path) == [
        "m.yaml:1: public_url: expected an http:// or https:// URL with a host, without query, fragment or user name",
        "m.yaml:2: listen: expected a list, such as ['tcp:8080:interface=127.0.0.1']",
        "m.yaml:3: listne: unknown key; did you mean listen?",
        "m.yaml:5: queue.max_mesages: unknown key; did you mean max_messages?",
        "m.yaml:7: queue.max_bytes: duplicate key, already set in line 6; remove one",
        "m.yaml:9: limits.did_per_minute: expected a whole number",
        "m.yaml:10: limits.ip_per_minute: expected at least 1",
        "m.yaml:12: didcomm.delivery_form: expected 'as-received', 'json' or 'base64'",
        "m.yaml:13: didcomm.endpoints.did:web:a: expected a string",
        "m.yaml:13: didcomm.endpoints.nope: expected a DID such as did:web:example.com as the key",
        "m.yaml:14: didcomm.live_default_on: expected true or false",
        "m.yaml:16: metrics.allow[0]: expected a network without host bits: 127.0.0.0/8",
        "m.yaml:17: storage: expected a mapping of keys to values, such as backend: sqlite",
        "m.yaml:18: drain_timeout: expected less than 10s",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "expected more than 0"),
        ("1.01", "expected at most 1"),
        (".nan", "expected at most 1"),
        ("true", "expected a number"),
        ("'0.5'", "expected a number"),
        ("half", "expected a number"),
    ],
)
def test_refuses_invalid_shares(text: str, expected: str, tmp_path: Path) -> None:
    """Above 0 and at most 1."""
    (problem,) = read_problems(f"queue:\n  sender_share: {text}\n", tmp_path)
    assert problem.startswith(f"m.yaml:2: queue.sender_share: {expected}")
    assert [
        read_config(f"queue: {{sender_share: {good}}}", tmp_path).queue.sender_share for good in ("1", "0.25")
    ] == [
        1.0,
        0.25,
    ]


def test_refuses_invalid_reserved_share(tmp_path: Path) -> None:
    """From 0 to a third, as it is reserved three times."""
    for text in ("0.34", "-0.1", "'0.1'"):
        (problem,) = read_problems(f"queue:\n  reserved_for_known: {text}\n", tmp_path)
        assert problem.startswith("m.yaml:2: queue.reserved_for_known: expected")
    found = [read_config(f"queue: {{reserved_for_known: {good}}}", tmp_path).queue for good in ("0", "0.33")]
    assert [one.reserved_for_known for one in found] == [0.0, 0.33]


def test_unknown_key_names_valid_keys(tmp_path: Path) -> None:
    """If no key is similar."""
    assert read_problems("queue:\n  zzz: 1\n", tmp_path) == [
        "m.yaml:2: queue.zzz: unknown key; expected one of max_messages, max_bytes, when_full, sender_share, "
        "reserved_for_known, ttl, delivered_timeout"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: b: c", 1), ("queue:\n  ttl: [1", 2), ("queue:\n\tttl: 1", 2), ("a: &x [*x]", 1), ("a: \x01", 1)],
)
def test_invalid_yaml_is_one_line(text: str, line: int, tmp_path: Path) -> None:
    """With file and line."""
    (only,) = read_problems(text, tmp_path)
    assert only.startswith(f"m.yaml:{line}: invalid YAML: ")
    assert "\n" not in only


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("queue: &a\n  ttl: *a\n", 1),
        ("queue:\n  ttl: " + "[" * 30 + "]" * 30, 2),
        ("queue: " + "[" * 2000, 1),
        ("a: &a " + "[" * 15 + "]" * 15 + "\nb: " + "[" * 15 + "*a" + "]" * 15, 1),
    ],
    ids=["itself", "nested", "unended", "aliases"],
)
def test_refuses_deeply_nested_yaml(text: str, line: int, tmp_path: Path) -> None:
    """Before the recursion."""
    assert read_problems(text, tmp_path) == [f"m.yaml:{line}: invalid YAML: nesting is deeper than 20 levels"]


def test_executes_no_yaml_tags(tmp_path: Path) -> None:
    (only,) = read_problems("x: !!python/object/apply:os.system [true]", tmp_path)
    assert only.startswith("m.yaml:1: x: unknown key")


def test_refuses_list(tmp_path: Path) -> None:
    assert read_problems("- 1\n", tmp_path) == ["m.yaml:1: expected a mapping of keys to values"]


def test_missing_file_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "no.yaml", {})
    assert caught.value.problems == [f"{tmp_path}/no.yaml: No such file or directory"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp:0",
        "tcp6:8080:interface=\\:\\:",
        "unix:/run/m.sock",
        "systemd:domain=INET:index=0",
        "ssl:443:privateKey=/no",
        "haproxy:ssl:443:privateKey=/no",
    ],
)
def test_accepts_all_endpoint_types(endpoint: str, tmp_path: Path) -> None:
    """Certificates and sockets are opened at start only."""
    assert read_config(f"listen: ['{endpoint}']", tmp_path).listen == (endpoint,)


@pytest.mark.parametrize(
    "endpoint", ["8080", "tcp", "tcp:http", "tcp:8080:interfce=1", "carrier-pigeon:1", "tcp:70000"]
)
def test_refuses_invalid_endpoints(endpoint: str, tmp_path: Path) -> None:
    (only,) = read_problems(f"listen:\n- tcp:1\n- '{endpoint}'", tmp_path)
    assert only.startswith("m.yaml:3: listen[1]: expected a ")
    # An invalid only listener does not also count as a missing one.
    (only,) = read_problems(f"listen: ['{endpoint}']", tmp_path)
    assert only.startswith("m.yaml:1: listen[0]: expected a ")


def test_requires_a_listener(tmp_path: Path) -> None:
    assert read_problems("listen: []", tmp_path) == ["m.yaml:1: listen: expected at least 1 item"]


@pytest.mark.parametrize(
    "url",
    ["https://m.example?x=1", "https://m.example#a", "https://u:p@m.example", "m.example", "https://", "http://[::1"],
)
def test_refuses_invalid_public_url(url: str, tmp_path: Path) -> None:
    """It needs http or https and a host, without query or fragment."""
    (only,) = read_problems(f"public_url: '{url}'", tmp_path)
    assert only.startswith("m.yaml:1: public_url: expected an http:// or https:// URL")


def test_removes_trailing_slash_of_public_url(tmp_path: Path) -> None:
    assert read_config("public_url: https://m.example/", tmp_path).public_url == "https://m.example"


def test_refuses_contradictory_settings(tmp_path: Path) -> None:
    """The problem is reported at one of them."""
    text = "storage: {backend: memory}\nworkers: 2\ncluster:\n  listen: tcp:9000\n"
    assert read_problems(text, tmp_path) == [
        "m.yaml:2: workers: expected 1, because processes cannot share storage.backend: memory",
        "m.yaml:3: cluster: expected secret_file, because listen is set",
    ]


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("tcp:7070:interface=10.0.0.5", None, "tcp:host=10.0.0.5:port=7070"),
        ("tcp:port=7070:interface=10.0.0.5:backlog=9", None, "tcp:host=10.0.0.5:port=7070"),
        (r"tcp6:7070:interface=fe80\:\:1", None, r"tcp:host=fe80\:\:1:port=7070"),
        ("unix:/run/m.sock:mode=600", None, "unix:/run/m.sock"),
        (r"unix:address=/run/m\:1.sock", None, r"unix:/run/m\:1.sock"),
        ("tcp:7070", "a.example:7071", "tcp:host=a.example:port=7071"),
        ("tcp:7070:interface=0.0.0.0", "[fe80::1]:7070", r"tcp:host=fe80\:\:1:port=7070"),
        ("systemd:domain=INET:index=0", "10.0.0.5:7070", "tcp:host=10.0.0.5:port=7070"),
    ],
)
def test_advertised_address_of_peer_listener(
    listen: str, advertise: str | None, address: str, tmp_path: Path
) -> None:
    """Derived from the peer listener unless configured; Twisted can parse it."""
    advertise_setting = f"advertise: '{advertise}', " if advertise else ""
    config = read_config(f"cluster: {{listen: '{listen}', {advertise_setting}secret_file: s}}", tmp_path)
    assert config.cluster.address == address
    clientFromString(MemoryReactor(), address)


@pytest.mark.parametrize(
    "listen",
    ["tcp:7070", "tcp:7070:interface=", "tcp:7070:interface=0.0.0.0", r"tcp6:7070:interface=\:\:", "tcp6:7070"]
    + ["tcp:0:interface=10.0.0.5", "systemd:domain=INET:index=0"],
)
def test_requires_advertised_address(listen: str, tmp_path: Path) -> None:
    """If it cannot be derived."""
    (only,) = read_problems(f"cluster:\n  listen: '{listen}'\n  secret_file: s", tmp_path)
    assert only == (
        "m.yaml:1: cluster: expected an address in listen that other nodes can reach, such as "
        "tcp:7070:interface=10.0.0.5, or a value for advertise"
    )


@pytest.mark.parametrize(
    "advertise", ["a.example", "a.example:0", "a.example:70000", ":7070", "a b:1", "fe80::1:7070"]
)
def test_refuses_invalid_advertised_address(advertise: str, tmp_path: Path) -> None:
    (only,) = read_problems(f"cluster:\n  advertise: '{advertise}'", tmp_path)
    assert only == "m.yaml:2: cluster.advertise: expected host:port such as 10.0.0.5:7070"


def test_cluster_requires_shared_store() -> None:
    """One line names both settings."""
    cluster = {"listen": "tcp:7070:interface=10.0.0.5", "secret_file": "s"}
    for backend in ("memory", "sqlite"):
        config = Config.model_validate({"cluster": cluster, "storage": {"backend": backend}})
        with pytest.raises(StartupError, match=r"^cluster\.listen requires storage\.backend: mongodb"):
            check_setting_combinations(config)
    check_setting_combinations(Config.model_validate({"cluster": cluster, "storage": {"backend": "mongodb"}}))


def test_accepts_mongodb_and_hides_uri(tmp_path: Path) -> None:
    """The URI can hold a password, and is in no representation."""
    config = read_config("storage: {backend: mongodb, mongodb: {uri: 'mongodb://u:s3cret@h/d'}}", tmp_path)
    assert config.storage.mongodb.uri == "mongodb://u:s3cret@h/d"
    assert "s3cret" not in repr(config)
    assert "s3cret" not in "".join(read_problems("storage: {mongodb: {uri: 's3cret'}}", tmp_path))


def test_paths_are_relative_to_file(tmp_path: Path) -> None:
    """Absolute paths stay."""
    config = read_config("log: {directory: /var/log/m}\ncluster: {secret_file: s}\n", tmp_path)
    assert config.identity.keys == tmp_path / "keys.jwks"
    assert config.storage.sqlite.path == tmp_path / "mediator.sqlite3"
    assert config.cluster.secret_file == tmp_path / "s"
    assert config.log.directory == Path("/var/log/m")


@pytest.mark.parametrize(
    ("endpoint", "resolved"),
    [
        ("unix:m.sock", "unix:{}/m.sock"),
        ("unix:address=run/m.sock:mode=660", "unix:address={}/run/m.sock:mode=660"),
        ("unix:m.sock:660:lockfile=0", "unix:{}/m.sock:660:lockfile=0"),
        ("unix:/run/m.sock", "unix:/run/m.sock"),
        ("haproxy:unix:m.sock", "haproxy:unix:{}/m.sock"),
        ("unix:with\\:colon", "unix:{}/with\\:colon"),
        ("ssl:443:privateKey=k.pem:certKey=/c.pem", "ssl:443:privateKey={}/k.pem:certKey=/c.pem"),
        ("ssl:443:k.pem:c.pem:extraCertChain=x.pem", "ssl:443:{0}/k.pem:{0}/c.pem:extraCertChain={0}/x.pem"),
        ("ssl:port=443:privateKey=k.pem:dhParameters=d", "ssl:port=443:privateKey={0}/k.pem:dhParameters={0}/d"),
        ("ssl:443:interface=127.0.0.1", "ssl:443:interface=127.0.0.1:privateKey={}/server.pem"),
        ("haproxy:ssl:443:privateKey=k.pem", "haproxy:ssl:443:privateKey={}/k.pem"),
        ("tls:certificates:8443", "tls:{}/certificates:8443"),
        ("tcp:8080:interface=127.0.0.1", "tcp:8080:interface=127.0.0.1"),
        ("systemd:domain=INET:index=0", "systemd:domain=INET:index=0"),
    ],
)
def test_endpoint_paths_are_relative_to_file(endpoint: str, resolved: str, tmp_path: Path) -> None:
    expected = resolved.format(tmp_path)
    assert read_config(f"listen: ['{endpoint}']", tmp_path).listen == (expected,)
    assert read_config(SOME_KEY, tmp_path, {"MEDIATORD_LISTEN": json.dumps([endpoint])}).listen == (expected,)
    assert read_config(f"admin: {{listen: '{endpoint}', token_file: t}}", tmp_path).admin.listen == expected


def test_peer_socket_paths_are_relative_to_file(tmp_path: Path) -> None:
    config = read_config("cluster: {listen: 'unix:node.sock', secret_file: s}", tmp_path)
    assert config.cluster.listen == f"unix:{tmp_path}/node.sock"
    assert config.cluster.address == f"unix:{tmp_path}/node.sock"


def test_endpoint_paths_may_contain_colons(tmp_path: Path) -> None:
    directory = tmp_path / "a:b=c\\d"
    directory.mkdir()
    (listen,) = read_config("listen: ['unix:m.sock']", directory).listen
    reactor = MemoryReactor()
    serverFromString(reactor, listen).listen(Factory())
    assert [address for address, *_ in reactor.unixServers] == [f"{directory}/m.sock"]


def test_environment_overrides_file(tmp_path: Path) -> None:
    """MEDIATORD_A__B overrides a.b; lists and mappings are JSON, null is null, other text stays."""
    config = read_config(
        "storage: {backend: sqlite}\nnode: x\n",
        tmp_path,
        {
            "MEDIATORD_STORAGE__BACKEND": "memory",
            "MEDIATORD_LISTEN": '["tcp:9000:interface=127.0.0.1"]',
            "MEDIATORD_NODE": "null",
            "MEDIATORD_PUBLIC_URL": "https://m.example",
            "MEDIATORD_QUEUE__TTL": "1h",
            "MEDIATORD_QUEUE__MAX_MESSAGES".replace("MESAGES", "MESSAGES"): "5",
            "MEDIATORD_DIDCOMM__LIVE_DEFAULT_ON": "true",
            "MEDIATORD_DIDCOMM__ENDPOINTS": '{"did:web:a": "https://b"}',
            "MEDIATORD_LOG__DIRECTORY": "elsewhere",
            "MEDIATORD_LOG__ROTATE__KEEP": "7",
            "HOME": "/",
        },
    )
    assert config.storage.backend == "memory"
    assert config.listen == ("tcp:9000:interface=127.0.0.1",)
    assert config.node is None
    assert config.public_url == "https://m.example"
    assert (config.queue.ttl, config.queue.max_messages) == (3600.0, 5)
    assert config.didcomm.live_default_on is True
    assert config.didcomm.endpoints == {"did:web:a": "https://b"}
    assert config.log.directory == tmp_path / "elsewhere"
    assert config.log.rotate.keep == 7


def test_environment_problems_name_variable(tmp_path: Path) -> None:
    """After those of the file."""
    environ = {
        "MEDIATORD_QUEUE__MAX_BYTES": "abc",
        "MEDIATORD_STORAGE__BACKEN": "x",
        "MEDIATORD_NODE": "a b",
        "MEDIATORD_LISTEN": "tcp:1",
    }
    assert read_problems("queue: {ttl: x, max_bytes: 1}", tmp_path, environ) == [
        "m.yaml:1: queue.ttl: expected a duration such as 72h, 60s, 500ms or a number of seconds",
        "environment MEDIATORD_LISTEN: listen: expected a list in JSON, such as "
        """MEDIATORD_LISTEN='["tcp:8080:interface=127.0.0.1"]'""",
        "environment MEDIATORD_NODE: node: expected 1 to 63 letters, digits, dots, hyphens or underscores, "
        "with a letter or digit at both ends",
        "environment MEDIATORD_QUEUE__MAX_BYTES: queue.max_bytes: expected a size such as 64MiB, 512k or a number of "
        "bytes",
        "environment MEDIATORD_STORAGE__BACKEN: storage.backen: unknown key; did you mean backend?",
    ]


@pytest.mark.parametrize(
    ("key", "value", "example"),
    [
        ("LISTEN", "tcp:1", '["tcp:8080:interface=127.0.0.1"]'),
        ("LISTEN", '["tcp:1"', '["tcp:8080:interface=127.0.0.1"]'),
        ("LISTEN", '"tcp:1"', '["tcp:8080:interface=127.0.0.1"]'),
        ("METRICS__ALLOW", "127.0.0.1", '["10.0.0.0/8"]'),
        ("DIDCOMM__ALLOW", "did:web:a", '["did:web:example.com:*"]'),
        ("IDENTITY__FORMER_DIDS", "did:web:a", '["did:web:example.com"]'),
        ("DIDCOMM__ENDPOINTS", "x", '{"did:web:example.com": "https://example.com/didcomm"}'),
        ("DIDCOMM__ROUTING_KEYS", "[]", '{"did:web:example.com": ["did:web:example.com#key-1"]}'),
    ],
)
def test_environment_list_error_has_example(key: str, value: str, example: str, tmp_path: Path) -> None:
    name = f"MEDIATORD_{key}"
    (only,) = read_problems(SOME_KEY, tmp_path, {name: value})
    assert only.startswith(f"environment {name}: {key.lower().replace('__', '.')}: expected ")
    assert only.endswith(f" in JSON, such as {name}='{example}'")
    assert read_config(SOME_KEY, tmp_path, {name: example})


def test_environment_section_error_names_variable_of_key(tmp_path: Path) -> None:
    assert read_problems(SOME_KEY, tmp_path, {"MEDIATORD_QUEUE": "5"}) == [
        "environment MEDIATORD_QUEUE: queue: expected a mapping of keys to values; set one variable per key, such as "
        "MEDIATORD_QUEUE__MAX_MESSAGES, or write JSON"
    ]


def test_ignores_variable_of_configuration_path(tmp_path: Path) -> None:
    """MEDIATORD_CONFIG; similar names are errors."""
    assert read_config(
        SOME_KEY, tmp_path, {"MEDIATORD_CONFIG": "/x", "MEDIATORD_JAVA": "/java"}
    ) == Config().resolved(tmp_path)
    (only,) = read_problems(SOME_KEY, tmp_path, {"MEDIATORD_CONFIGS": "/x"})
    assert only.startswith("environment MEDIATORD_CONFIGS: configs: unknown key")
    assert get_default_config_path({}) == get_default_config_path({"MEDIATORD_CONFIG": ""}) == DEFAULT_CONFIG_PATH
    assert get_default_config_path({"MEDIATORD_CONFIG": "here.yaml"}) == Path("here.yaml")


def test_environment_replaces_invalid_value(tmp_path: Path) -> None:
    assert read_config("workers: none", tmp_path, {"MEDIATORD_WORKERS": "1"}).workers == 1


def test_default_node_name_is_valid_in_file_names() -> None:
    assert Config(node="a.b-c_1").node_name == "a.b-c_1"
    assert set(Config().node_name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert Config().node_name


def test_suggests_variable_with_double_underscore(tmp_path: Path) -> None:
    """The variable that is meant is suggested."""
    assert read_problems(SOME_KEY, tmp_path, {"MEDIATORD_QUEUE_MAX_MESSAGES": "5"}) == [
        "environment MEDIATORD_QUEUE_MAX_MESSAGES: queue_max_messages: unknown key; did you mean "
        "MEDIATORD_QUEUE__MAX_MESSAGES?"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "node: b\ndrain_timeout: 2026-13-45",
            "m.yaml:2: invalid YAML: the value is not what its tag or form says; put",
        ),
        (
            "node: a\nlisten: b: c",
            "m.yaml:2: invalid YAML: mapping values are not allowed here; check the indentation",
        ),
        ("node: a\n\tlisten: b", "m.yaml:2: invalid YAML: found character '\\t' that cannot start any token; indent"),
        ("node: a\nlisten: \0", "m.yaml:2: invalid YAML: control characters, or characters that are not UTF-8"),
    ],
    ids=["date", "colon", "tab", "control"],
)
def test_syntax_errors_have_line_and_hint(text: str, expected: str, tmp_path: Path) -> None:
    """Errors of the parser say in which line they are, and what to write instead."""
    (only,) = read_problems(text, tmp_path)
    assert only.startswith(expected)


def test_suggests_network_without_host_bits(tmp_path: Path) -> None:
    """The network that is meant is suggested."""
    assert read_problems("trusted_proxies: [10.1.2.3/8]", tmp_path) == [
        "m.yaml:1: trusted_proxies[0]: expected a network without host bits: 10.0.0.0/8"
    ]


def test_allow_list_requires_allow_and_vice_versa(tmp_path: Path) -> None:
    """Both halves of the setting are asked for by themselves."""
    assert read_problems("decentrl: {registration: allow-list}", tmp_path) == [
        "m.yaml:1: decentrl: expected at least one DID in allow, because registration is allow-list"
    ]
    assert read_problems("decentrl: {allow: ['did:web:a.example']}", tmp_path) == [
        "m.yaml:1: decentrl: expected registration: allow-list, because allow is set; or remove allow"
    ]


def test_apns_requires_ids_and_tls(tmp_path: Path) -> None:
    """A key file is useless without ids, and APNs without TLS."""
    assert read_problems("push: {apns: {key_file: key.p8, key_id: KEY4567890}}", tmp_path) == [
        "m.yaml:1: push.apns: expected key_id, team_id and topic, because key_file is set"
    ]
    assert read_problems("push: {apns: {url: 'http://proxy.example'}}", tmp_path) == [
        "m.yaml:1: push.apns: expected an https:// URL in url, because APNs needs HTTP/2 over TLS"
    ]


@pytest.mark.parametrize(
    "url",
    [
        "https://h.example/woken/",
        "https://h.example/woken?token=a@b",
        "http://127.0.0.1:8080",
        "https://h.example/a@b",
    ],
)
def test_keeps_webhook_url(url: str, tmp_path: Path) -> None:
    """Its path and query are those of the operator's endpoint."""
    assert read_config(f"push: {{webhook: {{url: '{url}', secret_file: s}}}}", tmp_path).push.webhook.url == url


@pytest.mark.parametrize(
    "url",
    ["https://h.example/#a", "https://u:p@h.example/", "ftp://h.example", "h.example", "https:///a", "https://h/ a"],
)
def test_refuses_invalid_webhook_url(url: str, tmp_path: Path) -> None:
    assert read_problems(f"push: {{webhook: {{url: '{url}', secret_file: s}}}}", tmp_path) == [
        "m.yaml:1: push.webhook.url: expected an http:// or https:// URL with a host, without fragment or user name"
    ]


def test_limits_devices(tmp_path: Path) -> None:
    """All of them are sent to for each wake-up."""
    assert read_config("push: {max_devices: 10}", tmp_path).push.max_devices == 10
    assert read_problems("push: {max_devices: 11}", tmp_path) == ["m.yaml:1: push.max_devices: expected at most 10"]
