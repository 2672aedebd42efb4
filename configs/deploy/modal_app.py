"""Modal: a server that starts with the first request, and a map over shards of a data set.

modal deploy configs/deploy/modal_app.py                          # prints the server's address
modal run configs/deploy/modal_app.py --shards 64                 # answers questions/00000.parquet … of the volume
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import modal

MODEL = "Qwen/Qwen3-8B"
GPU = "H100"
PORT = 10210
MINUTE = 60  # seconds
ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path("/src")

image = (
    modal.Image.from_registry("nvidia/cuda:13.0.1-devel-ubuntu24.04", add_python="3.12")
    .apt_install("build-essential", "ninja-build")
    .add_local_dir(ROOT / "toka_async", "/src/toka_async", copy=True, ignore=["**/__pycache__"])
    .add_local_file(ROOT / "pyproject.toml", "/src/pyproject.toml", copy=True)
    .add_local_file(ROOT / "README.md", "/src/README.md", copy=True)
    .add_local_file(ROOT / "LICENSE", "/src/LICENSE", copy=True)
    .uv_pip_install("/src[cuda,data]")
    .env({"HF_HOME": "/cache/huggingface", "TRITON_CACHE_DIR": "/cache/triton", "XDG_CACHE_HOME": "/cache"})
)
app = modal.App("toka-async", image=image)
cache = modal.Volume.from_name("toka-async-cache", create_if_missing=True)
data = modal.Volume.from_name("toka-async-data", create_if_missing=True)
keys = modal.Secret.from_name("toka-async")  # with TOKA_API_KEYS, and HF_TOKEN if the model needs it


@app.function(
    gpu=GPU, volumes={"/cache": cache}, secrets=[keys], timeout=24 * 60 * MINUTE, scaledown_window=15 * MINUTE
)
@modal.concurrent(max_inputs=1000)
@modal.web_server(PORT, startup_timeout=30 * MINUTE)
def serve() -> None:
    subprocess.Popen(["toka-async", "serve", MODEL, "--host", "0.0.0.0", "--port", str(PORT)])


@app.function(gpu=GPU, volumes={"/cache": cache, "/data": data}, timeout=24 * 60 * MINUTE, retries=3, secrets=[keys])
def answer(shard: int) -> int:
    """Answer one file, if that is not done; returns the command's exit code: 1 if some rows have an error instead.

    The run works on the container's disk: a volume is no place for the database that it keeps beside its output.
    """
    source, output = (Path(f"/data/{folder}/{shard:05}.parquet") for folder in ("questions", "answers"))
    if output.exists():
        return 0
    work = Path("/tmp") / output.name
    command = ["toka-async", "batch", "run", "-i", str(source), "-o", str(work), "--seed", "0", MODEL]
    code = subprocess.run(command, check=False).returncode
    if not work.exists():
        raise RuntimeError(f"{source}: the run did not end; exit code {code}")
    output.parent.mkdir(exist_ok=True)
    shutil.copy(work, output)
    data.commit()
    return code


@app.local_entrypoint()
def main(shards: int) -> None:
    codes = list(answer.map(range(shards), order_outputs=True))
    print(f"{codes.count(0)} of {shards} files are answered, the others have rows with an error")
