"""Whether a pickle asks for more memory than it can need: looked at without loading it.

CPython's unpickler keeps what a pickle numbers in an array as long as the largest number, which the pickle
chooses: six bytes can ask for 32 GiB, and so can a file that has a byte too few. What is as long as it says,
and numbers no more than it has bytes, takes a bounded multiple of its size.
"""

from __future__ import annotations

import pickletools

_LINE, _PAIR = -1, -6
"""Arguments that end with a line, or two; `pickletools` tells lengths, and has other negative ones for text
whose length stands before it."""
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_STOP, _PUT, _LONG_BINPUT = b".pr"


def _arguments() -> list[int | None]:
    """For each byte that is an opcode, how long its argument is."""
    told: list[int | None] = [None] * 256
    for opcode in pickletools.opcodes:
        told[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    for pair in b"ci":  # GLOBAL and INST: a module's line and a name's
        told[pair] = _PAIR
    return told


_ARGUMENTS = _arguments()


def require_bounded(content: bytes) -> None:
    """Goes through a pickle, which takes about as long as loading it.

    Raises:
        ValueError: it asks for more than it has, or is torn, or is no pickle.
    """
    at, end = 0, len(content)
    while at < end:
        opcode = content[at]
        at += 1
        length = _ARGUMENTS[opcode]
        if length is None:
            raise ValueError(f"byte {at - 1:,} is no opcode")
        if opcode == _STOP:
            return
        if length < 0:
            begin, at = at, _after(content, at, length)
            if opcode == _PUT:
                _require_index(int(content[begin:at]), end)
        else:
            if opcode == _LONG_BINPUT:
                _require_index(int.from_bytes(content[at : at + 4], "little"), end)
            at += length
    raise ValueError("it ends too early")


def _after(content: bytes, at: int, length: int) -> int:
    """Where an argument ends that says itself how long it is."""
    if length == _LINE:
        return content.index(b"\n", at) + 1
    if length == _PAIR:
        return content.index(b"\n", content.index(b"\n", at) + 1) + 1
    size = _LENGTHS[length]
    after = at + size + int.from_bytes(content[at : at + size], "little")
    if after > len(content):
        raise ValueError("it ends too early")
    return after


def _require_index(index: int, end: int) -> None:
    if not 0 <= index <= end:
        raise ValueError(f"it numbers {index:,} things in {end:,} bytes")
