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

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "superlink.crt", "superlink.key"
CA_DAYS, SERVER_DAYS = 3650, 397
# certificates are valid from a day ago, for devices whose clock is behind
CLOCK_SKEW = timedelta(days=1)

Key = ec.EllipticCurvePrivateKey
Form = pem.PrivateFormat


def make_authority(folder: Path) -> None:
    """Make a certificate authority: ``ca.crt`` for every device, ``ca.key`` to be kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, name = _new_key(), _name("flwr-hetero fleet authority")
    certificate = _certificate(key, name, CA_DAYS, (key, name))
    _write_pair(folder / CA_KEY, key, folder / CA_CERTIFICATE, certificate)


def make_server_certificate(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Make the SuperLink's key and certificate, signed by the authority in the same folder."""
    check_number("days", check_count("days", days, 1), f"[1, {CA_DAYS}]")
    issuer_key, issuer = _load_authority(folder)
    extensions = (
        x509.SubjectAlternativeName([_host(name) for name in hosts]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
    )
    key, name = _new_key(), _name(hosts[0][:64])
    certificate = _certificate(key, name, days, (issuer_key, issuer.subject), *extensions)
    files = folder / SERVER_KEY, folder / SERVER_CERTIFICATE
    for path in files:
        path.unlink(missing_ok=True)
    _write_pair(files[0], key, files[1], certificate)


def make_node_key(folder: Path, node: str) -> None:
    """Make a device's key pair in OpenSSH format: ``<node>`` and ``<node>.pub``."""
    if Path(node).name != node or node.endswith(".pub"):
        raise invalid("node", node, "be a plain file name")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _new_key()
    public = key.public_key().public_bytes(pem.Encoding.OpenSSH, pem.PublicFormat.OpenSSH)
    public += f" {node}\n".encode()
    _write_pair(folder / node, key, folder / f"{node}.pub", public, Form.OpenSSH)


def _certificate(
    key: Key, name: x509.Name, days: int, issuer: tuple[Key, x509.Name], *more: x509.ExtensionType
) -> bytes:
    """Make a certificate; that of an authority if it is its own issuer."""
    issuer_key, issuer_name = issuer
    is_authority, start = issuer_key is key, datetime.now(UTC) - CLOCK_SKEW
    # in this order: signatures, then what no key here is for, certificates, revocations
    usage = x509.KeyUsage(not is_authority, *[False] * 4, *[is_authority] * 2, *[False] * 2)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + CLOCK_SKEW + timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), True)
        .add_extension(usage, True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA384()).public_bytes(pem.Encoding.PEM)


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
    # By TLS a device authenticates its SuperLink; by its own key the SuperLink authenticates it.
    # Flower requires elliptic node keys.
    return ec.generate_private_key(ec.SECP384R1())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_pair(
    secret: Path, key: Key, other: Path, public: bytes, form: Form = Form.PKCS8
) -> None:
    """Write two files that are not there yet; the first, a key, is a secret."""
    private = key.private_bytes(pem.Encoding.PEM, form, pem.NoEncryption())
    for path in (secret, other):
        if path.exists():
            hint = "keep it, or remove it and everything made from it"
            raise invalid("file", str(path), "not be there yet", hint)
    # made with its mode: at no moment can others read the first
    for path, content, mode in ((secret, private, 0o600), (other, public, 0o644)):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
