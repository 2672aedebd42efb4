"""Explains why torch cannot use a GPU that is there: driver, permissions, or a torch without CUDA.

Reads what Linux says of hardware and driver; starts nothing on a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

NVIDIA = "0x10de"  # vendor of a PCI device
DISPLAY = "0x03"  # its class, of which GPUs without a screen are a part
# The oldest driver that runs libraries of a CUDA release:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
CHOOSE_TORCH = "https://pytorch.org/get-started/locally/"


def explain_unusable(
    reason: str = "",
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    torch_version: str = torch.__version__,
    cuda: str | None = torch.version.cuda,
) -> str:
    """Explains why the GPU is not used, and what to do; empty: there is none, or it is hidden on purpose.

    reason: torch's own words, if it said anything.
    """
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return ""
    driver = _read_driver_version(root / "proc/driver/nvidia/version")
    devices = sorted((root / "dev").glob("nvidia[0-9]*"))
    if driver is None and not devices:
        if not _has_pci_gpu(root / "sys/bus/pci/devices"):
            return ""
        return (
            "this machine has an NVIDIA GPU, but no driver for it can be seen here; install the driver, or give the "
            "GPU to the container (docker run --gpus all)"
        )
    if cuda is None:
        return f"torch {torch_version} is built without CUDA; install a build with CUDA, see {CHOOSE_TORCH}"
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if driver is not None and oldest is not None and int(driver.partition(".")[0]) < oldest:
        return (
            f"its driver {driver} is too old for torch {torch_version}, which is built for CUDA {cuda} and needs "
            f"{oldest} or newer; update the driver, or install a torch built for an older CUDA, see {CHOOSE_TORCH}"
        )
    if not devices:
        return f"the driver {driver} is loaded, but there is no /dev/nvidia0 here; give the GPU to the container"
    if not any(os.access(device, os.R_OK | os.W_OK) for device in devices):
        return f"there is no permission to use {devices[0]}; add the user to its group"
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} names none of the GPUs that are here"
    said = f" ({' '.join(reason.split())[:200]})" if reason else ""
    return f"torch {torch_version} for CUDA {cuda} cannot use it with driver {driver or 'unknown'}{said}"


def _read_driver_version(path: Path) -> str | None:
    """Reads a version such as 580.65.06; None without a driver."""
    try:
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _has_pci_gpu(devices: Path) -> bool:
    for vendor in devices.glob("*/vendor"):
        try:
            if vendor.read_text().strip() == NVIDIA and (vendor.parent / "class").read_text().startswith(DISPLAY):
                return True
        except OSError:
            continue
    return False
