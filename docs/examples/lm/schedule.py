"""Learning rate of each step: a linear warm-up, then half a cosine.

Promises: a pure function of the step, the same in both modes and after a resume.
"""

from __future__ import annotations

import math

WARM_UP_FRACTION = 0.1
FINAL_FRACTION = 0.1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rate of ``step`` (1 … ``steps``).

    Rises to ``peak`` over the first tenth, falls to a tenth of it at the end.
    """
    warm_up = max(1, int(steps * WARM_UP_FRACTION))
    if step <= warm_up:
        return peak * step / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(math.pi * progress)) / 2)
