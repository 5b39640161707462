import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from flwr_hetero.fleet import certificates as c


@pytest.fixture
def folder(tmp_path):
    c.make_authority(tmp_path)
    c.make_server_certificate(tmp_path, ["localhost", "127.0.0.1"])
    return tmp_path


@pytest.fixture
def other(tmp_path_factory):
    c.make_authority(other := tmp_path_factory.mktemp("other"))
    return other


def shake_hands(folder, authority, host="localhost") -> str:
    """Connect over TLS, as strictly as Python can check, and return what the server said."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / c.SERVER_CERTIFICATE, folder / c.SERVER_KEY)
    calling = ssl.create_default_context(cafile=authority / c.CA_CERTIFICATE)
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()
    far.settimeout(10)

    def serve():
        try:
            with serving.wrap_socket(far, server_side=True) as secure:
                secure.sendall(b"hello")
        except (ssl.SSLError, OSError):
            far.close()

    server = threading.Thread(target=serve)
    server.start()
    near.settimeout(10)
    try:
        with calling.wrap_socket(near, server_hostname=host) as secure:
            return secure.recv(5).decode()
    finally:
        near.close()
        server.join()


def test_tls_holds_for_its_names_and_authority_only(folder, other):
    for host in ("localhost", "127.0.0.1"):
        assert shake_hands(folder, folder, host) == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(folder, folder, "example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder, other)


def test_node_key_is_secret_and_one_that_flower_takes(folder):
    key = folder / "nodes" / "jetson-1"
    c.make_node_key(key.parent, key.name)
    for path in (folder / c.CA_KEY, folder / c.SERVER_KEY, key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    public = serialization.load_ssh_public_key(key.with_suffix(".pub").read_bytes())
    assert private.public_key() == public
    assert public.curve.name == "secp384r1"


def test_server_certificate_is_renewed(folder):
    before = (folder / c.SERVER_CERTIFICATE).read_bytes()
    c.make_server_certificate(folder, ["localhost"], days=2)
    after = (folder / c.SERVER_CERTIFICATE).read_bytes()
    assert before != after
    certificate = x509.load_pem_x509_certificate(after)
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lifetime.days == 3  # two from now, one for clocks that are behind
    assert shake_hands(folder, folder) == "hello"


def test_expiry_is_said_a_month_ahead(folder):
    def said(days):
        return c.expiring(folder, datetime.now(UTC) + timedelta(days=days))

    assert c.expiring(folder) == said(c.SERVER_DAYS - 31) == c.expiring(folder / "empty") == []
    (soon,), (over,) = said(c.SERVER_DAYS - 29), said(c.SERVER_DAYS + 1)
    assert "superlink.crt expires in 28 days, on 20" in soon
    assert "fleet certificates --host" in soon
    assert "superlink.crt HAS EXPIRED" in over
    both = [line.split()[0].split("/")[-1] for line in said(c.CA_DAYS - 1)]
    assert both == ["superlink.crt", "ca.crt"]


def test_expired_certificate_is_refused_until_the_next(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(c, "CLOCK_SKEW", timedelta(days=9))
        patch.setattr(c, "timedelta", lambda days: timedelta(days=days - 3))
        c.make_server_certificate(folder, ["localhost"], days=2)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(folder, folder)
    assert "HAS EXPIRED" in c.expiring(folder)[0]
    c.make_server_certificate(folder, ["localhost"])
    assert shake_hands(folder, folder) == "hello"


def without_key(folder):
    (folder / c.CA_KEY).unlink()
    return folder


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda f: c.make_authority(f), "file must not be there yet"),
        (lambda f: c.make_authority(without_key(f)), "file must not be there yet"),
        (lambda f: c.make_node_key(f, "../a"), "node must be a plain file name"),
        (lambda f: c.make_node_key(f, ""), "node must be a plain file name"),
        (lambda f: c.make_node_key(f, "a.pub"), "node must be a plain file name"),
        (lambda f: c.make_server_certificate(f, []), "hosts must name the SuperLink"),
        (lambda f: c.make_server_certificate(f, ["a"], days=0), "days must be a whole number"),
        (lambda f: c.make_server_certificate(f, ["a"], days=10**9), "days must be a number in"),
        (lambda f: c.make_server_certificate(f, ["10.0.0.300"]), "hosts must hold names or addr"),
        (lambda f: c.make_server_certificate(f / "b", ["a"]), "folder must hold an authority"),
        (
            lambda f: c.make_server_certificate(without_key(f), ["a"]),
            "folder must hold an authority .*: put ca.crt and ca.key there",
        ),
    ],
)
def test_refusals(folder, call, rule):
    with pytest.raises(ValueError, match=rule):
        call(folder)


@pytest.mark.parametrize(("kept", "other_half"), [("a", "a.pub"), ("a.pub", "a")])
def test_no_key_is_overwritten_or_completed(folder, kept, other_half):
    (folder / kept).write_text("a key")
    with pytest.raises(ValueError, match="file must not be there yet"):
        c.make_node_key(folder, "a")
    assert (folder / kept).read_text() == "a key"
    assert not (folder / other_half).exists()


def test_key_of_another_authority_signs_nothing(folder, other):
    (other / c.CA_KEY).replace(folder / c.CA_KEY)
    before = (folder / c.SERVER_CERTIFICATE).read_bytes()
    with pytest.raises(ValueError, match=r"hold a ca\.key that belongs to ca\.crt"):
        c.make_server_certificate(folder, ["localhost"])
    assert (folder / c.SERVER_CERTIFICATE).read_bytes() == before
