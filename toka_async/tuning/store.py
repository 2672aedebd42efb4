"""Keeps what a start measured on this chip for later starts: a folder of small JSON files.

A file holds one answer and its question: what was measured of which shapes, on which chip, with which versions of
libraries and of our own code. The same question finds it. Knows neither what is measured nor how.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
import torch

logger = logging.getLogger(__name__)

Facts = Mapping[str, object]  # that JSON can hold
T = TypeVar("T")
# Packages whose kernels are timed; the names of NVIDIA's may have a CUDA version.
_PACKAGES = (
    *("triton", "flashinfer-python"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
_MOST_BYTES = 1 << 20  # of a file; an answer is far smaller


class TuningCache:
    """Answers of earlier starts. Without a folder, none are found or kept.

    platform: what every answer depends on. Processes may share a folder: a file is written whole or not at all.
    """

    def __init__(self, folder: Path | None, platform: Facts) -> None:
        self.folder = folder
        self.num_found = 0
        self.num_asked = 0
        self._platform = platform
        self._writes = folder is not None

    def find(self, what: str, of: Facts, kind: type[T]) -> T | None:
        """Finds the answer to what was measured of these facts; None if none can be read as this kind."""
        self.num_asked += 1
        if self.folder is None:
            return None
        asked = self._encode_question(what, of)
        try:
            question, answer = msgspec.json.decode(_read(self._find_file(what, asked)), type=tuple[msgspec.Raw, kind])  # type: ignore[valid-type]
        except (OSError, ValueError, RecursionError, msgspec.DecodeError):  # it is measured and written again
            return None
        if bytes(question) != asked:
            return None
        self.num_found += 1
        return answer

    def keep(self, what: str, of: Facts, answer: object) -> None:
        """Writes an answer for later starts. If it cannot, logs that once and does not try again."""
        if not self._writes:
            return
        asked = self._encode_question(what, of)
        content = b"[" + asked + b",\n" + msgspec.json.encode(answer) + b"]\n"
        try:
            _write(self._find_file(what, asked), content)
        except (OSError, ValueError) as error:  # ValueError: an impossible path
            logger.warning(
                "tuning.dir=%s: %s; every start measures anew what is not there until it can be written",
                self.folder,
                getattr(error, "strerror", None) or error,
            )
            self._writes = False

    @property
    def keeps(self) -> bool:
        """Tells whether later starts find what this one measured."""
        return self._writes

    def report(self) -> None:
        """Logs how much was found, if anything was asked."""
        if self.folder is not None and self.num_asked:
            logger.info("%d of %d measurements found in %s", self.num_found, self.num_asked, self.folder)

    def _encode_question(self, what: str, of: Facts) -> bytes:
        return msgspec.json.encode({"what": what, "platform": self._platform, "of": of}, order="sorted")

    def _find_file(self, what: str, question: bytes) -> Path:
        assert self.folder is not None
        return self.folder / f"{what}-{hashlib.sha256(question).hexdigest()[:24]}.json"


def find_folder(tuning_dir: str) -> Path | None:
    """Finds the folder that `tuning.dir` stands for; None: nothing is kept. Logs that a user has no home."""
    if not tuning_dir:
        return None
    try:
        return _find_user_cache() / "toka-async" / "tuning" if tuning_dir == "auto" else Path(tuning_dir).expanduser()
    except RuntimeError as error:
        logger.warning("tuning.dir=%s: %s; every start measures anew; name a folder", tuning_dir, error)
        return None


def _find_user_cache() -> Path:
    """See https://specifications.freedesktop.org/basedir-spec, by which relative paths do not count."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return base if base.is_absolute() else Path.home() / ".cache"


def describe_gpu(device: torch.device) -> Facts:
    """Describes on what times on a GPU depend besides shapes: the chip, the libraries, our own sources."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "packages": {name: _read_version(name) for name in _PACKAGES},
        "sources": _digest_sources(),
    }


def _read_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _digest_sources() -> str:
    """Digests the sources of this package."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> bytes:
    """Reads no more than an answer may have: a longer file is no answer."""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def _write(path: Path, content: bytes) -> None:
    """Writes with the user's umask, as a folder may be shared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
