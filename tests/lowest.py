"""Sets up the lowest torch that pyproject.toml allows: `python -m tests.lowest` in a new `venv`.

Torch's build for the CPU comes from torch's own index. Where that cannot be reached, it is PyPI's
build for CUDA, without CUDA: empty libraries stand in for those of NVIDIA, and say that there is
no device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU = "https://download.pytorch.org/whl/cpu"
PACKAGES = [
    "beartype", "click", "filelock", "fsspec", "hypothesis", "jaxtyping", "Jinja2", "matplotlib",
    "networkx", "numpy", "packaging", "pandas", "psutil", "pytest", "pytest-xdist", "rich",
    "safetensors", "scikit-learn", "sympy", "typing_extensions", "xxhash", "zlib-ng",
]  # fmt: skip
"""What dualform, torch and the tests of recording and reading need."""
NO_DEVICE = 100
"""cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE."""


def main() -> None:
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found, "pyproject.toml has no lowest torch"
    release = sys.argv[1] if len(sys.argv) > 1 else found[1]
    wanted = f"torch=={release if release.count('.') > 1 else f'{release}.0'}"
    if pip("--no-deps", "--retries", "0", "--index-url", CPU, wanted):
        assert not pip("--no-deps", wanted), f"pip finds no {wanted}"
        stand_in(Path(sysconfig.get_path("platlib")) / "torch/lib")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{line}\n" for line in pinned if not line.startswith("torch=="))
        constraints.flush()
        assert not pip("--constraint", constraints.name, *PACKAGES)
    assert not pip("--no-deps", "--editable", str(ROOT))


def pip(*arguments: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    return subprocess.run(command, check=False).returncode


def stand_in(folder: Path) -> None:
    """Makes the libraries that torch's own need and nobody has, of functions that only fail."""
    libraries = sorted(folder.glob("*.so*"))
    read = "".join(map(symbols_needed, libraries))
    missing = set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nccl|nvrtc|nvToolsExt|nvshmem).*)\]", read))
    named = dict(re.findall(r"File: (\S+) .*\n.*Name: (\S+)", read))
    versions = {library: named.get(library, library) for library in missing}
    functions: dict[str, set[str]] = {version: set() for version in versions.values()}
    for symbol in re.findall(r" [Uw] (_*(?:cu|nccl|nvrtc|nvtx|nvshmem)\S*)", read):
        name, _, version = symbol.partition("@")
        functions.get(version, functions[versions[min(versions)]]).add(name)
    for library, version in versions.items():
        if not (folder / library).exists():
            compile_empty(folder / library, version, functions[version])


def symbols_needed(library: Path) -> str:
    """What two tools print of the other libraries that one needs, and of the functions in them."""
    tools = (
        ["readelf", "--dynamic", "--version-info", "--wide"],
        ["nm", "--dynamic", "--undefined-only"],
    )
    return "".join(subprocess.check_output([*tool, library], text=True) for tool in tools)


def compile_empty(library: Path, version: str, functions: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "empty.c"), Path(folder, "versions")
        lines = [f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in sorted(functions)]
        source.write_text("\n".join([*lines, "int stands_in = 1;"]), encoding="utf-8")
        versions.write_text(f"{version} {{ *; }};", encoding="utf-8")
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library.name}"]
        options += [f"-Wl,--version-script={versions}", "-o", str(library)]
        subprocess.run(["gcc", *options, str(source)], check=True)


if __name__ == "__main__":
    main()
