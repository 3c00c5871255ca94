"""Write a stub for each function of a CUDA library that torch names and no object of the library defines.

A stub returns success if a caller can go on (kernels of cuBLAS and cuDNN, collectives, profiling). Otherwise
it returns an error, which torch raises as an exception: better than a result that was not computed.
"""

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

SUCCESS = {"libcublas", "libcublasLt", "libcudnn", "libnccl", "libcupti"}
"""Libraries whose stubs return success."""

FAILING = re.compile(
    r"cudnn(CTC|Convolution|Find|GetConv|GetCTC|Spatial)|ncclDev|ncclCommWindow|ncclMem"
)
"""Functions of these libraries whose stubs return an error."""

PREFIXES = {
    "libnccl": "nccl",
    "libcusparseLt": "cusparseLt",
    "libcufile": "cuFile",
    "libnvshmem_host": "nvshmem",
}
"""What the functions of libraries without symbol versions begin with."""

HEAD = """\
static int ok(void) { return 0; }
static int no(void) { return ERROR; }
/* Either may be unused. */
void *fake_stubs[] __attribute__((visibility("hidden"))) = {(void *)ok, (void *)no};"""


def symbols(path: Path, which: str) -> list[str]:
    """Return the names of a library's dynamic symbols, or of an object file's."""
    options = ["-D"] if path.suffix != ".o" else []
    command = ["nm", *options, which, str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in printed.splitlines() if line.strip()]


def wanted(torch_libraries: Path, soname: str) -> Iterator[tuple[str, str]]:
    """Yield what torch asks of a library: each function, and the version of its symbol (or "")."""
    prefix = PREFIXES.get(soname.partition(".")[0])
    for path in torch_libraries.glob("*.so"):
        for symbol in symbols(path, "--undefined-only"):
            function, _, version = symbol.partition("@")
            if version == soname or (prefix and function.startswith(prefix)):
                yield function, version


def stub(library: str, function: str) -> str:
    answer = "ok" if library in SUCCESS and not FAILING.match(function) else "no"
    return f'int {function}(void) __attribute__((alias("{answer}")));'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch_libraries", type=Path)
    parser.add_argument("soname")
    parser.add_argument("objects", type=Path, nargs="*")
    parser.add_argument("--script", type=Path, required=True, help="the linker's version script")
    given = parser.parse_args()

    found = dict(wanted(given.torch_libraries, given.soname))
    defined = {name for path in given.objects for name in symbols(path, "--defined-only")}
    library = given.soname.partition(".")[0]
    print(HEAD, *(stub(library, name) for name in sorted(found.keys() - defined)), sep="\n")
    version = next((one for one in found.values() if one), "")
    given.script.write_text(f"{version} {{ global: *; }};\n")


if __name__ == "__main__":
    main()
