"""Let a CUDA build of torch be imported without its CUDA libraries: ``stub_libraries.py path/to/site-packages``.

torch_xla goes with one build of torch, whose shared objects name NVIDIA's libraries, 3 GB that a test on a CPU never
calls. Each of them becomes an empty library here that exports the symbols torch asks for. Only for tests: who calls
one of these functions gets a number that means failure, and its text. Needs gcc, readelf and nm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

VENDOR = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit|nvTools)")
# What returns the text of a failure, from which torch makes the message of its exception.
TEXTS = re.compile(r"(Error|Status)(String|Name)$")
# Whose symbols carry no version: by how their names begin, longest first.
PREFIXES = {
    "libcusparseLt": "cusparseLt",
    "libcusolver": "cusolver",
    "libcusparse": "cusparse",
    "libcublasLt": "cublasLt",
    "libnvJitLink": "nvJitLink",
    "libnvshmem_host": "nvshmem",
    "libcublas": "cublas",
    "libcurand": "curand",
    "libcufile": "cuFile",
    "libcudnn": "cudnn",
    "libnvrtc": "nvrtc",
    "libcufft": "cufft",
    "libcupti": "cupti",
    "libnccl": "nccl",
    "libnvToolsExt": "nvtx",
    "libcudart": "cuda|__cuda",
    "libcuda": "cu",
}


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(objects: Iterable[Path]) -> list[str]:
    """Vendor libraries that these objects are linked against."""
    found = {
        name
        for path in objects
        for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", path))
    }
    return sorted(name for name in found if VENDOR.match(name))


def undefined(objects: Iterable[Path]) -> dict[str, set[str]]:
    """Symbols that these objects leave to others, by version; "" for those without one."""
    symbols: dict[str, set[str]] = defaultdict(set)
    for path in objects:
        for name in re.findall(
            r" U (\S+)", output("nm", "-D", "--undefined-only", path)
        ):
            symbol, _, version = name.partition("@")
            symbols[version.lstrip("@")].add(symbol)
    return symbols


def divide(
    libraries: list[str], symbols: dict[str, set[str]]
) -> dict[str, dict[str, set[str]]]:
    """Which library exports what, by version."""
    parts: dict[str, dict[str, set[str]]] = {
        library: defaultdict(set) for library in libraries
    }
    left = set(symbols.get("", ()))
    for library in sorted(libraries, key=lambda name: -len(name.partition(".")[0])):
        base = library.partition(".")[0]
        for version, names in symbols.items():
            own = version.lower().startswith(f"{base.lower()}.so")
            if version and (own or (version, base) == ("NVSHMEM", "libnvshmem_host")):
                parts[library][version] |= names
        begins = PREFIXES.get(base)
        if begins:
            mine = {
                name
                for name in left
                if re.match(begins, name) and re.fullmatch(r"[A-Za-z_]\w*", name)
            }
            parts[library][""] |= mine
            left -= mine
    return parts


def stub(name: str) -> str:
    """The source of a function that fails: 100 is CUDA's number for a machine without a device."""
    if TEXTS.search(name):
        return f'const char *{name}(void) {{ return "a stub of CUDA"; }}'
    return f"int {name}(void) {{ return 100; }}"


def build(library: str, versions: dict[str, set[str]], directory: Path) -> Path:
    source, script, target = (
        directory / "stub.c",
        directory / "versions.map",
        directory / library,
    )
    names = sorted(set().union(*versions.values())) if versions else []
    source.write_text("\n".join([*map(stub, names), "int stub_only = 0;"]))
    script.write_text(
        "".join(
            f"{v} {{ global: {'; '.join(sorted(of))}; }};\n"
            for v, of in versions.items()
            if v and of
        )
    )
    flags = [f"-Wl,--version-script={script}"] if script.read_text() else []
    subprocess.run(
        [
            "gcc",
            "-w",
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-o",
            target,
            source,
            f"-Wl,-soname,{library}",
            *flags,
        ],
        check=True,
    )
    return target


def main() -> None:
    root = Path(sys.argv[1]) / "torch"
    here = [*(root / "lib").glob("*.so*"), *root.glob("_C*.so")]
    libraries = [name for name in needed(here) if not (root / "lib" / name).exists()]
    parts = divide(libraries, undefined(here))
    with tempfile.TemporaryDirectory() as directory:
        for library in libraries:
            shutil.copy(build(library, parts[library], Path(directory)), root / "lib")
    print(
        f"{len(libraries)} libraries stand in for CUDA's: {', '.join(libraries) or 'all are there'}"
    )


if __name__ == "__main__":
    main()
