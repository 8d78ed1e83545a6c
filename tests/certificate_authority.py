"""Certificate authority that issues certificates for servers and clients of one test."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = timedelta(days=1)


class CertificateAuthority:
    """
    Issues certificates.

    :param directory: where its files are written.
    :param parent: authority that signs its certificate; self-signed by default.
    :ivar path: its own certificate, PEM.
    """

    def __init__(
        self, directory: Path, name: str = "Test Authority", parent: CertificateAuthority | None = None
    ) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        issuer = parent or self
        certificate = (
            _builder(self._name, issuer._name, self._key.public_key(), datetime.now(UTC) + _DAY)
            .add_extension(constraints, critical=True)
            .sign(issuer._key, SHA256())
        )
        self.path = self._write(name, [certificate.public_bytes(Encoding.PEM)])

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (),
        *,
        organisation: str = "Test",
        expired: bool = False,
        with_rsa: bool = False,
    ) -> Path:
        """
        Issue a certificate; return the file with it and its private key.

        :param name: common name.
        :param hosts: host names and addresses of the server; empty for a client.
        :param expired: whether it expired yesterday.
        :param with_rsa: whether to use an RSA key.
        """
        key: Any = rsa.generate_private_key(65_537, 2048) if with_rsa else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation),
                x509.NameAttribute(NameOID.COMMON_NAME, name),
            ]
        )
        end = datetime.now(UTC) + (-_DAY if expired else _DAY)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, self._name, key.public_key(), end).add_extension(
            x509.ExtendedKeyUsage(usage), critical=False
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False
            )
        pem = builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)
        return self._write(name, [pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())])

    def _write(self, name: str, parts: Sequence[bytes]) -> Path:
        path = self._directory / f"{name.replace(' ', '-')}.pem"
        path.write_bytes(b"".join(parts))
        return path


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, end: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - 3 * _DAY)
        .not_valid_after(end)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
