"""The table of seeded bugs in programs of torch's own packages.

Importing it imports torch's DTensor.
"""

from __future__ import annotations

import torch_bugs as ours
from bug_table import Bug

TORCH = (
    Bug(
        ours.ddp_loss_divided,
        "0.weight",
        "dp",
        "4 times too small",
        report="OpenGait 36",
        mesh={"dp": 4},
    ),
    Bug(
        ours.ddp_last_microbatch_not_synchronized,
        "0.weight",
        "dp",
        "missing all-reduce",
        report="accelerate 114",
        mesh={"dp": 2},
    ),
    Bug(
        ours.fsdp_loss_not_scaled_up,
        "0.weight",
        "dp",
        "2 times too small",
        report="RL2 11",
        mesh={"dp": 2},
    ),
    Bug(
        ours.fsdp_clip_by_local_norm,
        "0.weight",
        "dp",
        "local clip norm",
        report="VeOmni 185, pytorch 170862",
        mesh={"dp": 2},
    ),
    Bug(
        ours.fsdp_ignored_parameter_not_reduced,
        "0.weight",
        "dp",
        "missing all-reduce",
        report="torchtitan 956",
        mesh={"dp": 2},
    ),
    Bug(
        ours.fsdp_divide_factor,
        "0.weight",
        "dp",
        "mean taken as sum",
        report="VeOmni 185",
        mesh={"dp": 2},
    ),
    Bug(
        ours.fsdp_mean_of_uneven_tokens,
        "1.weight",
        "dp",
        "wrong divisor",
        report="torchtune 2172",
        mesh={"dp": 2},
    ),
    Bug(
        ours.gathered_without_reduction,
        "first.weight",
        "ep",
        "",
        report="NeMo Automodel 1260",
        mesh={"ep": 2},
    ),
    Bug(ours.rowwise_output_left_partial, "2", "tp", "", report="torchtitan 4015", mesh={"tp": 2}),
    Bug(
        ours.norm_replica_not_reduced,
        "norm.weight",
        "tp",
        "missing all-reduce",
        report="Megatron-LM 443",
        mesh={"tp": 2},
    ),
    Bug(
        ours.replicated_sum_taken_as_replica,
        "0.weight",
        "dp",
        "missing all-reduce",
        report="NeMo Automodel 1260",
        mesh={"dp": 2},
    ),
)
