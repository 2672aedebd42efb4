"""Which GPUs of a machine a replica computes on: one after the other, as many for each replica as it has ranks.

Knows no model.
"""

from __future__ import annotations

import os

import torch

from toka_async.model.spec import ModelError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_gpus(replica: int, num_replicas: int, per_replica: int) -> None:
    """Hides all GPUs but the replica's own from this process, which must not have used one yet.

    With one replica, and without any GPU, nothing is hidden.

    Raises:
        ModelError: there are too few.
    """
    if num_replicas == 1:
        return
    count = torch.cuda.device_count()  # from the driver's library, which leaves the devices alone
    if not count:
        return
    if count < num_replicas * per_replica:
        raise ModelError(
            f"parallel.dp={num_replicas}: needs {num_replicas * per_replica} GPUs where this machine shows {count}; "
            f"use at most {count // per_replica}, or model.device=cpu"
        )
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    os.environ[VISIBLE] = ",".join(names[replica * per_replica : (replica + 1) * per_replica])
