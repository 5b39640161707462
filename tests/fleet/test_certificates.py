import socket
import ssl
import stat
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from flwr_hetero.fleet import certificates as c


@pytest.fixture
def folder(tmp_path):
    c.make_authority(tmp_path)
    c.make_server_certificate(tmp_path, ["localhost", "127.0.0.1"])
    return tmp_path


def shake_hands(folder, authority, host) -> str:
    """Connect over TLS, as strictly as Python can check, and return what the server said."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / c.SERVER_CERTIFICATE, folder / c.SERVER_KEY)
    calling = ssl.create_default_context(cafile=authority)
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


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_tls_holds_for_the_names_given(folder, host):
    assert shake_hands(folder, folder / c.CA_CERTIFICATE, host) == "hello"


def test_tls_fails_for_another_name(folder):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(folder, folder / c.CA_CERTIFICATE, "example.org")


def test_tls_fails_with_another_authority(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    c.make_authority(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder, other / c.CA_CERTIFICATE, "localhost")


def test_secrets_are_for_the_owner_only(folder):
    c.make_node_key(folder / "nodes", "jetson-1")
    for path in (folder / c.CA_KEY, folder / c.SERVER_KEY, folder / "nodes" / "jetson-1"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((folder / "nodes").stat().st_mode) == 0o700


def test_node_key_is_one_that_flower_takes(folder):
    c.make_node_key(folder, "jetson-1")
    private = serialization.load_ssh_private_key((folder / "jetson-1").read_bytes(), None)
    public = serialization.load_ssh_public_key((folder / "jetson-1.pub").read_bytes())
    assert private.public_key() == public
    assert public.curve.name == "secp384r1"


def test_server_certificate_is_renewed_and_keeps_its_authority(folder):
    before = (folder / c.SERVER_CERTIFICATE).read_bytes()
    c.make_server_certificate(folder, ["localhost"], days=2)
    after = x509.load_pem_x509_certificate((folder / c.SERVER_CERTIFICATE).read_bytes())
    assert before != (folder / c.SERVER_CERTIFICATE).read_bytes()
    lifetime = after.not_valid_after_utc - after.not_valid_before_utc
    assert lifetime.days == 3  # two from now, one for clocks that are behind
    assert shake_hands(folder, folder / c.CA_CERTIFICATE, "localhost") == "hello"


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda f: c.make_authority(f), "file must not be there yet"),
        (lambda f: [c.make_node_key(f, "a") for _ in range(2)], "file must not be there yet"),
        (lambda f: c.make_node_key(f, "../a"), "node must be a plain file name"),
        (lambda f: c.make_node_key(f, ""), "node must be a plain file name"),
        (lambda f: c.make_node_key(f, "a.pub"), "node must be a plain file name"),
        (lambda f: c.make_server_certificate(f, []), "hosts must name the SuperLink"),
        (lambda f: c.make_server_certificate(f, ["a"], days=0), "days must be at least 1"),
        (lambda f: c.make_server_certificate(f / "b", ["a"]), "folder must hold an authority"),
        (lambda f: [(f / c.CA_KEY).unlink(), c.make_authority(f)], "file must not be there yet"),
        (
            lambda f: [(f / c.CA_KEY).unlink(), c.make_server_certificate(f, ["a"])],
            "folder must hold an authority .*: put ca.crt and ca.key there",
        ),
    ],
)
def test_errors(folder, call, rule):
    with pytest.raises(ValueError, match=rule):
        call(folder)


def test_no_key_is_ever_overwritten(folder):
    c.make_node_key(folder, "a")
    before = (folder / "a").read_bytes()
    with pytest.raises(ValueError, match="not be there yet"):
        c.make_node_key(folder, "a")
    assert (folder / "a").read_bytes() == before


def test_half_a_key_pair_is_never_completed_by_another(folder):
    (folder / "a.pub").write_text("a public key")
    with pytest.raises(ValueError, match="file must not be there yet"):
        c.make_node_key(folder, "a")
    assert not (folder / "a").exists()


def test_a_key_of_another_authority_signs_nothing(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    c.make_authority(other)
    (other / c.CA_KEY).replace(folder / c.CA_KEY)
    before = (folder / c.SERVER_CERTIFICATE).read_bytes()
    with pytest.raises(ValueError, match=r"hold a ca\.key that belongs to ca\.crt"):
        c.make_server_certificate(folder, ["localhost"])
    assert (folder / c.SERVER_CERTIFICATE).read_bytes() == before
