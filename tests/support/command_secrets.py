"""Command lines with secrets, and such with ordinary options, made in the same way each time."""

import random
import string
from collections.abc import Iterator

SERVICES = ["", "hf", "wandb", "openai", "comet", "my", "s3", "db", "aws", "azure-prod"]
SECRETS = [
    *("token", "tokens", "api-key", "api-keys", "apikey", "access-key", "secret", "secrets"),
    *("password", "passwd", "passphrase", "passcode", "keypass", "pat", "jwt", "bearer"),
    *("auth-token", "credentials"),
    *("ghpat", "hubtoken", "mykey", "oauth", "oauth2", "pass-phrase", "sessionid"),
    *("secret-key", "private-key", "auth", "key", "webhook", "token-value", "access-key-id", "pw"),
    *("token-list", "api-key-list", "tokenlist", "dockerpw", "huggingfacetoken", "companytoken"),
    *("neptunekey", "adminpw", "pword", "passwrd", "passwort", "psk"),
]
ORDINARY = [
    *("--key loss", "data.key=text", "--keys image label", "--signature default", "--pat 5"),
    *("--max-tokens 512", "--tokenizer gpt2", "--token-dropout 0.1", "pad_token=<pad>"),
    *("--num_secrets 3", "num_secrets=3", "--tokens 512", "--tokens=1e9", "--key-file keys.txt"),
    *("--image-key jpg", "--sort-key=loss", "--passes 3", "--train-tokens 10B", "--auth true"),
    *("model.pad_token_id=0", "--bos-token=[BOS]", "data.text_key=content", "--n_keys 8"),
    *("--tokens-per-batch 4k", "--pattern *.pt", "-u train.py", "--author me", "--device cuda:0"),
    *("--password-file run/p", "--secret-name projects/a", "--master localhost:29500"),
    *("data.keys=[image,label]", '{"tokens": [512, 1024]}', "-utrain.py:main", "--no-webhook"),
    *("--keys loss,acc", "--key-list loss,acc", "--token-list 1,2,3", "--tokenlist 5", "--hpw 40"),
    *("--maxtokens 512", "--padtoken <pad>", "--monkey banana7X9", "--softtoken mean7Xq9ab"),
    *("--openai-api responses", "--wandb-api https://api.wandb.ai/v2Beta1", "--api chatV2beta"),
    *("--doc https://git.example.com/hooks/preCommit", "--tok gpt2Medium", "--gh-api v3"),
    *("image:tag@sha256:abcd12", "http://localhost:5000", "--token-type-ids yes", "--kv_keys 3"),
    *("--energy_key REF_energy", "--forces_key=REF_forces", "--token-id 50256", "--pw 0.5"),
    *("--stopword the", "--hook forward", "--doc https://github.com/o/webhooks/blob/a1B2c3/x.py"),
    "--doc https://huggingface.co/me/hooks/resolve/a1B2c3/x.bin",
]
"""Options that an ordinary training has."""


def secret(chance: random.Random, mark: str = "") -> str:
    """Return a text such as a person copies from a service, which contains ``mark``."""
    letters = "".join(chance.choices(string.ascii_letters + string.digits, k=16))
    return f"{letters[:8]}7{mark}Xq{letters[8:]}"


def spelt(name: str, chance: random.Random) -> str:
    """Return an option's name in one of its usual spellings."""
    spellings = [str, str.upper, lambda text: text.replace("-", "_")]
    spellings.append(lambda text: "".join(map(str.title, text.split("-"))))
    return chance.choice(spellings)(name)


def forms(name: str, value: str) -> list[list[str]]:
    """Return the ways in which programs take a secret."""
    return [
        *([f"--{name}", value], [f"--{name}={value}"], [f"-{name}", value], [f"{name}={value}"]),
        *([f"trainer.{name}={value}"], [f"+logger.{name}={value}"], [name, value]),
        *([f"logger={{{name}:{value},x:1}}"], [f"logger={{x:1,{name}: {value}}}"]),
        *(
            [f'{{"{name}": ["x", "{value}"]}}'],
            [f'{{"{name}": "{value}"}}'],
            ["--cfg", f"{name}: {value}"],
            [f"--set=a.{name}={value}"],
        ),
        *(["--env", f"{name}={value}"], ["-c", f"import w; w.login({name}='{value}')"]),
    ]


