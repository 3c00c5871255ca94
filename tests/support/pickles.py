"""Pickles as nobody honest writes them, from a seed; and what is imported meanwhile."""

import pickletools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WATCHED: list[list[str]] = []
_TARGETS = (
    *(
        ("antigravity", "fly"),
        ("this", "s"),
        ("os", "system"),
        ("posix", "system"),
        ("nt", "system"),
    ),
    *(("builtins", "eval"), ("builtins", "getattr"), ("__builtin__", "eval"), ("sys", "exit")),
    *(
        ("torch", "load"),
        ("functools", "partial"),
        ("operator", "attrgetter"),
        ("", ""),
        ("a.b", "c.d"),
    ),
    *(("copyreg", "_reconstructor"), ("collections", "OrderedDict"), ("subprocess", "Popen")),
)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _WATCHED and event in (
        "import",
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "exec",
    ):
        _WATCHED[-1].append(f"{event} {arguments[:2]}")


@contextmanager
def imported() -> Iterator[list[str]]:
    """What the interpreter imports, finds for a pickle, or runs, meanwhile."""
    if not hasattr(sys, "_memlog_tests_audit"):
        sys._memlog_tests_audit = True  # type: ignore[attr-defined]  # a hook stays for good: add one
        sys.addaudithook(_audit)
    names: list[str] = []
    _WATCHED.append(names)
    try:
        yield names
    finally:
        _WATCHED.remove(names)


def malicious(content: bytes, seed: int) -> bytes:
    """A pickle into which, between two of its opcodes, a call of something imported was put."""
    chance = random.Random(seed)  # noqa: S311 - attacks to try, not secrets
    places = [at for _, _, at in pickletools.genops(content) if at]
    at = chance.choice(places)
    module, name = chance.choice(_TARGETS)
    return content[:at] + _call(module, name, chance) + content[at:]


def damaged(content: bytes, seed: int) -> bytes:
    """A pickle of which some bytes are others, gone, or new."""
    chance = random.Random(seed)  # noqa: S311 - damage, not secrets
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(made))
        made[at : at + chance.choice((0, 1, 1, 8))] = chance.randbytes(chance.choice((0, 1, 1, 6)))
    return bytes(made)


def _call(module: str, name: str, chance: random.Random) -> bytes:
    text = b"\x8c\x04true"
    by_name = f"{module}\n{name}\n".encode()
    as_text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    return chance.choice(
        (
            b"c" + by_name + b"(" + text + b"tR",  # GLOBAL, REDUCE
            b"(" + text + b"i" + by_name,  # INST
            b"(c" + by_name + text + b"o",  # OBJ
            b"c" + by_name + b")\x81",  # NEWOBJ
            b"c" + by_name + b")}\x92",  # NEWOBJ_EX
            as_text + b"\x93" + text + b"\x85R",  # STACK_GLOBAL
            as_text + b"\x93" + b"}b",  # BUILD
            b"c" + by_name + b"0",  # and thrown away again
            b"P" + name.encode() + b"\n",  # a persistent id
            text + b"Q",
            b"\x82\x01",  # an extension's code
        )
    )
