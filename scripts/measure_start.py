"""Seconds until a server is ready: with nothing cached, again, and once FlashInfer is compiled, as far as it is wanted.

    python scripts/measure_start.py /models/llama model.load=random
    python scripts/measure_start.py --warm /models/llama    # `toka-async warm` first, as in an image

Takes the arguments of `toka-async serve`. Triton's, FlashInfer's and our own caches go to a new folder that is removed
at the end. Torch and the model's files may be in the page cache. Prints each start's stages, too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

STAGES = re.compile(r"warm after .*")
IN_BACKGROUND = re.compile(
    r"FlashInfer is compiled in the background.*|FlashInfer is compiled: .*|FlashInfer could not.*"
)
COMMAND = (sys.executable, "-m", "toka_async.cli")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", action="store_true", help="run `toka-async warm` before the first start")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton", "FLASHINFER_WORKSPACE_BASE": folder}
        arguments = [*arguments, f"tuning.dir={folder}/tuning", "server.port=0"]
        if options.warm:
            began = time.monotonic()
            if code := subprocess.run([*COMMAND, "warm", *arguments], env=environment, check=False).returncode:
                return code
            print(f"toka-async warm: {time.monotonic() - began:.1f} s", flush=True)
        first = "after warm" if options.warm else "with nothing cached"
        compiles = start(first, Path(folder), arguments, environment, waits=True)
        start("with FlashInfer compiled, not measured" if compiles else "again", Path(folder), arguments, environment)
        if compiles:
            start("with FlashInfer measured", Path(folder), arguments, environment)
    return 0


def start(
    what: str, folder: Path, arguments: list[str], environment: Mapping[str, str], *, waits: bool = False
) -> bool:
    """Times a start. waits: until a compilation in the background has ended; returns whether there was one."""
    log = folder / "log"
    began = time.monotonic()
    with log.open("w") as errors:
        command = [*COMMAND, "serve", *arguments]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
    assert server.stdout is not None
    with server.stdout:
        line = server.stdout.readline()
    seconds = time.monotonic() - began
    if not line:
        sys.exit(log.read_text())
    said = STAGES.search(log.read_text())
    print(f"{what}: {seconds:.1f} s; {said[0] if said else ''}", flush=True)
    found = IN_BACKGROUND.findall(log.read_text())
    while waits and len(found) == 1:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode} while it compiled:\n{log.read_text()}")
        time.sleep(1)
        found = IN_BACKGROUND.findall(log.read_text())
    if found and waits:
        print(f"  {time.monotonic() - began - seconds:.1f} s later: {found[-1]}", flush=True)
    server.terminate()
    server.wait()
    return found[-1:] != [] and "next start" in found[-1]


if __name__ == "__main__":
    sys.exit(main())
