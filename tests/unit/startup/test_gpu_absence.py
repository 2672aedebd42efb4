from __future__ import annotations

import os
from pathlib import Path

import pytest

from toka_async.startup.gpu_absence import explain_unusable


def driver(root: Path, version: str) -> None:
    path = root / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed\nGCC version:  gcc version 12.3.0\n"
    )


def gpu(root: Path) -> None:
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/nvidia0").touch()
    (root / "dev/nvidiactl").touch()


def pci(root: Path, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    folder = root / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def why(root: Path, reason: str = "", cuda: str | None = "13.0", **environ: str) -> str:
    return explain_unusable(reason, root, environ, "2.13.0", cuda)


def test_without_a_gpu_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert why(tmp_path) == ""
    pci(tmp_path, kind="0x020000")  # a network card
    assert why(tmp_path) == ""


def test_a_gpu_without_a_driver(tmp_path: Path) -> None:
    pci(tmp_path)
    assert "no driver for it" in why(tmp_path)


def test_an_old_driver(tmp_path: Path) -> None:
    driver(tmp_path, "550.54.15")
    gpu(tmp_path)
    line = why(tmp_path)
    assert line.startswith("its driver 550.54.15 is too old for torch 2.13.0, which is built for CUDA 13.0")
    assert "580 or newer; update the driver, or install a torch" in line
    assert "too old" not in why(tmp_path, cuda="12.8")


def test_a_torch_without_cuda(tmp_path: Path) -> None:
    driver(tmp_path, "580.65.06")
    gpu(tmp_path)
    assert "torch 2.13.0 is built without CUDA; install" in why(tmp_path, cuda=None)


def test_a_container_without_the_device(tmp_path: Path) -> None:
    driver(tmp_path, "580.65.06")
    assert "no /dev/nvidia0" in why(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use everything")
def test_no_permission(tmp_path: Path) -> None:
    driver(tmp_path, "580.65.06")
    gpu(tmp_path)
    (tmp_path / "dev/nvidia0").chmod(0)
    assert "no permission" in why(tmp_path)


def test_hidden_on_purpose_or_by_mistake(tmp_path: Path) -> None:
    driver(tmp_path, "550.54.15")
    gpu(tmp_path)
    assert why(tmp_path, CUDA_VISIBLE_DEVICES="") == ""
    assert why(tmp_path, CUDA_VISIBLE_DEVICES="-1") == ""
    assert "CUDA_VISIBLE_DEVICES=7 names none" in why(tmp_path, cuda="12.8", CUDA_VISIBLE_DEVICES="7")


def test_another_reason_is_torchs_own(tmp_path: Path) -> None:
    driver(tmp_path, "580.65.06")
    gpu(tmp_path)
    line = why(tmp_path, reason="CUDA initialization: Error 802:\n system not yet initialized")
    assert line.endswith("with driver 580.65.06 (CUDA initialization: Error 802: system not yet initialized)")
