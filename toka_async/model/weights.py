"""Fills a decoder's parameters: from safetensors files, or with random values.

Each tensor of a checkpoint is copied straight into its place in a (fused) parameter, one at a time; a rank reads its
own part only. Knows files and names; knows nothing of what the layers compute.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toka_async.bar import Show, show_nothing
from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.json_file import JsonFile, ModelError
from toka_async.checkpoint.names import StoredSlice, list_stored_parts
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.cache_scales import parse_scale_name
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import Decoder, RankModel
from toka_async.model.matrices.mxfp4 import BLOCKS, SCALES, Mxfp4Slice
from toka_async.model.matrices.ops import Ops, TorchOps
from toka_async.model.matrices.part import WeightPart

INPUT_SCALES = ("input_scale", "activation_scale")


def build_decoder(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm | None = None,
    ops: Ops | None = None,
    layouts: LayoutPolicy | None = None,
    part: StagePart | None = None,
) -> Decoder:
    """Builds a decoder with unset parameters on `device` (`meta` included); `ops` default to plain torch.

    spec: the whole model. part: the layers of a stage; None: all.
    """
    with default_dtype(dtype), torch.device(device):
        return Decoder(spec, comm or LocalComm(), ops or TorchOps(), layouts, part).eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes parameters that are built within of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def random_weights(decoder: RankModel, seed: int, show: Show = show_nothing) -> None:
    """Sets norms to 1 and everything else to N(0, 0.02), in place.

    A tensor's name seeds its numbers, so the ranks of any division together hold the same tensor.
    """
    parts = [*decoder.parts()]
    for done, (name, part) in enumerate(parts):
        show(done, len(parts), "tensors drawn")
        if part.constant is not None:
            part.target.fill_(part.constant)
            continue
        if not part.target.numel():  # another rank's
            continue
        generator = torch.Generator(part.target.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        is_float = part.target.itemsize > 1  # there are no random numbers of 8 bits
        if is_float and part.is_whole and part.store is None and part.order is None:
            part.target.normal_(0.0, 0.02, generator=generator)
            continue
        dtype = part.target.dtype if is_float else torch.float32
        numbers = part.target.new_empty(part.shape, dtype=dtype).normal_(0.0, 0.02, generator=generator)
        part.write(part.cut(numbers))


@torch.inference_mode()
def load_weights(decoder: RankModel, model_dir: Path, show: Show = show_nothing) -> None:
    """Fills `decoder` from the safetensors files of `model_dir`, converting to its dtype.

    Raises ModelError, which names the tensor or file, for a
    tensor that is missing, mis-shaped or unexpected and a file that is missing or corrupt.
    """
    parts = dict(decoder.parts())
    missing = set(parts)
    done, total = 0, sum(part.target.nbytes for part in parts.values())
    for name in load_tensors(decoder, model_dir):
        missing.discard(name)
        done += parts[name].target.nbytes
        show(_count_mebibytes(done), _count_mebibytes(total), "MiB loaded")
    if missing:
        name = min(missing)
        shape = list(parts[name].shape)
        more = f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else ""
        raise ModelError(f"{model_dir}: tensor {name} of shape {shape} is missing from the weights{more}")


def load_tensors(decoder: RankModel, model_dir: Path) -> Iterator[str]:
    """Writes what the files have of the decoder's tensors; gives the name of each. Raises ModelError as `load_weights`.

    Some may be missing.
    """
    parts = dict(decoder.parts())
    for path, name, tensor in _open_tensors(decoder, parts, model_dir):
        parts[name].write(_read(path, name, parts[name], tensor))
        yield name


def check_tensors(decoder: RankModel, model_dir: Path) -> set[str]:
    """Returns the names of what `load_tensors` would write, of which only shapes and types are read.

    Raises ModelError.
    """
    parts, found = dict(decoder.parts()), set[str]()
    for path, name, tensor in _open_tensors(decoder, parts, model_dir):
        _check(path, name, parts[name], tensor)
        found.add(name)
    return found


def _count_mebibytes(size: int) -> int:
    return -(-size >> 20)


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint: those of its index, `model.safetensors`, or all there are."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        names = {_name_within(index, name) for name in JsonFile(index).section("weight_map").fields.values()}
        files = [model_dir / name for name in sorted(names)]
    elif (model_dir / "model.safetensors").exists():
        files = [model_dir / "model.safetensors"]
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{model_dir}: no *.safetensors files; weights in other formats (pytorch_model.bin, .pth, .gguf) must be "
            "converted to safetensors first"
        )
    for path in files:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: is not a file; download it again")
        if not path.exists():
            raise ModelError(f"{path}: no such file, though {index.name} names it; download it again")
    return files


def _name_within(index: Path, name: object) -> str:
    """Checks that a name in the index stays within the model's folder."""
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ModelError(f"{index}: weight_map names {name!r}: expected a file within the model's folder")
    return name


def _open_tensors(
    decoder: RankModel, parts: Mapping[str, WeightPart], model_dir: Path
) -> Iterator[tuple[Path, str, Any]]:
    """Yields the file, name and slice of each tensor that has a place. Raises ModelError for one that lacks it."""
    paths = weight_files(model_dir)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    stored = file.get_slice(name)
                    for part in list_stored_parts(decoder.find_part(name), stored.get_shape(), parts):
                        if part.name in parts:
                            yield path, part.name, StoredSlice(part, stored)
                        elif (whole := part.name.removesuffix(BLOCKS)) in parts:
                            scales = _find_scales(whole + SCALES, [path, *paths])
                            yield path, whole, Mxfp4Slice(stored, scales, parts[whole].target.device)
                        elif not _is_scale(part.name, parts) and decoder.needs_place(name):
                            raise ModelError(
                                f"{path}: tensor {part.name} has no place in the model that config.json describes"
                            )
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a readable safetensors file ({error}); download it again") from None


def _find_scales(name: str, paths: Sequence[Path]) -> Tensor:
    """Reads the scales of blocks, which may be in another file than these."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                scales: Tensor = file.get_tensor(name)
                return scales
    raise ModelError(f"{paths[0]}: tensor {name} is missing from the weights")


def _read(path: Path, name: str, part: WeightPart, tensor: Any) -> Tensor:
    _check(path, name, part, tensor)
    return part.cut(tensor)


def _check(path: Path, name: str, part: WeightPart, tensor: Any) -> None:
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != part.shape:
        raise ModelError(f"{path}: tensor {name} has shape {list(shape)}, but config.json asks for {list(part.shape)}")
    if dtype not in part.dtypes:
        raise ModelError(f"{path}: tensor {name} is of type {dtype}; supported: {', '.join(part.dtypes)}")


def _is_scale(name: str, parts: Mapping[str, WeightPart]) -> bool:
    """Tells whether a tensor has scales of a tensor in MXFP4, which takes them, of the cache, or of a matrix' inputs.

    Inputs are quantized by their own scales.
    """
    matrix, _, last = name.rpartition(".")
    is_of_inputs = last in INPUT_SCALES and f"{matrix}.weight" in parts
    return is_of_inputs or name.removesuffix(SCALES) in parts or parse_scale_name(name) is not None
