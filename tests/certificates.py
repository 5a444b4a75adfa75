"""Certificates of an authority that nobody else knows, and servers that have them."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

YEAR = datetime.timedelta(days=365)


class Authority:
    """Its certificate is in `file` (PEM), as users have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "authority.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of a test")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        signed = self._builder(self._name, self._key.public_key(), 1 * YEAR).add_extension(constraints, critical=True)
        self.file.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def server(self, *, name: str | None = None, expired: bool = False) -> ssl.SSLContext:
        """Of a server at 127.0.0.1, or of that name instead."""
        key = ec.generate_private_key(ec.SECP256R1())
        at: x509.GeneralName = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([at if name is None else x509.DNSName(name)])
        unsigned = self._builder(x509.Name([]), key.public_key(), -1 * YEAR if expired else YEAR)
        certificate = unsigned.add_extension(names, critical=True).sign(self._key, hashes.SHA256())
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file = self.folder / "server.pem"
        file.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * YEAR)
            .not_valid_after(now + until)
        )
