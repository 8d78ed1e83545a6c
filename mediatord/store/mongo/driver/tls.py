"""TLS to the members of a replica set, each verified by its own host name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from OpenSSL.SSL import Error
from service_identity import CertificateError, VerificationError
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import Certificate, optionsForClientTLS, trustRootFromCertificates
from twisted.python.failure import Failure
from zope.interface import implementer


@implementer(IOpenSSLClientConnectionCreator)
class ReplicaSetTLS:
    """
    TLS connection creator, which txmongo takes as `ssl_context_factory`. txmongo uses one for all members, and reuses
    its connectors for other members, so the name to verify is found when a connection is made.

    :param authority: IOpenSSLTrustRoot of the members' certificates; None: that of the system.
    :param certificate: presented to servers that request one: arguments of
        :class:`~twisted.internet.ssl.CertificateOptions`.
    """

    def __init__(self, *, authority: Any = None, certificate: dict[str, Any] | None = None) -> None:
        self._authority = authority
        self._certificate = certificate or {}
        self._creators: dict[str, Any] = {}
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    @property
    def subject(self) -> str | None:
        """Subject of the client certificate in the form of MongoDB user names."""
        certificate: x509.Certificate | None = self._certificate.get("certificate")
        return None if certificate is None else certificate.subject.rfc4514_string(_RFC_2253)

    def check(self, host: str) -> None:
        """
        Check that a certificate can be issued for a host.

        :raise ValueError: it cannot.
        """
        try:
            self._get_creator(host)
        except (UnicodeError, ValueError):
            raise ValueError(
                "TLS cannot verify host names with underscores: expected letters, digits, dots and hyphens"
            ) from None

    def clientConnectionForTLS(self, protocol: Any) -> Any:
        """Create a connection that is closed before any data is sent unless the server is verified."""
        destination = protocol.wrappedProtocol.factory.connector.getDestination()
        name = self._find_name(destination.host, destination.port)
        self._names[protocol] = name
        return self._get_creator(name).clientConnectionForTLS(protocol)

    def _find_name(self, host: str, port: int) -> str:
        """
        Find the name that the certificate has to be for. txmongo monitors a member by the address of a connection,
        while its certificate is for its name; several members may share an address, each with a name of its own.
        """
        if isIPAddress(host) or isIPv6Address(host):
            for other, name in self._names.items():
                peer = other.transport.getPeer() if other.connected else None
                if peer is not None and (peer.host, peer.port) == (host, port):
                    return name
        return host

    def _get_creator(self, host: str) -> Any:
        if host not in self._creators:
            self._creators[host] = optionsForClientTLS(
                host, self._authority, extraCertificateOptions=self._certificate
            )
        return self._creators[host]


# An attribute that RFC 4514 writes as a number, and MongoDB by its name in RFC 2253.
_RFC_2253 = {x509.NameOID.EMAIL_ADDRESS: "emailAddress"}


def describe_tls_failure(reason: Failure) -> str | None:
    """Describe for an operator why TLS closed a connection; None if it was closed for another reason."""
    if reason.check(VerificationError, CertificateError):
        return "its certificate is for another host name"
    if not isinstance(reason.value, Error):
        return None
    # Fixed texts of OpenSSL, the innermost last.
    texts = [str(one[-1]) for one in reason.value.args[0]] if reason.value.args else []
    if "certificate verify failed" in texts:
        return "its certificate is not signed by a trusted authority, or has expired"
    return f"TLS failed: {texts[-1]}" if texts else "TLS failed"


def load_ca_certificates(path: str) -> Any:
    """
    Load the certificates in a PEM file as a trust root.

    :raise ValueError: the file cannot be read, or has none.
    """
    pem = _read_file(path, "tlsCAFile")
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ValueError("tlsCAFile: expected PEM certificates") from None
    return trustRootFromCertificates([Certificate.loadPEM(one.public_bytes(Encoding.PEM)) for one in found])


def load_client_certificate(path: str) -> dict[str, Any]:
    """
    Load a certificate, its private key and intermediate certificates from a PEM file.

    :return: arguments of :class:`~twisted.internet.ssl.CertificateOptions`.
    :raise ValueError: the file cannot be read, or certificate and key are missing or do not match.
    """
    pem = _read_file(path, "tlsCertificateKeyFile")
    try:
        certificate, *chain = x509.load_pem_x509_certificates(pem)
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        text = "tlsCertificateKeyFile: expected a PEM certificate and its unencrypted private key"
        raise ValueError(text) from None
    if key.public_key() != certificate.public_key():
        raise ValueError("tlsCertificateKeyFile: the private key does not match the certificate")
    return {"certificate": certificate, "privateKey": key, "extraCertChain": chain}


def _read_file(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: {path}: {error.strerror}") from None
