"""What must be equal on all machines of a replica: versions, the engine's code, and the model's files."""

from __future__ import annotations

import platform
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from toka_async import __version__

PACKAGES = ("torch", "triton", "msgspec")
NCCL = "nvidia-nccl-"  # its package is named after CUDA's version
SMALL_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
MOST_HEADER = 1 << 27  # bytes


def collect_versions() -> dict[str, str]:
    """Collect the versions by name, without loading what they are of."""
    installed: dict[str, str] = {}
    for each in metadata.distributions():
        if each.name:  # what an installation that broke off left has none
            installed.setdefault(each.name.lower(), each.version)  # the first is imported
    facts = {name: installed.get(name, "none") for name in PACKAGES}
    facts["nccl"] = next((each for name, each in sorted(installed.items()) if name.startswith(NCCL)), "none")
    python = platform.python_version_tuple()
    return {"toka-async": f"{__version__}, code {hash_code()}", **facts, "python": ".".join(python[:2])}


def hash_code() -> str:
    """Hash the package's modules: copies of one version may differ."""
    package, content = Path(__file__).parent.parent, blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        content.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()


def collect_model_facts(folder: Path, *, with_weights: bool) -> dict[str, str]:
    """Hash the model's small files, and the names and headers of those with weights, which describe each tensor."""
    facts = {name: _hash((folder / name).read_bytes()) for name in SMALL_FILES if (folder / name).is_file()}
    if with_weights:
        for path in sorted(folder.glob("*.safetensors")):
            facts[path.name] = f"{path.stat().st_size} bytes, {_hash(_read_header(path))}"
    return facts


def find_difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Describe the first difference, theirs first; empty: there is none."""
    for name in [*ours, *theirs]:
        here, there = ours.get(name, "none"), theirs.get(name, "none")
        if here != there:
            return f"{name} is {there}, and the leader's is {here}"
    return ""


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, MOST_HEADER))


def _hash(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
