"""
Strict parser of MongoDB URIs.

txmongo ignores what it does not support, so a URI that requires authentication or TLS may get neither. Everything
that would be ignored is rejected here, with a one-line error without secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, unquote, urlencode

from mediatord.store.mongo.driver.tls import ReplicaSetTLS, load_ca_certificates, load_client_certificate

_HOST_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,63}")
_OPTION_PATTERN = re.compile(r"[A-Za-z]{1,40}")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DEFAULT_PORT = 27017
_MAX_PORT = 65535
# Two system databases, and one that is not replicated. Names that differ only in case cannot coexist.
_RESERVED_DATABASES = {"admin", "config", "local"}
_SCRAM, _X509 = "SCRAM-SHA-1", "MONGODB-X509"
_EXTERNAL = "$external"


class InvalidMongoURI(ValueError):
    """The URI cannot be used; the text is one line for the operator, without secrets."""


@dataclass(frozen=True, slots=True)
class MongoConnectionSettings:
    """
    Addresses and credentials of a replica set.

    :param uri: for txmongo; includes the password.
    :param hosts: `host:port` of each seed, for logs.
    :param ssl_context_factory: for txmongo; None: no TLS.
    :param x509_user: user in `$external` to authenticate as by client certificate, which txmongo takes apart from the
        URI; None: authenticate as the URI says, if it does.
    """

    uri: str = field(repr=False)
    hosts: str
    database: str
    ssl_context_factory: ReplicaSetTLS | None = None
    x509_user: str | None = field(default=None, repr=False)


class _ParsedURI(NamedTuple):
    """Parts of a URI, of which only the hosts are validated."""

    hosts: list[tuple[str, int]]
    user: str | None
    password: str | None
    database: str
    options: Mapping[str, str]


def parse_mongo_uri(text: str) -> MongoConnectionSettings:
    """
    Parse a URI and build one that txmongo supports. Reads the files of `tlsCAFile` and `tlsCertificateKeyFile`; does
    not connect.

    :raise InvalidMongoURI: it is malformed, or part of it would be ignored.
    """
    parts = _parse(text)
    tls = _build_tls(parts)
    user = None
    if parts.options.get("authmechanism") == _X509:
        user = _get_x509_user(parts, tls)
    else:
        _check_credentials(parts)
    hosts = ",".join(f"{host}:{port}" for host, port in parts.hosts)
    return MongoConnectionSettings(
        _build_txmongo_uri(parts, hosts, with_password=user is None), hosts, parts.database, tls, user
    )


def _parse(text: str) -> _ParsedURI:
    scheme, found, rest = text.partition("://")
    if scheme == "mongodb+srv":
        raise InvalidMongoURI("mongodb+srv:// is not supported: expected mongodb:// with the hosts themselves")
    if scheme != "mongodb" or not found:
        raise InvalidMongoURI("expected a mongodb:// URI")
    if not rest.isascii() or not rest.isprintable() or " " in rest or "#" in rest:
        raise InvalidMongoURI("expected other than letters, digits and punctuation to be written as %xx")
    authority, path, query = _split_uri(rest)
    # Errors below may repeat an option's name, which is no part of a password from here on.
    userinfo, at, hosts = authority.rpartition("@")
    user, password = _parse_userinfo(userinfo) if at else (None, None)
    return _ParsedURI(
        [_parse_host(one) for one in hosts.split(",")], user, password, _parse_database(path), _parse_options(query)
    )


def _split_uri(rest: str) -> tuple[str, str, str]:
    """Split into authority, path and query."""
    before, _, query = rest.partition("?")
    authority, _, path = before.partition("/")
    if "@" in path or "@" in query:
        raise InvalidMongoURI("expected /, ? and @ in user name and password to be written as %2F, %3F and %40")
    return authority, path, query


def _parse_userinfo(text: str) -> tuple[str, str | None]:
    # Some drivers decode a plus sign to a space, others do not.
    if "@" in text or "+" in text or text.count(":") > 1:
        raise InvalidMongoURI("expected @, : and + in user name and password to be written as %40, %3A and %2B")
    user, colon, password = text.partition(":")
    if not user:
        raise InvalidMongoURI("expected a user name before the @")
    return _decode(user, "user name"), _decode(password, "password") if colon else None


def _decode(text: str, what: str) -> str:
    if _STRAY_PERCENT.search(text):
        raise InvalidMongoURI(f"expected % in the {what} to be written as %25")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidMongoURI(f"expected the {what} to be UTF-8, written as %xx") from None


def _parse_host(text: str) -> tuple[str, int]:
    if "%" in text:
        raise InvalidMongoURI("Unix sockets are not supported: expected host:port")
    if text.startswith("["):
        # txmongo splits host and port at the first colon.
        raise InvalidMongoURI("IPv6 addresses are not supported: expected host names")
    host, colon, port = text.rpartition(":") if re.search(r":\d*$", text) else (text, "", "")
    if not _HOST_PATTERN.fullmatch(host):
        raise InvalidMongoURI("expected host:port, several separated by commas, before the database name")
    # int() rejects thousands of digits with another error.
    if colon and (len(port) > len(str(_MAX_PORT)) or not 1 <= int(port or 0) <= _MAX_PORT):
        raise InvalidMongoURI("expected a port between 1 and 65535")
    return host.lower(), int(port or _DEFAULT_PORT)


def _parse_database(path: str) -> str:
    if not path:
        raise InvalidMongoURI("expected a database name after the hosts, as in /mediatord: no authentication without")
    if not _NAME_PATTERN.fullmatch(path) or path.lower() in _RESERVED_DATABASES:
        raise InvalidMongoURI(
            "expected a database name of at most 63 letters, digits, - and _, which is not admin, config or local"
        )
    return path


def _parse_options(query: str) -> dict[str, str]:
    """Parse options by lower-case name; each is supported, and so is its value."""
    options: dict[str, str] = {}
    for one in query.split("&") if query else []:
        name, _, value = one.partition("=")
        known = _SUPPORTED_OPTIONS.get(name.lower())
        if known is None:
            raise InvalidMongoURI(_describe_unknown_option(name))
        if name.lower() in options:
            raise InvalidMongoURI(f"option {known.name} is there twice")
        value = _decode(value, f"option {known.name}")
        if not known.accepts(value):
            raise InvalidMongoURI(f"option {known.name}: expected {known.expected}")
        options[name.lower()] = value
    if "ssl" in options and options.setdefault("tls", options["ssl"]) != options["ssl"]:
        raise InvalidMongoURI("options tls and ssl contradict each other")
    return options


def _describe_unknown_option(name: str) -> str:
    called = f"option {name}" if _OPTION_PATTERN.fullmatch(name) else "an option"
    why = _UNSUPPORTED_OPTIONS.get(name.lower(), "is not supported")
    return f"{called} {why}: expected only {', '.join(known.name for known in _SUPPORTED_OPTIONS.values())}"


def _build_tls(parts: _ParsedURI) -> ReplicaSetTLS | None:
    authority = parts.options.get("tlscafile")
    certificate = parts.options.get("tlscertificatekeyfile")
    if parts.options.get("tls") != "true":
        if authority or certificate:
            raise InvalidMongoURI("tlsCAFile and tlsCertificateKeyFile do nothing without tls: expected tls=true")
        return None
    try:
        tls = ReplicaSetTLS(
            authority=load_ca_certificates(authority) if authority else None,
            certificate=load_client_certificate(certificate) if certificate else None,
        )
        for host, _ in parts.hosts:
            tls.check(host)
    except ValueError as error:
        raise InvalidMongoURI(str(error)) from None
    return tls


def _get_x509_user(parts: _ParsedURI, tls: ReplicaSetTLS | None) -> str:
    if tls is None or tls.subject is None:
        raise InvalidMongoURI(f"authMechanism={_X509}: expected tls=true and a tlsCertificateKeyFile")
    if parts.password is not None:
        raise InvalidMongoURI(f"authMechanism={_X509}: expected no password")
    if parts.options.get("authsource", _EXTERNAL) != _EXTERNAL:
        raise InvalidMongoURI(f"authMechanism={_X509}: expected authSource={_EXTERNAL}, or none")
    return parts.user or tls.subject


def _check_credentials(parts: _ParsedURI) -> None:
    if parts.user is not None and not parts.password:
        raise InvalidMongoURI("expected a password beside the user name: no authentication without")
    if parts.options.get("authsource") == _EXTERNAL:
        raise InvalidMongoURI(f"authSource={_EXTERNAL}: expected authMechanism={_X509}")
    if parts.user is None and {"authsource", "authmechanism"} & set(parts.options):
        raise InvalidMongoURI("authSource and authMechanism do nothing without user name and password")


def _build_txmongo_uri(parts: _ParsedURI, hosts: str, *, with_password: bool) -> str:
    # Not `readPreference=primary`: with that, txmongo does not check that a member is the primary.
    options = {"w": "majority", "journal": "true"}
    if "replicaset" in parts.options:
        options["replicaSet"] = parts.options["replicaset"]
    credentials = ""
    if with_password and parts.user and parts.password:
        credentials = f"{quote(parts.user, safe='')}:{quote(parts.password, safe='')}@"
        options["authMechanism"] = _SCRAM
        options["authSource"] = parts.options.get("authsource", parts.database)
    return f"mongodb://{credentials}{hosts}/{parts.database}?{urlencode(options)}"


class _OptionRule(NamedTuple):
    """
    A supported option.

    :param accepts: whether it may have a value.
    :param expected: the same in words.
    """

    name: str
    accepts: Callable[[str], object]
    expected: str


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


_BOOLEAN = _one_of("true", "false"), "true or false"
_ABSOLUTE_PATH = (lambda value: value.startswith("/")), "the absolute path of a PEM file"
_ALWAYS_TRUE = _one_of("true"), "true, since the mediator tries again in any case"

_SUPPORTED_OPTIONS = {
    known.name.lower(): known
    for known in (
        _OptionRule("replicaSet", _NAME_PATTERN.fullmatch, "a name of letters, digits, hyphens and underscores"),
        _OptionRule(
            "authSource", lambda value: value == _EXTERNAL or _NAME_PATTERN.fullmatch(value), "a database name"
        ),
        _OptionRule("authMechanism", _one_of(_SCRAM, _X509), f"{_SCRAM} or {_X509}: others are not supported"),
        _OptionRule("tls", *_BOOLEAN),
        _OptionRule("ssl", *_BOOLEAN),
        _OptionRule("tlsCAFile", *_ABSOLUTE_PATH),
        _OptionRule("tlsCertificateKeyFile", *_ABSOLUTE_PATH),
        _OptionRule("w", _one_of("majority"), "majority, or what was acknowledged could be lost"),
        _OptionRule("journal", _one_of("true"), "true, or what was acknowledged could be lost"),
        _OptionRule("readPreference", _one_of("primary"), "primary, or what was acknowledged might not be seen"),
        _OptionRule("retryWrites", *_ALWAYS_TRUE),
        _OptionRule("retryReads", *_ALWAYS_TRUE),
    )
}
_UNVERIFIED = "would leave the server unverified"
_OWN_TIMEOUTS = "does nothing, since the mediator has time limits of its own"
_UNSUPPORTED_OPTIONS = {
    "tlsinsecure": _UNVERIFIED,
    "tlsallowinvalidcertificates": _UNVERIFIED,
    "tlsallowinvalidhostnames": _UNVERIFIED,
    "compressors": "does nothing: there is no compression",
    "connecttimeoutms": _OWN_TIMEOUTS,
    "serverselectiontimeoutms": _OWN_TIMEOUTS,
    "sockettimeoutms": _OWN_TIMEOUTS,
    "wtimeoutms": _OWN_TIMEOUTS,
}
