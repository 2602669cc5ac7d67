"""What is masked, and what only sounds like a secret."""

from __future__ import annotations

import pytest

from trainer_kit.core.display import MASK, holds_secret, mask_secrets
from trainer_kit.core.errors import ConfigurationError


@pytest.mark.parametrize(
    "key",
    [
        *(
            "password",
            "db_password",
            "DB_PASSWORD",
            "store.password",
            "api_key",
            "apikey",
            "openai-api-key",
        ),
        *(
            "aws_secret_access_key",
            "token",
            "hf_token",
            "auth_token",
            "client_secret",
            "credentials",
        ),
    ],
)
def test_masked(key):
    assert mask_secrets({key: "value"}) == {key: MASK}


@pytest.mark.parametrize(
    "key",
    ["pad_token", "eos_token", "tokenizer", "key", "monitor", "secretary", "tokens"],
)
def test_not_a_secret(key):
    assert mask_secrets({key: "value"}) == {key: "value"}


def test_only_strings_are_masked_and_empty_ones_stay():
    assert mask_secrets({"token": 3, "password": None, "secret": ""}) == {
        "token": 3,
        "password": None,
        "secret": "",
    }


def test_nested_values_and_lists():
    given = {
        "a": [{"password": "x"}, "http://u:p@h/"],
        "api_key": ("k1", "k2"),
        3: {"token": "t"},
    }
    masked = {
        "a": [{"password": MASK}, f"http://u:{MASK}@h/"],
        "api_key": (MASK, MASK),
        3: {"token": MASK},
    }
    assert mask_secrets(given) == masked
    assert given["a"][0]["password"] == "x"


def test_a_url_without_a_password_stays():
    assert mask_secrets("https://host:8080/a@b:c") == "https://host:8080/a@b:c"


@pytest.mark.parametrize(
    "key",
    [
        *(
            "myApiKey",
            "openai_key",
            "pwd",
            "db_pass",
            "auth",
            "cookie",
            "passphrase",
            "webhook",
            "credential",
        ),
        *(
            "private_key",
            "model.hfToken",
            "API-KEY",
            "slackWebhookUrl",
            "OPENAI_API_KEY",
            "store.auth",
        ),
    ],
)
def test_names_in_any_spelling(key):
    assert mask_secrets({key: ["a", {"b": "c"}]}) == {key: [MASK, {"b": MASK}]}
    assert holds_secret({key: ["a"]})


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "sort_key", "forward_pass", "author", "token_dropout", "num_keys"],
)
def test_vocabulary_stays(key):
    assert mask_secrets({key: "value"}) == {key: "value"}
    assert not holds_secret({key: "value"})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("hf_" + "aB3" * 10, MASK),
        ("use sk-" + "a1" * 12 + " here", f"use {MASK} here"),
        ("ghp_" + "a1" * 18, MASK),
        ("gho_" + "a1" * 18, MASK),
        ("xoxb-1234567890-abc", MASK),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.abc", MASK),
        ("Authorization: Bearer abcdefgh12", f"Authorization: Bearer {MASK}"),
        ("Server=db;Password=hunter2;", f"Server=db;Password={MASK};"),
        ("https://tok3n@host/x", f"https://{MASK}@host/x"),
        ("https://host/x?a=1&token=abc&b=2", f"https://host/x?a=1&token={MASK}&b=2"),
        ("https://host/x?sig=abc%3D", f"https://host/x?sig={MASK}"),
    ],
)
def test_texts_that_hold_a_secret(text, masked):
    assert mask_secrets({"note": [text]}) == {"note": [masked]}
    assert (
        str(ConfigurationError("it failed", found=text))
        == f"it failed\n  found: {masked}"
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "hf_transformersmodelfile",
            "facebook/opt-125m",
            "sk-learn",
            "ssh://git@github.com/x",
            "s3://bucket/key=3/part",
        ),
        *("https://host/x?page=2", "me@host", "2026-01-01", "/data/token/x"),
    ],
)
def test_ordinary_texts_stay(text):
    assert mask_secrets(text) == text
