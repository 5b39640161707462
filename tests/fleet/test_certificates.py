import socket
import ssl
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

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
    folder = tmp_path_factory.mktemp("other")
    c.make_authority(folder)
    return folder


def shake_hands(folder, authority, host="localhost"):
    """Connect over TLS, as strictly as Python can check, and return what the server said."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / c.SERVER_CERTIFICATE, folder / c.SERVER_KEY)
    calling = ssl.create_default_context(cafile=authority / c.CA_CERTIFICATE)
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()

    def serve():
        with suppress(OSError), far, serving.wrap_socket(far, server_side=True) as secure:
            secure.sendall(b"hello")

    server = threading.Thread(target=serve)
    server.start()
    try:
        with near, calling.wrap_socket(near, server_hostname=host) as secure:
            return secure.recv(5).decode()
    finally:
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


def test_expired_certificate_is_refused_until_the_next(folder, monkeypatch):
    past = SimpleNamespace(now=lambda zone: datetime.now(UTC) - timedelta(days=9))
    with monkeypatch.context() as patch:
        patch.setattr(c, "datetime", past)
        c.make_server_certificate(folder, ["localhost"], days=2)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(folder, folder)
    c.make_server_certificate(folder, ["localhost"], days=2)
    assert shake_hands(folder, folder) == "hello"
    made = x509.load_pem_x509_certificate((folder / c.SERVER_CERTIFICATE).read_bytes())
    # two from now, one for clocks that are behind
    assert (made.not_valid_after_utc - made.not_valid_before_utc).days == 3


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (c.make_authority, "file must not be there yet"),
        (lambda f: c.make_node_key(f, "../a"), "node must be a plain file name"),
        (lambda f: c.make_node_key(f, "a.pub"), "node must be a plain file name"),
        (lambda f: c.make_server_certificate(f, ["a"], days=0), "days must be a whole number"),
        (lambda f: c.make_server_certificate(f, ["a"], days=10**9), "days must be a number in"),
        (lambda f: c.make_server_certificate(f / "b", ["a"]), "put ca.crt and ca.key there"),
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
