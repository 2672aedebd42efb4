"""Sends a trainer's weights to a server on the same machine: over HTTP what they are, in shared memory themselves.

What every adapter of a trainer needs. Knows no trainer.
"""

from __future__ import annotations

import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from toka_async.transfer.buckets import ShmWriter

BUCKET_BYTES = 256 << 20
TIMEOUT = 600.0


class WeightSendingError(Exception):
    """The server refused something; the message is the server's."""


class WeightSender:
    """The trainer's end of a server with `server.admin=true`.

    Args:
        key: of an admin, where the server has keys; otherwise TOKA_API_KEY, if that is set.
        bucket_bytes: of shared memory; no tensor may be larger.
        timeout: seconds of each request.
    """

    def __init__(self, url: str, key: str = "", bucket_bytes: int = BUCKET_BYTES, timeout: float = TIMEOUT) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key or os.environ.get("TOKA_API_KEY", "")
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._bucket: ShmWriter | None = None

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Asks a route, by POST where there is a body. Raises WeightSendingError."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:2000]
            raise WeightSendingError(f"{path}: {error.code}: {text}") from None
        except OSError as error:
            raise WeightSendingError(f"{path}: {error}") from None

    def pause(self, mode: str = "keep") -> None:
        """Waits until nothing is computed; `keep` leaves requests where they are."""
        self.ask(f"/pause?mode={mode}", {})

    def resume(self) -> None:
        self.ask("/resume", {})

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: str | None = None) -> None:
        """Sends all tensors of the model by their names in a checkpoint, and computes with them from then on.

        Raises WeightSendingError, which names the tensor at fault. The server then stays paused with its old version.
        """
        self.ask("/start_weight_update", {})
        writer = self._open()
        for infos, bucket in writer.fill(tensors):
            info = {
                "names": [each.name for each in infos],
                "dtype_names": [str(each.dtype).removeprefix("torch.") for each in infos],
                "shapes": [list(each.shape) for each in infos],
                "shm": {"name": writer.name, "offsets": list(bucket.offsets)},
            }
            self.ask("/update_weights", {"update_info": info})
        self.ask("/finish_weight_update", {} if version is None else {"weight_version": version})

    def read_checksums(self) -> dict[str, str]:
        """Sums of the server's tensors; `toka_async.transfer.checksum.sum_tensors` makes them of the trainer's."""
        sums: dict[str, str] = self.ask("/weight_checker", {"action": "checksum"})["checksums"]
        return sums

    def close(self) -> None:
        bucket, self._bucket = self._bucket, None
        if bucket is not None:
            bucket.close()

    def _open(self) -> ShmWriter:
        if self._bucket is None:
            self._bucket = ShmWriter(f"toka-weights-{secrets.token_hex(8)}", self._bucket_bytes)
        return self._bucket
