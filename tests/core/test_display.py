"""What is masked, and what only sounds like a secret."""

from __future__ import annotations

import pytest

from trainer_kit.core.display import MASK, mask_secrets


@pytest.mark.parametrize(
    "key",
    [
        *("password", "db_password", "DB_PASSWORD", "store.password", "api_key", "apikey", "openai-api-key"),
        *("aws_secret_access_key", "token", "hf_token", "auth_token", "client_secret", "credentials"),
    ],
)
def test_masked(key):
    assert mask_secrets({key: "value"}) == {key: MASK}


@pytest.mark.parametrize("key", ["pad_token", "eos_token", "tokenizer", "key", "monitor", "secretary", "tokens"])
def test_not_a_secret(key):
    assert mask_secrets({key: "value"}) == {key: "value"}


def test_only_strings_are_masked_and_empty_ones_stay():
    assert mask_secrets({"token": 3, "password": None, "secret": ""}) == {"token": 3, "password": None, "secret": ""}


def test_nested_values_and_lists():
    given = {"a": [{"password": "x"}, "http://u:p@h/"], "api_key": ("k1", "k2"), 3: {"token": "t"}}
    masked = {"a": [{"password": MASK}, f"http://u:{MASK}@h/"], "api_key": (MASK, MASK), 3: {"token": MASK}}
    assert mask_secrets(given) == masked
    assert given["a"][0]["password"] == "x"


def test_a_url_without_a_password_stays():
    assert mask_secrets("https://host:8080/a@b:c") == "https://host:8080/a@b:c"
