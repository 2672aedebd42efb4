"""Limits the files and batches of one owner. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass


class QuotaError(Exception):
    """An owner is at a limit. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The most open batches, files, and bytes in files of one owner. 0: any number."""

    batches: int = 0
    files: int = 0
    num_bytes: int = 0

    def check_files(self, files: int, num_bytes: int) -> None:
        """Raises QuotaError when an owner cannot have `files` files with `num_bytes` bytes in all."""
        if 0 < self.files < files:
            raise QuotaError(f"there can be {self.files} files of one owner (batches.key_max_files): delete some first")
        if 0 < self.num_bytes < num_bytes:
            raise QuotaError(
                f"the files of one owner can have {self.num_bytes >> 20} MiB (batches.key_max_files_mb), and with this "
                f"one they would have {num_bytes / 2**20:.1f}: delete some first"
            )

    def check_batches(self, batches: int) -> None:
        if 0 < self.batches < batches:
            raise QuotaError(
                f"{self.batches} batches of one owner can be open at once (batches.key_max_open_batches): "
                "wait until one has ended, or cancel one"
            )


ANY = Quota()
