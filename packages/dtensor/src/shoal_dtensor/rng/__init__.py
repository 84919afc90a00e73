"""Random numbers that do not depend on the mesh.

`draw` fills a rank's box of a global tensor.  How, the mode says: `frame` knows in which order one device would fill
the global tensor, `cpu` and `cuda` follow that device's stream, `counter` makes values from the element's index alone
(with `philox`), and `state` holds what is around generators: seeds, save and restore, and the check that ranks agree.
Nothing here knows operators or DTensors.
"""

from .cpu import law_of
from .draw import draw, draw_dropout_mask, draw_rows, empty_box
from .fill import Fill
from .frame import Frame, frame_of
from .modes import Mode, RandomMode, current_mode, random_mode, set_random_mode
from .state import check_in_step, forget_checks, generator_of, get_rng_state, set_rng_state

__all__ = [
    "Fill",
    "Frame",
    "Mode",
    "RandomMode",
    "check_in_step",
    "current_mode",
    "draw",
    "draw_dropout_mask",
    "draw_rows",
    "empty_box",
    "forget_checks",
    "frame_of",
    "generator_of",
    "get_rng_state",
    "law_of",
    "random_mode",
    "set_random_mode",
    "set_rng_state",
]
