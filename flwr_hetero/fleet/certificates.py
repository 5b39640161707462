"""Keys and certificates of a fleet: an authority, the SuperLink's certificate, node keys."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flwr_hetero.errors import check_count, check_number, invalid

CA_CERTIFICATE = "ca.crt"
CA_KEY = "ca.key"
SERVER_CERTIFICATE = "superlink.crt"
SERVER_KEY = "superlink.key"
CA_DAYS = 3650
SERVER_DAYS = 397
CLOCK_SKEW = timedelta(days=1)  # certificates are valid from a day ago, for clocks that are behind
HASH = hashes.SHA384()

Key = ec.EllipticCurvePrivateKey


def make_authority(folder: Path) -> None:
    """Make a certificate authority: ``ca.crt`` for every device, ``ca.key`` to be kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _new_key()
    builder = _certificate(key, "flwr-hetero fleet authority", CA_DAYS)
    certificate = builder.sign(key, HASH).public_bytes(pem.Encoding.PEM)
    _write_pair(folder / CA_KEY, _private_bytes(key), folder / CA_CERTIFICATE, certificate)


def make_server_certificate(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Make the SuperLink's key and certificate, signed by the authority in the same folder."""
    check_number("days", check_count("days", days, 1), f"[1, {CA_DAYS}]")
    authority_key, authority = _load_authority(folder)
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    key = _new_key()
    builder = (
        _certificate(key, hosts[0][:64], days, authority.subject)
        .add_extension(x509.SubjectAlternativeName([_host(name) for name in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(authority_id, critical=False)
    )
    for name in (SERVER_KEY, SERVER_CERTIFICATE):
        (folder / name).unlink(missing_ok=True)
    certificate = builder.sign(authority_key, HASH).public_bytes(pem.Encoding.PEM)
    _write_pair(folder / SERVER_KEY, _private_bytes(key), folder / SERVER_CERTIFICATE, certificate)


def make_node_key(folder: Path, node: str) -> None:
    """Make a device's key pair in OpenSSH format: ``<node>`` and ``<node>.pub``."""
    if Path(node).name != node or node.endswith(".pub"):
        raise invalid("node", node, "be a plain file name")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _new_key()
    public = key.public_key().public_bytes(pem.Encoding.OpenSSH, pem.PublicFormat.OpenSSH)
    public += f" {node}\n".encode()
    private = _private_bytes(key, pem.PrivateFormat.OpenSSH)
    _write_pair(folder / node, private, folder / f"{node}.pub", public)


def _certificate(
    key: Key, name: str, days: int, authority: x509.Name | None = None
) -> x509.CertificateBuilder:
    """Describe a certificate: one that an authority issues, or else that of an authority."""
    is_authority = authority is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.now(UTC) - CLOCK_SKEW
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + CLOCK_SKEW + timedelta(days=days))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
    )


def _load_authority(folder: Path) -> tuple[Key, x509.Certificate]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA_CERTIFICATE).read_bytes())
        key = pem.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
    except (OSError, ValueError) as error:
        hint = f"put {CA_CERTIFICATE} and {CA_KEY} there"
        raise invalid("folder", str(folder), f"hold an authority ({error})", hint) from error
    if not isinstance(key, Key) or key.public_key() != certificate.public_key():
        raise invalid("folder", str(folder), f"hold a {CA_KEY} that belongs to {CA_CERTIFICATE}")
    return key, certificate


def _new_key() -> Key:
    # Flower accepts only elliptic curves for the keys of SuperNodes.
    return ec.generate_private_key(ec.SECP384R1())


def _private_bytes(key: Key, form: pem.PrivateFormat = pem.PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(pem.Encoding.PEM, form, pem.NoEncryption())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_pair(private_path: Path, private: bytes, public_path: Path, public: bytes) -> None:
    """Write a private key and its public part, neither of which may exist yet."""
    for path in (private_path, public_path):
        if path.exists():
            hint = "keep it, or remove it and everything made from it"
            raise invalid("file", str(path), "not be there yet", hint)
    # Each file is created with its mode, so that others can never read the private key.
    for path, content, mode in ((private_path, private, 0o600), (public_path, public, 0o644)):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
