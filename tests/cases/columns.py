from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32


def ids(*values: int) -> Int32:
    return np.asarray(values, dtype=np.int32)
