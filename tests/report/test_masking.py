"""What is hidden of settings, and what is not."""

import pytest

from flwr_hetero.report.history import read_config
from flwr_hetero.report.masking import HIDDEN, masked

SECRET = [
    *("access-key", "private-key", "passphrase", "wandb-key", "hf-auth", "HF_TOKEN", "apiKey"),
    *("db.password", "api-tokens", "AWS_SECRET_ACCESS_KEY", "aws-access-key-id", "dbpasswd"),
    *("key", "auth", "mlflow-pwd", "user_pass", "hubtoken", "license-key"),
]
INNOCENT = [
    *("num-tokens", "max_tokens", "key-frame", "loss-key", "weighted_by_key", "arrayrecord-key"),
    *("author", "passes", "compass", "tokenizer", "monkey", "keyboard", "pad-token", "public-key"),
    *("bypass", "pass-through", "turkey", "authors", "token-length", "secretary"),
]


@pytest.mark.parametrize("name", SECRET)
def test_text_of_such_a_name_is_hidden_wherever_it_is(name):
    for value in ("s3cret value", ["s3cret"], {"of": "s3cret"}):
        kept = masked({"a": [{name: value}], name: value})
        assert kept == {"a": [{name: HIDDEN}], name: HIDDEN}
    assert masked(f"app --run-config '{name}=\"s3cret\" seed=3'") == (
        f"app --run-config '{name}={HIDDEN} seed=3'"
    )
    assert "s3cret" not in masked(f"app --{name} s3cret --nodes 5")


@pytest.mark.parametrize("name", INNOCENT)
def test_others_are_as_they_were(name):
    for value in ("train-loss", ["a", 3], {"of": "it"}, 3, True, None):
        assert masked({name: value}) == {name: value}
    text = f"app --run-config '{name}=\"x\" seed=3' --{name} y"
    assert masked(text) == text


@pytest.mark.parametrize("name", ["key", "auth", "hub-token", "tokens"])
@pytest.mark.parametrize("value", [True, 512, 0.5, "", None, "512", "false"])
def test_a_switch_or_a_number_is_no_secret(name, value):
    assert masked({name: value}) == {name: value}


@pytest.mark.parametrize("value", [1234, "1234"])
def test_a_password_is_one_even_if_it_is_a_number(value):
    assert masked({"password": value}) == {"password": HIDDEN}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("postgres://me:s3cret@host/db", f"postgres://{HIDDEN}@host/db"),
        ("https://s3c@ret@host:80/a?n=3", f"https://{HIDDEN}@host:80/a?n=3"),
        ("https://host/a?token=s3cret&n=3", f"https://host/a?token={HIDDEN}&n=3"),
        ("Authorization: Bearer s3cret", f"Authorization: {HIDDEN}"),
        ("https://host/a@b", "https://host/a@b"),
        ("me@host.org", "me@host.org"),
        ("/data/run=3/a:b", "/data/run=3/a:b"),
    ],
)
def test_addresses_and_headers(text, kept):
    assert masked({"a": text}) == {"a": kept}


def test_settings_of_older_versions_are_hidden_on_pages(tmp_path):
    (tmp_path / "config.json").write_text('{"settings": {"wandb-key": "s3cret", "seed": 3}}')
    assert read_config(tmp_path)["settings"] == {"wandb-key": HIDDEN, "seed": 3}
