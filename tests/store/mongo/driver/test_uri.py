"""Supported and rejected MongoDB URIs; errors are one line without secrets."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from mediatord.store.mongo.driver.tls import ReplicaSetTLS
from mediatord.store.mongo.driver.uri import InvalidMongoURI, parse_mongo_uri
from tests.certificate_authority import CertificateAuthority

FIXED_OPTIONS = "w=majority&journal=true"
SECRET = "s3cret"


def read_refusal(text: str) -> str:
    """The error text."""
    with pytest.raises(InvalidMongoURI) as caught:
        parse_mongo_uri(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    """A certificate authority for all tests, with its certificate in a file."""
    return CertificateAuthority(tmp_path_factory.mktemp("authority"))


def test_defaults_are_safe() -> None:
    """By default writes wait for a majority and its journal. Without a read preference txmongo finds the primary."""
    address = parse_mongo_uri("mongodb://db.example/mediatord")
    assert address.uri == f"mongodb://db.example:27017/mediatord?{FIXED_OPTIONS}"
    assert (address.hosts, address.database) == ("db.example:27017", "mediatord")
    assert address.ssl_context_factory is None
    assert address.x509_user is None


def test_accepts_options_that_agree_with_defaults() -> None:
    """Option names in any case, and options that state what the mediator does anyway, are accepted."""
    uri = (
        "mongodb://DB1:27018,db2,10.0.0.3:27019/m?replicaset=rs0&w=majority&journal=true"
        "&readPreference=primary&retryWrites=true&retryReads=true&tls=false&ssl=false"
    )
    address = parse_mongo_uri(uri)
    assert address.uri == f"mongodb://{address.hosts}/m?{FIXED_OPTIONS}&replicaSet=rs0"
    assert address.hosts == "db1:27018,db2:27017,10.0.0.3:27019"


def test_auth_source() -> None:
    """Credentials are of the database in the path, or of authSource."""
    address = parse_mongo_uri("mongodb://u%40x:p%2B%3A%2F%C3%BC@h/m")
    assert address.uri == (
        f"mongodb://u%40x:p%2B%3A%2F%C3%BC@h:27017/m?{FIXED_OPTIONS}&authMechanism=SCRAM-SHA-1&authSource=m"
    )
    assert "authSource=admin" in parse_mongo_uri("mongodb://u:p@h/m?authSource=admin&authMechanism=SCRAM-SHA-1").uri


def test_repr_hides_secrets() -> None:
    """An address may end up in a traceback."""
    assert SECRET not in repr(parse_mongo_uri(f"mongodb://u:{SECRET}@h/m"))


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        # Authentication would be skipped.
        (f"mongodb://u:{SECRET}@h", "a database name after the hosts, such as mongodb://host:27017/mediatord"),
        (f"mongodb://u:{SECRET}@h/?authSource=admin", "a database name after the hosts"),
        ("mongodb://u@h/m", "a password after the user name"),
        ("mongodb://u:@h/m", "a password after the user name"),
        (f"mongodb://:{SECRET}@h/m", "a user name before the @"),
        ("mongodb://h/m?authSource=admin", "authSource and authMechanism require user name"),
        ("mongodb://h/m?authMechanism=SCRAM-SHA-1", "authSource and authMechanism require user name"),
        (
            f"mongodb://u:{SECRET}@h/m?authMechanism=SCRAM-SHA-256",
            "expected SCRAM-SHA-1 or MONGODB-X509",
        ),
        (f"mongodb://u:{SECRET}@h/m?authSource=$external", "requires authMechanism=MONGODB-X509"),
        ("mongodb://u@h/m?authMechanism=MONGODB-X509", "requires tls=true and tlsCertificateKeyFile"),
        # TLS would be skipped, or mean nothing.
        (
            "mongodb://h/m?tlsInsecure=true",
            "option tlsInsecure is refused: it would disable verification",
        ),
        (
            "mongodb://h/m?tls=true&tlsAllowInvalidCertificates=true",
            "is refused: it would disable verification",
        ),
        (
            "mongodb://h/m?tls=true&tlsAllowInvalidHostnames=false",
            "is refused: it would disable verification",
        ),
        ("mongodb://h/m?tlsCAFile=/ca.pem", "require tls=true"),
        ("mongodb://h/m?tls=false&tlsCertificateKeyFile=/k.pem", "require tls=true"),
        ("mongodb://h/m?tls=true&ssl=false", "options tls and ssl contradict each other: expected only tls"),
        ("mongodb://h/m?tls=yes", "option tls: expected true or false"),
        ("mongodb://h/m?tls=true&tlsCAFile=ca.pem", "option tlsCAFile: expected the absolute path of a PEM file"),
        ("mongodb://mongo_1/m?tls=true", "TLS cannot verify host names with underscores"),
        # Data could be lost or unseen.
        ("mongodb://h/m?w=1", "option w: expected majority"),
        ("mongodb://h/m?w=0", "option w: expected majority"),
        ("mongodb://h/m?journal=false", "option journal: expected true"),
        ("mongodb://h/m?readPreference=secondaryPreferred", "option readPreference: expected primary"),
        ("mongodb://h/m?retryWrites=false", "option retryWrites: expected true"),
        ("mongodb://h/local", "not admin, config or local"),
        ("mongodb://h/Admin", "not admin, config or local"),
        # It would do nothing.
        ("mongodb://h/m?compressors=zstd", "option compressors is not supported"),
        ("mongodb://h/m?serverSelectionTimeoutMS=500", "option serverSelectionTimeoutMS is not supported"),
        ("mongodb://h/m?maxPoolSize=5", "option maxPoolSize is not supported; expected only replicaSet, authSource,"),
        ("mongodb://h/m?w=majority&w=1", "option w is given twice: expected once"),
        ("mongodb://h/m?replicaSet=", "option replicaSet: expected 1 to 63"),
        ("mongodb://h/m?", ""),
        # It is none.
        ("mongodb+srv://u:p@cluster.example/m", "mongodb+srv:// is not supported"),
        ("https://h/m", "expected a mongodb:// URI"),
        ("mongodb:h/m", "expected a mongodb:// URI"),
        ("mongodb://", "list of host:port"),
        ("mongodb:///m", "list of host:port"),
        ("mongodb://h,/m", "list of host:port"),
        ("mongodb://::1/m", "list of host:port"),
        ("mongodb://h,[::1]:27020/m", "IPv6 addresses are not supported"),
        ("mongodb://[::1/m", "IPv6 addresses are not supported"),
        ("mongodb://h:0/m", "a port between 1 and 65535"),
        ("mongodb://h:65536/m", "a port between 1 and 65535"),
        ("mongodb://h:/m", "a port between 1 and 65535"),
        (f"mongodb://h:{'1' * 5000}/m", "a port between 1 and 65535"),
        ("mongodb://%2Ftmp%2Fmongodb-27017.sock/m", "UNIX sockets are not supported"),
        ("mongodb://h/m.things", "a database name of 1 to 63 letters"),
        ("mongodb://h/a/b", "a database name of 1 to 63 letters"),
        (f"mongodb://h/{'m' * 64}", "a database name of 1 to 63 letters"),
        ("mongodb://h/m n", "to be percent-encoded"),
        ("mongodb://ü/m", "to be percent-encoded"),
        ("mongodb://h/m#x", "to be percent-encoded"),
        ("mongodb://u:%f@h/m", "expected % in the password to be percent-encoded: %25"),
        ("mongodb://u:%ff@h/m", "expected the password to be percent-encoded UTF-8"),
    ],
)
def test_rejects_unsafe_options(uri: str, text: str) -> None:
    """Options that would skip authentication or TLS, lose data or be ignored."""
    if not text:
        assert parse_mongo_uri(uri)
        return
    found = read_refusal(uri)
    assert text in found
    assert SECRET not in found


@pytest.mark.parametrize("sign", "/?@:+#[] &=%é")
def test_password_is_used_as_intended_or_rejected(sign: str) -> None:
    """Whatever its quoting, a URI is rejected or its password is used as intended."""
    for password in (
        f"{SECRET}{sign}{SECRET}",
        f"{SECRET}{sign}{SECRET}={SECRET}",
        f"{sign}{SECRET}",
        f"{SECRET}{sign}",
    ):
        try:
            address = parse_mongo_uri(f"mongodb://u:{password}@h/m")
        except InvalidMongoURI as error:
            assert SECRET not in str(error)
        else:
            assert f":{quote(password, safe='')}@" in address.uri
        found = parse_mongo_uri(f"mongodb://u:{quote(password, safe='')}@h/m")
        assert f":{quote(password, safe='')}@" in found.uri


def test_builds_tls_options(authority: CertificateAuthority) -> None:
    """`ssl` is another name of it. TLS options are not left in the URI, where txmongo ignores them."""
    for switch in ("tls=true", "ssl=true", "tls=true&ssl=true"):
        address = parse_mongo_uri(f"mongodb://db.example/m?{switch}&tlsCAFile={quote(str(authority.path))}")
        assert isinstance(address.ssl_context_factory, ReplicaSetTLS)
        assert address.uri == f"mongodb://db.example:27017/m?{FIXED_OPTIONS}"


def test_rejects_unreadable_authority(authority: CertificateAuthority, tmp_path: Path) -> None:
    """A file that cannot be read, or has no certificate, is an error."""
    assert read_refusal(f"mongodb://h/m?tls=true&tlsCAFile={tmp_path}/none") == (
        f"tlsCAFile: {tmp_path}/none: No such file or directory"
    )
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing", encoding="ascii")
    assert read_refusal(f"mongodb://h/m?tls=true&tlsCAFile={empty}") == "tlsCAFile: expected PEM certificates"


def test_client_certificate_needs_its_key(authority: CertificateAuthority, tmp_path: Path) -> None:
    """A client certificate needs its own private key."""
    issued, other = authority.issue("ours"), authority.issue("other")
    marker = b"-----BEGIN PRIVATE KEY"
    mixed = tmp_path / "mixed.pem"
    mixed.write_bytes(issued.read_bytes().split(marker)[0] + marker + other.read_bytes().split(marker)[1])
    for path, text in [
        (authority.path, "expected a PEM certificate and its unencrypted private key"),
        (mixed, "the private key does not match the certificate"),
        (tmp_path / "none", f"{tmp_path}/none: No such file or directory"),
    ]:
        found = read_refusal(f"mongodb://h/m?tls=true&tlsCertificateKeyFile={path}")
        assert found == f"tlsCertificateKeyFile: {text}"


def test_x509_user_is_subject_of_certificate(authority: CertificateAuthority) -> None:
    """Its subject is the user unless the URI has one; txmongo gets no credentials in the URI."""
    certificate = authority.issue("node", organisation="Mediators, Inc.")
    tls = f"tls=true&tlsCAFile={authority.path}&tlsCertificateKeyFile={certificate}&authMechanism=MONGODB-X509"
    address = parse_mongo_uri(f"mongodb://h/m?{tls}")
    assert address.x509_user == r"CN=node,O=Mediators\, Inc."
    assert address.uri == f"mongodb://h:27017/m?{FIXED_OPTIONS}"
    named = parse_mongo_uri(f"mongodb://{quote('CN=x,O=y')}@h/m?{tls}&authSource=$external")
    assert named.x509_user == "CN=x,O=y"
    assert named.uri == address.uri


@pytest.mark.parametrize(
    ("credentials", "more", "text"),
    [
        ("u:p@", "", "expected no password"),
        ("", "&authSource=admin", "expected authSource=$external, or no authSource"),
    ],
)
def test_rejects_certificate_with_password(
    credentials: str, more: str, text: str, authority: CertificateAuthority
) -> None:
    """A certificate and a password are contradictory."""
    certificate = authority.issue("node")
    tls = f"tls=true&tlsCertificateKeyFile={certificate}&authMechanism=MONGODB-X509"
    assert text in read_refusal(f"mongodb://{credentials}h/m?{tls}{more}")
