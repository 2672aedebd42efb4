"""Says where the kernels run. Loads no Triton, which is not everywhere."""

from __future__ import annotations

from importlib.util import find_spec

import torch

LEAST_CAPABILITY = (8, 0)  # of a GPU: older ones lack bfloat16 and asynchronous copies, and no kernel is tested there
LEAST_E4M3 = (8, 9)  # of a GPU that converts E4M3: Triton compiles no conversion for older ones


def explain_no_kernels(device: torch.device) -> str:
    """Explains why our kernels do not run on the device, and the fix if there is one; empty if they do."""
    if device.type != "cuda":
        return f"expected a CUDA device, got {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"expected a GPU of compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
    return ""
