import pytest

from flwr_hetero import cli


def main(arguments):
    return cli.main(["fleet", *arguments])


def test_up_warns_of_other_users(capsys):
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "CAN RUN CODE AS YOU" in " ".join(capsys.readouterr().out.split())


def test_certificates_with_the_authority_key_offline(tmp_path, capsys):
    def files():
        return {path.name: path.read_bytes() for path in keys.rglob("*") if path.is_file()}

    keys = tmp_path / "keys"
    assert main(["certificates", str(keys), "--node", "x"]) == 0
    assert files().keys() == {"x", "x.pub"}  # a device's key alone needs no authority
    assert main(["certificates", str(keys), "--host", "superlink.lan", "--node", "a", "c"]) == 0
    assert "to that device only" in capsys.readouterr().out
    (keys / "ca.key").rename(tmp_path / "offline.key")
    assert main(["certificates", str(keys), "--node", "b"]) == 0
    before = files()
    assert {path + end for path in "abcx" for end in ("", ".pub")} < before.keys()
    assert "ca.key" not in before
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 2
    assert "put ca.crt and ca.key there" in capsys.readouterr().err
    assert files() == before
    (tmp_path / "offline.key").rename(keys / "ca.key")
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 0
