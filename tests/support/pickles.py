"""Malicious and damaged pickles, made by hand or from a seed, and a recorder of imports."""

import pickletools
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_WATCHED: list[list[str]] = []
_thread = threading.main_thread().ident
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
    here = (
        threading.get_ident() == _thread
    )  # imports by other threads, such as a tracker's client's, don't count
    if (
        _WATCHED
        and here
        and event in ("import", "pickle.find_class", "os.system", "subprocess.Popen", "exec")
    ):
        _WATCHED[-1].append(f"{event} {arguments[:2]}")


@contextmanager
def imported() -> Iterator[list[str]]:
    """Collect the names that the interpreter imports, looks up for a pickle, or runs in the block."""
    if not hasattr(sys, "_memlog_tests_audit"):
        sys._memlog_tests_audit = True  # type: ignore[attr-defined]  # a hook stays for good: add one
        sys.addaudithook(_audit)
    names: list[str] = []
    _WATCHED.append(names)
    try:
        yield names
    finally:
        _WATCHED.remove(names)


def endless() -> Iterator[tuple[str, bytes]]:
    """Small snapshots that keep Python's own unpickler busy without end, or crash it: name and content."""
    yield "shared tuples as a key", _document(b"\x8c\x01l](" + _sharing(b"\x86") + b"eh\x2dN")
    yield "shared tuples as a value", _document(b"\x8c\x01l](" + _sharing(b"\x86") + b"e")
    yield "a deep key", _document(b")" + b"\x85" * 300_000 + b"N")
    yield "colliding keys", _document(b"\x8c\x01y}(" + _colliding() + b"u")
    yield "a deep list", _document(b"\x8c\x01y" + b"]" * 2_000_000 + b"a" * 1_999_999)
    yield "a long tuple", _document(b"\x8c\x01y(" + b"K\x01" * 1_000_000 + b"t")
    yield "a number of a million digits", _document(b"\x8c\x01yI" + b"7" * 1_000_000 + b"\n")
    yield (
        "a number of a million bytes",
        _document(b"\x8c\x01y\x8b" + (10**6).to_bytes(4, "little") + b"\x01" * 10**6),
    )


def _document(values: bytes) -> bytes:
    """A snapshot with further keys and values, which the opcodes ``values`` put on the stack."""
    return b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]" + values + b"u."


def _sharing(pair: bytes) -> bytes:
    """Opcodes of 45 values, each of which holds the one before it twice."""
    return b")\x94" + b"".join(b"h%ch%c" % (at, at) + pair + b"\x94" for at in range(45))


def _colliding() -> bytes:
    """Opcodes of 100,000 keys of one hash, each with a value: multiples of Python's modulus."""
    modulus = 2**61 - 1
    return b"".join(
        b"\x8a\x0b" + (at * modulus).to_bytes(11, "little") + b"N" for at in range(100_000)
    )


def malicious(content: bytes, seed: int) -> bytes:
    """Return a pickle with a call of an imported function between two of its opcodes."""
    chance = random.Random(seed)  # noqa: S311 - attacks to try, not secrets
    places = [at for _, _, at in pickletools.genops(content) if at]
    at = chance.choice(places)
    module, name = chance.choice(_TARGETS)
    return content[:at] + _call(module, name, chance) + content[at:]


def damaged(content: bytes, seed: int) -> bytes:
    """Return a pickle in which some bytes were changed, removed or added."""
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
            b"c" + by_name + b"0",  # import, and drop the object
            b"P" + name.encode() + b"\n",  # a persistent id
            text + b"Q",
            b"\x82\x01",  # an extension's code
        )
    )
