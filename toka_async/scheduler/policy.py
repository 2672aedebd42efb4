"""Admission: how many pages new work may take while others run.

This is the place of look-ahead admission; the rule here is a watermark. Knows counts only.
"""

from __future__ import annotations


class WatermarkAdmission:
    """Keeps a share of the cache free for the growth of running sequences, as long as any run."""

    def __init__(self, num_pages: int, share: float = 0.01) -> None:
        self._reserve = int(num_pages * share)

    def available(self, num_reclaimable: int, num_running: int) -> int:
        """Pages that new work may take.

        Args:
            num_reclaimable: free pages, and cached pages that nobody owns.
            num_running: sequences that hold a slot.
        """
        return max(0, num_reclaimable - self._reserve) if num_running else num_reclaimable
