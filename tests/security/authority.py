"""Certificates for tests: an authority, and what it signs."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


class Authority:
    """Signs certificates and writes them beside its own."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._builder(self._name, self._key).add_extension(constraint, critical=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def sign(self, name: str, *hosts: str) -> dict[str, str]:
        """Return the TLS settings of a process, without a prefix: what it shows is good for these hosts."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([_general(host) for host in hosts or ("127.0.0.1",)])
        certificate = self._builder(subject, key).add_extension(names, critical=False)
        cert, secret = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return {"tls_ca": str(self.file), "tls_cert": str(cert), "tls_key": str(secret)}

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
