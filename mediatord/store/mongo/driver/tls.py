"""TLS to whichever member of a replica set is being connected to, each held to its own name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from OpenSSL.SSL import Error
from service_identity import CertificateError, VerificationError
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import Certificate, optionsForClientTLS, trustRootFromCertificates
from twisted.python.failure import Failure
from zope.interface import implementer


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """
    What we show to servers that ask.

    :param chain: between ours and the authority.
    """

    certificate: x509.Certificate
    key: PrivateKeyTypes = field(repr=False)
    chain: Sequence[x509.Certificate]

    def options(self) -> dict[str, Any]:
        """Arguments of :class:`~twisted.internet.ssl.CertificateOptions`."""
        return {
            "certificate": self.certificate,
            "privateKey": self.key,
            "extraCertChain": list(self.chain),
        }


@implementer(IOpenSSLClientConnectionCreator)
class ReplicaSetTLS:
    """
    What txmongo takes as `ssl_context_factory`. It uses one for all members, and turns its connectors from one member
    to the next; so the name to insist on is found out when a connection is made.

    :param authority: who signed the members' certificates; an IOpenSSLTrustRoot. None: those that the system trusts.
    :param certificate: ours, if servers want one.
    """

    def __init__(self, *, authority: Any = None, certificate: ClientCertificate | None = None) -> None:
        self._authority = authority
        self._certificate = certificate
        self._creators: dict[str, Any] = {}
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    @property
    def subject(self) -> str | None:
        """The user that our certificate stands for, as MongoDB writes it."""
        if self._certificate is None:
            return None
        return self._certificate.certificate.subject.rfc4514_string(_RFC_2253)

    def check(self, host: str) -> None:
        """
        See whether a certificate could be for this host.

        :raise ValueError: the name is not one that certificates are made for.
        """
        try:
            self._creator(host)
        except (UnicodeError, ValueError):
            raise ValueError("expected host names without underscores, which no certificate is made for") from None

    def clientConnectionForTLS(self, protocol: Any) -> Any:
        """A connection that ends before anything is sent unless the other side is who we meant to reach."""
        destination = protocol.wrappedProtocol.factory.connector.getDestination()
        name = self._name_of(destination.host, destination.port)
        self._names[protocol] = name
        return self._creator(name).clientConnectionForTLS(protocol)

    def _name_of(self, host: str, port: int) -> str:
        """
        What its certificate has to be for. txmongo watches a member at the address that a connection has led to,
        while the certificate is for the name; several members may be at one address, each with a name of its own.
        """
        if isIPAddress(host) or isIPv6Address(host):
            for other, name in self._names.items():
                if other.connected and _is_peer(other.transport.getPeer(), host, port):
                    return name
        return host

    def _creator(self, host: str) -> Any:
        if host not in self._creators:
            ours = self._certificate.options() if self._certificate else {}
            self._creators[host] = optionsForClientTLS(host, self._authority, extraCertificateOptions=ours)
        return self._creators[host]


def _is_peer(peer: Any, host: str, port: int) -> bool:
    return bool((peer.host, peer.port) == (host, port))


# What RFC 4514 leaves as numbers.
_RFC_2253 = {x509.NameOID.EMAIL_ADDRESS: "emailAddress"}


def describe_tls_failure(reason: Failure) -> str | None:
    """What TLS had against a connection that was lost, in words for an operator; None if it was something else."""
    if reason.check(VerificationError, CertificateError):
        return "its certificate is for another name"
    if not isinstance(reason.value, Error):
        return None
    # Fixed texts of OpenSSL's, innermost last.
    texts = [str(one[-1]) for one in reason.value.args[0]] if reason.value.args else []
    if "certificate verify failed" in texts:
        return "its certificate is not one of the authority, or out of date"
    return f"TLS failed: {texts[-1]}" if texts else "TLS failed"


def load_ca_certificates(path: str) -> Any:
    """
    The certificates in a PEM file, as a trust root.

    :raise ValueError: it cannot be read, or has none.
    """
    try:
        found = x509.load_pem_x509_certificates(_read_file(path, "tlsCAFile"))
    except ValueError as error:
        raise _build_file_error(error, "tlsCAFile: expected certificates in PEM") from None
    return trustRootFromCertificates([Certificate.loadPEM(one.public_bytes(Encoding.PEM)) for one in found])


def load_client_certificate(path: str) -> ClientCertificate:
    """
    The certificate, its private key, and the certificates in between, in a PEM file.

    :raise ValueError: it cannot be read, lacks one of them, or they do not belong together.
    """
    try:
        pem = _read_file(path, "tlsCertificateKeyFile")
        ours, *chain = x509.load_pem_x509_certificates(pem)
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        text = "tlsCertificateKeyFile: expected a certificate and its unencrypted private key in PEM"
        raise _build_file_error(error, text) from None
    if key.public_key() != ours.public_key():
        raise ValueError("tlsCertificateKeyFile: expected a certificate and its own private key")
    return ClientCertificate(ours, key, chain)


class _UnreadableFile(ValueError):
    """What the system says of a file."""


def _read_file(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _UnreadableFile(f"{option}: {path}: {error.strerror}") from None


def _build_file_error(error: Exception, text: str) -> ValueError:
    return error if isinstance(error, _UnreadableFile) else ValueError(text)
