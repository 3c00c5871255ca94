"""Secrets in command lines and in the environment are removed, and ordinary options stay readable."""

import pytest
from support.command_secrets import ORDINARY, commands, tokens

from memlog._internal.redact import bare_address, shell_line, without_credentials
from memlog._internal.secret_names import is_secret_variable


def test_no_secret_of_a_generated_command_line_is_shown() -> None:
    shown = [
        (arguments, line)
        for arguments, secret in commands()
        if secret in (line := shell_line(["python", "train.py", *arguments, "--lr", "0.1"]))
    ]
    assert shown == []


def test_the_rest_of_a_generated_command_line_stays() -> None:
    for arguments, _ in commands():
        line = shell_line(["python", "train.py", *arguments, "--lr", "0.1"])
        assert line.startswith("python train.py "), line
        assert line.endswith(" --lr 0.1"), line


def test_tokens_of_services_are_known_by_their_beginning_and_length() -> None:
    for token, secret in tokens():
        assert secret not in shell_line(["python", "train.py", token]), token
        assert secret not in without_credentials(f"the token {token} is expired"), token


@pytest.mark.parametrize(
    "name",
    [
        "hf_transformers_model",
        "key-value-store-things",
        "pa-attention-block",
        "fw_graph_module",
        "hf_Llama3_8B_lora_r16",
        "sk-GPT2_small_v3",
        "key-value-Store-V2",
    ],
)
def test_names_that_begin_like_a_token_stay(name: str) -> None:
    assert without_credentials(f"loading {name} now") == f"loading {name} now"


@pytest.mark.parametrize("option", ORDINARY)
def test_ordinary_options_stay(option: str) -> None:
    assert "***" not in shell_line([*option.split(), "--lr", "0.1"])


@pytest.mark.parametrize("option", ["--creds", "--hftoken", "--wandbkey", "--dbpass"])
def test_compounds_without_a_separator_are_secrets(option: str) -> None:
    assert shell_line([option, "blue", "--sacred", "cow"]) == f"{option} *** --sacred cow"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("TOKEN", "sesame"), "TOKEN ***"),
        (("DB_PASSWORD", "sesame"), "DB_PASSWORD ***"),
        (("-u", "user:sesame"), "-u user:***"),
        (("token", "count"), "token count"),
        (("MODEL.TOKEN", "first"), "MODEL.TOKEN first"),
        (("MAX_TOKENS", "512"), "MAX_TOKENS 512"),
        (("PAD_TOKEN", "<pad>"), "PAD_TOKEN '<pad>'"),
    ],
)
def test_a_word_is_a_secret_behind_a_name_of_one(arguments: tuple[str, ...], shown: str) -> None:
    assert shell_line(arguments) == shown


def test_each_value_of_an_option_in_the_plural_is_removed() -> None:
    line = shell_line(["--keys", "S3cr3tValue", "S3cr3tValue2", "--lr", "1"])
    assert line == "--keys *** *** --lr 1"


@pytest.mark.parametrize(
    "text",
    [
        "Invalid password: S3cr3tValue",
        "the api key S3cr3tValue is unknown",
        "WANDB_API_KEY is S3cr3tValue",
        "X-Api-Key: S3cr3tValue",
        "Cookie: session=S3cr3tValue",
        "AccountKey=S3cr3tValue;x",
        "auth=('u', 'S3cr3tValue')",
        "login(key=S3cr3tValue)",
        "me:S3cr3tValue@host/db",
        "token hf_S3cr3tValue is expired",
        r"{\"token\": \"S3cr3tValue\", \"lr\": 1}",
    ],
)
def test_no_secret_in_a_message_is_shown(text: str) -> None:
    assert "S3cr3t" not in without_credentials(text)


@pytest.mark.parametrize(
    "text",
    [
        "Unexpected token: }",
        "missing key: model.layers.0.conv1d.weight",
        'Missing key(s) in state_dict: "layer.weight"',
        "sorted(x, key=len)",
        "tokens: 512",
        "token: 5",
        "pad_token='<pad>'",
        "special_tokens={'pad_token': '<pad>'}",
        "past_key_values=None",
        "password required",
        "expected key shape: (3,4)",
    ],
)
def test_a_message_without_a_secret_stays(text: str) -> None:
    assert without_credentials(text) == text


SECRET_VARIABLES = {
    "HF_TOKEN": "plain-looking-value",
    "MY_SERVICE_PASSWORD": "two words 8",
    "OPENAI_API_KEYS": "abc/def+12=",
    "GITHUB_PAT": "0a1b2c3d4e",
    "PGPASSWORD": "o'neill-12",
}
SEVERAL_KEYS = ("k1Aaaaaaa9", "k2Bbbbbbb8")


def test_values_of_secret_variables_are_removed_from_every_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SECRET_VARIABLES.items():
        monkeypatch.setenv(name, value)
    for value in SECRET_VARIABLES.values():
        assert value not in without_credentials(f"refused {value}, sorry")
        assert shell_line(["train.py", value, "--x", f"a{value}b"]).count("***") == 2
        assert value not in without_credentials(repr(f'"{value}'))
    monkeypatch.setenv("MY_KEYS", ",".join(SEVERAL_KEYS))
    for key in SEVERAL_KEYS:
        assert key not in shell_line(["train.py", key])
    assert "plain" not in bare_address("http://host/plain-looking-value/x")
    assert "abc" not in without_credentials("?x=abc%2Fdef%2B12%3D")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("PASSWORD_REQUIRED", "1"),
        ("DB_PASSWORD", "postgres"),
        ("DB_PASSWORD", "abc12"),
        ("MAX_TOKENS", "1000000000000000000"),
        ("TOKENS", "1000000000"),
        ("AUTH", "managed-identity"),
        ("AUTH_URL", "https://login.example.com/v2"),
        ("PWD", "/home/me/project9"),
        ("SSH_AUTH_SOCK", "/run/ssh-12Abc/agent.1"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/key1.json"),
        ("TOKENIZER_NAME", "bert-base-uncased2"),
        ("PAD_TOKEN", "<|endoftext|>"),
        ("PATH", "/usr/bin2:/bin"),
    ],
)
def test_ordinary_values_of_variables_stay(name: str, value: str) -> None:
    assert not is_secret_variable(name, value)


@pytest.mark.parametrize("part", ["{key:", "key=", "token=' ", "x=(", "gho_", "sk-", "eyJ", "a:"])
def test_the_longest_text_is_searched_to_its_end(part: str) -> None:
    """Patterns that tried all beginnings with all ends would need an hour, and recursion its stack."""
    text = part * 20_000
    assert without_credentials(f"{text} word password=s3cret").endswith(" password=***")
