"""
Strict parser of MongoDB URIs.

txmongo ignores what it does not support, so a URI that requires authentication or TLS may get neither. Everything
that would be ignored is rejected here, with a one-line error without secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlencode

from mediatord.store.mongo.driver.tls import ReplicaSetTLS, load_ca_certificates, load_client_certificate

_HOST_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_NAME = r"[A-Za-z0-9_-]{1,63}"
_OPTION_PATTERN = re.compile(r"[A-Za-z]{1,40}")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DEFAULT_PORT = 27017
_MAX_PORT = 65535
# Two system databases, and one that is not replicated. Names that differ only in case cannot coexist.
_RESERVED_DATABASES = {"admin", "config", "local"}
_SCRAM, _X509 = "SCRAM-SHA-1", "MONGODB-X509"
_EXTERNAL = "$external"

_BOOLEAN = "true|false", "true or false"
_ABSOLUTE_PATH = "(?s)/.*", "the absolute path of a PEM file"
_ALWAYS_TRUE = "true", "true; the mediator always retries"
# Patterns of the values, and the same in words.
_SUPPORTED_OPTIONS = {
    "replicaSet": (_NAME, "1 to 63 letters, digits, hyphens or underscores"),
    "authSource": (rf"\{_EXTERNAL}|{_NAME}", "a database name"),
    "authMechanism": (f"{_SCRAM}|{_X509}", f"{_SCRAM} or {_X509}"),
    "tls": _BOOLEAN,
    "ssl": _BOOLEAN,
    "tlsCAFile": _ABSOLUTE_PATH,
    "tlsCertificateKeyFile": _ABSOLUTE_PATH,
    "w": ("majority", "majority; other values could lose accepted messages"),
    "journal": ("true", "true; false could lose accepted messages"),
    "readPreference": ("primary", "primary; secondaries may lack accepted messages"),
    "retryWrites": _ALWAYS_TRUE,
    "retryReads": _ALWAYS_TRUE,
}
_OPTION_NAMES = {name.lower(): name for name in _SUPPORTED_OPTIONS}
_UNVERIFIED = "is refused: it would disable verification of the server"
_OWN_TIMEOUTS = "is not supported: the mediator sets its own timeouts"
_UNSUPPORTED_OPTIONS = {
    "tlsinsecure": _UNVERIFIED,
    "tlsallowinvalidcertificates": _UNVERIFIED,
    "tlsallowinvalidhostnames": _UNVERIFIED,
    "compressors": "is not supported: there is no compression",
    "connecttimeoutms": _OWN_TIMEOUTS,
    "serverselectiontimeoutms": _OWN_TIMEOUTS,
    "sockettimeoutms": _OWN_TIMEOUTS,
    "wtimeoutms": _OWN_TIMEOUTS,
}


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


def parse_mongo_uri(text: str) -> MongoConnectionSettings:
    """
    Parse a URI and build one that txmongo supports. Reads the files of `tlsCAFile` and `tlsCertificateKeyFile`; does
    not connect.

    :raise InvalidMongoURI: it is malformed, or part of it would be ignored.
    """
    scheme, found, rest = text.partition("://")
    _require(scheme != "mongodb+srv", "mongodb+srv:// is not supported: expected mongodb:// with a list of hosts")
    _require(scheme == "mongodb" and found, "expected a mongodb:// URI")
    is_plain = rest.isascii() and rest.isprintable() and " " not in rest and "#" not in rest
    _require(is_plain, "expected spaces, # and non-ASCII characters to be percent-encoded")
    before, _, query = rest.partition("?")
    authority, _, database = before.partition("/")
    misplaced = "expected /, ? and @ in user name and password to be percent-encoded: %2F, %3F, %40"
    _require("@" not in database and "@" not in query, misplaced)
    # Errors below may repeat an option's name, which is no part of a password from here on.
    userinfo, at, host_list = authority.rpartition("@")
    user, password = _parse_userinfo(userinfo) if at else (None, None)
    seeds = [_parse_host(one) for one in host_list.split(",")]
    hosts = ",".join(f"{host}:{port}" for host, port in seeds)
    _check_database(database)
    options = _parse_options(query)
    tls = _build_tls(options, [host for host, _ in seeds])
    # Not `readPreference=primary`: with that, txmongo does not check that a member is the primary.
    sent = {"w": "majority", "journal": "true"}
    if "replicaset" in options:
        sent["replicaSet"] = options["replicaset"]
    if options.get("authmechanism") == _X509:
        x509_user, credentials = _get_x509_user(options, tls, user, password), ""
    else:
        x509_user, credentials = None, _build_credentials(options, user, password)
    if credentials:
        sent |= {"authMechanism": _SCRAM, "authSource": options.get("authsource", database)}
    uri = f"mongodb://{credentials}{hosts}/{database}?{urlencode(sent)}"
    return MongoConnectionSettings(uri, hosts, database, tls, x509_user)


def _require(holds: object, text: str) -> None:
    if not holds:
        raise InvalidMongoURI(text)


def _parse_userinfo(text: str) -> tuple[str, str | None]:
    # Some drivers decode a plus sign to a space, others do not.
    is_plain = "@" not in text and "+" not in text and text.count(":") <= 1
    _require(is_plain, "expected @, : and + in user name and password to be percent-encoded: %40, %3A, %2B")
    user, colon, password = text.partition(":")
    _require(user, "expected a user name before the @")
    return _decode(user, "user name"), _decode(password, "password") if colon else None


def _decode(text: str, what: str) -> str:
    _require(not _STRAY_PERCENT.search(text), f"expected % in the {what} to be percent-encoded: %25")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidMongoURI(f"expected the {what} to be percent-encoded UTF-8") from None


def _parse_host(text: str) -> tuple[str, int]:
    _require("%" not in text, "UNIX sockets are not supported: expected host:port")
    # txmongo splits host and port at the first colon.
    _require(not text.startswith("["), "IPv6 addresses are not supported: expected host names")
    host, colon, port = text.rpartition(":") if re.search(r":\d*$", text) else (text, "", "")
    is_host = _HOST_PATTERN.fullmatch(host)
    _require(is_host, "expected a comma-separated list of host:port before the database name")
    # int() rejects thousands of digits with another error.
    is_port = not colon or (len(port) <= len(str(_MAX_PORT)) and 1 <= int(port or 0) <= _MAX_PORT)
    _require(is_port, "expected a port between 1 and 65535")
    return host.lower(), int(port or _DEFAULT_PORT)


def _check_database(name: str) -> None:
    _require(name, "expected a database name after the hosts, such as mongodb://host:27017/mediatord")
    _require(
        re.fullmatch(_NAME, name) and name.lower() not in _RESERVED_DATABASES,
        "expected a database name of 1 to 63 letters, digits, hyphens or underscores, not admin, config or local",
    )


def _parse_options(query: str) -> dict[str, str]:
    """Parse options by lower-case name; each is supported, and so is its value."""
    options: dict[str, str] = {}
    for one in query.split("&") if query else []:
        given, _, value = one.partition("=")
        key = given.lower()
        if key not in _OPTION_NAMES:
            called = f"option {given}" if _OPTION_PATTERN.fullmatch(given) else "an option"
            why = _UNSUPPORTED_OPTIONS.get(key, "is not supported")
            raise InvalidMongoURI(f"{called} {why}; expected only {', '.join(_SUPPORTED_OPTIONS)}")
        name = _OPTION_NAMES[key]
        pattern, expected = _SUPPORTED_OPTIONS[name]
        _require(key not in options, f"option {name} is given twice: expected once")
        options[key] = _decode(value, f"option {name}")
        _require(re.fullmatch(pattern, options[key]), f"option {name}: expected {expected}")
    if "ssl" in options:
        is_same = options.setdefault("tls", options["ssl"]) == options["ssl"]
        _require(is_same, "options tls and ssl contradict each other: expected only tls")
    return options


def _build_tls(options: Mapping[str, str], hosts: Sequence[str]) -> ReplicaSetTLS | None:
    authority, certificate = options.get("tlscafile"), options.get("tlscertificatekeyfile")
    if options.get("tls") != "true":
        unused = "tlsCAFile and tlsCertificateKeyFile require tls=true"
        _require(not authority and not certificate, unused)
        return None
    try:
        tls = ReplicaSetTLS(
            authority=load_ca_certificates(authority) if authority else None,
            certificate=load_client_certificate(certificate) if certificate else None,
        )
        for host in hosts:
            tls.check(host)
    except ValueError as error:
        raise InvalidMongoURI(str(error)) from None
    return tls


def _get_x509_user(
    options: Mapping[str, str], tls: ReplicaSetTLS | None, user: str | None, password: str | None
) -> str:
    subject = tls.subject if tls is not None else None
    if subject is None:
        raise InvalidMongoURI(f"authMechanism={_X509} requires tls=true and tlsCertificateKeyFile")
    _require(password is None, f"authMechanism={_X509}: expected no password")
    is_external = options.get("authsource", _EXTERNAL) == _EXTERNAL
    _require(is_external, f"authMechanism={_X509}: expected authSource={_EXTERNAL}, or no authSource")
    return user or subject


def _build_credentials(options: Mapping[str, str], user: str | None, password: str | None) -> str:
    """Build the part of the URI before the hosts."""
    has_password = user is None or password
    _require(has_password, "expected a password after the user name, as in user:password@host")
    is_internal = options.get("authsource") != _EXTERNAL
    _require(is_internal, f"authSource={_EXTERNAL} requires authMechanism={_X509}")
    if user is not None and password:
        return f"{quote(user, safe='')}:{quote(password, safe='')}@"
    is_unused = not {"authsource", "authmechanism"} & set(options)
    _require(is_unused, "authSource and authMechanism require user name and password")
    return ""