def of_services(value: str) -> list[list[str]]:
    """Return arguments in which the form of the value or of an address shows that it is a secret."""
    return [
        *(["-u", f"user:{value}"], [f"--user=me:{value}"]),
        *([f"-umy-user:{value}"], ["--webhook-url", f"https://bots.example.com/post/{value}"]),
        *([f"https://outlook.office.com/webhook/{value}/IncomingWebhook/x"],),
        *(["--hook-url", f"https://bots.example.com/{value}"],),
        *(["--slack_hook", f"https://x.example.com/{value}"],),
        *([f"https://n8n.example.com/webhook-test/{value}"],),
        *(["-c", f"os.environ['HF_TOKEN'] = '{value}'"], ["-c", f'c["api_key"]="{value}"']),
        *(["--wandb-api", value], [f"--hf_tok={value}"], ["--token-list", f"x,{value}", value]),
        *([f"https://mattermost.example.com/hooks/{value}"],),
        *(["--notify", f"https://chat.example.com:3000/base/hooks/T1/{value}"],),
        *([f"url=https://n8n.example.com/webhook/{value}"], [f"https://webhook.site/{value}"]),
        *([f"https://open.feishu.cn/open-apis/bot/v2/hook/{value}"],),
        *([f"https://maker.ifttt.com/trigger/trained/with/key/{value}"],),
        *(["--login", f"me:{value}"], ["--store", f"postgresql://me:{value}@host/db"]),
        *([f"me:{value}@host/db"], ["--notify", f"https://hooks.slack.com/services/T0/B0/{value}"]),
        *([f"https://discord.com/api/webhooks/1/{value}"], ["--header", f"X-Api-Key: {value}"]),
        *(["--header", f"Authorization: Bearer {value}"], [f"hf_{value}"], [f"ghp_{value}"]),
        *([f"sk-ant-{value}"], [f"glpat-{value}"], [f"xoxb-{value}"], ["--x", f"wandb_v1_{value}"]),
        *(["--dsn", f"host=h password = '{value} x'"], [f"https://host/?sig={value}"]),
        ["--pem", f"-----BEGIN PRIVATE KEY-----\n{value}\n-----END PRIVATE KEY-----"],
    ]


LOWER, HEX = string.ascii_lowercase + string.digits, "0123456789abcdef"
TOKENS = {
    "hf_": (string.ascii_letters, 34),
    "api_org_": (string.ascii_letters, 34),
    "dckr_pat_": (string.ascii_letters, 27),
    "lsv2_pt_": (HEX, 32),
    "key-": (HEX, 32),
    "KGAT_": (HEX, 32),
    "GOCSPX-": (string.ascii_letters, 28),
    "glsa_": (string.ascii_letters, 32),
    "ntn_": (LOWER, 46),
    "eyJ": (string.ascii_letters, 90),
    "e2b_": (HEX, 40),
    "wandb.login('": ("0" + HEX, 40),
    "glpat-": (LOWER + "-_", 20),
    "xai-": (LOWER, 80),
    "hvs.": (LOWER, 24),
    "jina_": (LOWER, 60),
    "fw_": (LOWER, 24),
    "csk-": (LOWER, 48),
    "tskey-auth-": (LOWER, 32),
    "lin_api_": (LOWER, 40),
    "pa-": (LOWER, 43),
}
"""What tokens of services begin with, their characters, and how many follow."""


def tokens() -> Iterator[tuple[str, str]]:
    """Yield tokens, each with its secret part."""
    chance = random.Random(29)  # noqa: S311 - made up
    for begin, (characters, length) in TOKENS.items():
        for _ in range(20):
            part = "".join(chance.choices(characters, k=length))
            yield f"{begin}{part}", part


def commands(mark: str = "") -> Iterator[tuple[list[str], str]]:
    """Yield arguments and the secret in them."""
    chance = random.Random(28)  # noqa: S311 - names, not secrets
    for kind in SECRETS:
        for service in SERVICES:
            name = spelt("-".join(filter(None, (service, kind))), chance)
            value = secret(chance, mark)
            for arguments in forms(name, value):
                yield arguments, value
    value = secret(chance, mark)
    for arguments in of_services(value):
        yield arguments, value
