"""The table of seeded bugs: program, mesh, and the parameter and axes that a report must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import hand_written_bugs as hand
import shoal_bugs as ours

DATA_AND_TENSOR = {"dp": 2, "tp": 2}
DATA_AND_CONTEXT = {"dp": 2, "cp": 2}
DATA_AND_EXPERTS = {"dp": 2, "ep": 2}


class Bug(NamedTuple):
    """One seeded bug.

    Attributes:
        program: of the mesh.
        name: of a parameter, or a module, that the report must name.
        axes: that its explanation must name, separated by blanks.
        words: that its explanation must contain.
        report: public reports of such a bug.
        mesh: axis sizes.
    """

    program: Callable[[dict[str, int]], Any]
    name: str
    axes: str
    words: str
    report: str
    mesh: dict[str, int] = DATA_AND_TENSOR


HAND_WRITTEN = (
    Bug(
        hand.no_copy_into_column_parallel,
        "0.norm.weight",
        "tp",
        "missing all-reduce",
        report="Megatron-LM 7452",
    ),
    Bug(
        hand.no_reduce_after_row_parallel,
        "0.down",
        "tp",
        "missing all-reduce",
        report="torchtitan 4652",
    ),
    Bug(hand.bias_before_reduce, "0.bias", "tp", "", report="Megatron-LM 1736"),
    Bug(
        hand.sequence_parallel_norm_not_reduced,
        "norm.weight",
        "tp",
        "missing all-reduce",
        report="Megatron-LM 1446, TransformerEngine 435",
    ),
    Bug(
        hand.sequence_parallel_norm_reduced_twice,
        "norm.weight",
        "tp",
        "2 times too large: reduced twice",
        report="gpt-neox 1259",
    ),
    Bug(
        hand.latent_projection_partly_reduced_twice,
        "down.weight",
        "tp",
        "rows 0-5 of 8: 2 times too large",
        report="AReno 496",
    ),
    Bug(
        hand.latent_rope_rows_not_reduced,
        "down.weight",
        "tp",
        "rows 6-7 of 8: missing all-reduce",
        report="AReno 496",
    ),
    Bug(
        hand.fused_head_skips_reduction,
        "body.weight",
        "tp",
        "missing all-reduce",
        report="SkyRL 1886",
    ),
    Bug(
        hand.tied_embedding_of_stages_not_reduced,
        "embedding.weight",
        "pp",
        "missing all-reduce",
        report="Megatron-LM 6660",
        mesh={"pp": 2},
    ),
    Bug(
        hand.vocabulary_loss_without_reduction,
        "1.weight",
        "tp",
        "",
        report="torchtitan 4015",
        mesh={"tp": 2},
    ),
    Bug(
        hand.divided_by_the_world, "0.up.weight", "tp", "2 times too small", report="torchtune 2420"
    ),
    Bug(hand.summed_not_averaged, "0.up.weight", "dp", "mean taken as sum", report="apex 696"),
    Bug(
        hand.averaged_twice,
        "weight",
        "dp",
        "4 times too small",
        report="bgpt 5, RL2 11",
        mesh={"dp": 4},
    ),
    Bug(
        hand.loss_averaged_over_wrong_ranks,
        "0.up.weight",
        "dp tp",
        "in place of",
        report="Megatron-LM 673",
        mesh={"dp": 2, "tp": 3},
    ),
    Bug(
        hand.one_parameter_not_reduced,
        "0.norm.weight",
        "dp",
        "missing all-reduce",
        report="gpt-neox 1257",
    ),
    Bug(
        hand.accumulation_not_divided,
        "0.weight",
        "",
        "3 times too large",
        report="minFM 2",
        mesh={"dp": 2},
    ),
    Bug(
        hand.accumulation_reduced_each_time,
        "0.weight",
        "dp",
        "microbatch",
        report="profam 245",
        mesh={"dp": 2},
    ),
    Bug(
        hand.accumulation_loses_a_microbatch,
        "0.weight",
        "",
        "microbatch",
        report="torchtune 2172",
        mesh={"dp": 2},
    ),
    Bug(
        hand.gradients_never_zeroed, "0.weight", "", "not zeroed", report="minFM 2", mesh={"dp": 2}
    ),
    Bug(
        hand.mean_of_uneven_rows,
        "0.weight",
        "dp",
        "wrong divisor",
        report="fairseq 494",
        mesh={"dp": 3},
    ),
    Bug(
        hand.mean_of_uneven_tokens,
        "1.weight",
        "dp",
        "wrong divisor",
        report="torchtune 2172",
        mesh={"dp": 2},
    ),
    Bug(
        hand.second_reduction_left_out,
        "0.weight",
        "replicate",
        "missing all-reduce",
        report="torchtitan 956",
        mesh={"replicate": 2, "shard": 2},
    ),
    Bug(
        hand.weights_initialized_by_rank,
        "0.weight",
        "dp",
        "differs at dp=1",
        report="gpt-neox 1257",
        mesh={"dp": 2},
    ),
    Bug(
        hand.stale_gathered_weights, "weight", "", "stale", report="torchtitan 4018", mesh={"dp": 2}
    ),
    Bug(
        hand.updated_shard_not_broadcast,
        "0.weight",
        "dp",
        "stale",
        report="AReaL 313",
        mesh={"dp": 2},
    ),
    Bug(
        hand.resumed_state_in_another_order,
        "weight",
        "tp",
        "shards in another order",
        report="Megatron-LM 1736",
        mesh={"tp": 2},
    ),
    Bug(hand.fused_weight_split_without_heads, "out", "tp", "", report="Megatron-LM 6660"),
    Bug(
        hand.clipped_by_local_norm,
        "0.up.weight",
        "tp",
        "local clip norm",
        report="torchtune 2420, pytorch 170862",
    ),
    Bug(
        hand.clipped_by_counted_replicas,
        "0.up.weight",
        "tp",
        "counted once for each rank",
        report="Megatron-LM 5916, 6489",
    ),
    Bug(
        hand.dropout_alike_on_data_ranks,
        "1",
        "dp",
        "dropout alike",
        report="accelerate 114, transformers 31412",
    ),
    Bug(
        hand.dropout_differs_on_replicas,
        "1",
        "tp",
        "dropout differs",
        report="InternLM 405, tt-metal 55947",
    ),
    Bug(
        hand.positions_restart_on_each_rank,
        "positions",
        "cp",
        "",
        report="ChatLearn 341",
        mesh=DATA_AND_CONTEXT,
    ),
    Bug(
        hand.mask_off_by_a_block,
        "attention.out",
        "cp",
        "",
        report="pytorch 152261, accelerate 4177",
        mesh=DATA_AND_CONTEXT,
    ),
    Bug(
        hand.keys_gathered_without_reduction,
        "attention.qkv.weight",
        "cp",
        "",
        report="NeMo Automodel 1260",
        mesh=DATA_AND_CONTEXT,
    ),
    Bug(
        hand.context_loss_scaled,
        "head.weight",
        "cp",
        "2 times too large",
        report="Megatron-LM 673",
        mesh=DATA_AND_CONTEXT,
    ),
    Bug(
        hand.labels_shifted_by_rank,
        "head.weight",
        "cp",
        "",
        report="ChatLearn 341",
        mesh=DATA_AND_CONTEXT,
    ),
    Bug(
        hand.router_not_reduced,
        "1.router.weight",
        "ep",
        "missing all-reduce",
        report="transformers 48687, 48205",
        mesh=DATA_AND_EXPERTS,
    ),
    Bug(
        hand.expert_gradients_doubled,
        "1.experts.0.weight",
        "ep",
        "2 times too large",
        report="pytorch 160285",
        mesh=DATA_AND_EXPERTS,
    ),
    Bug(
        hand.tokens_dropped_by_experts,
        "1",
        "ep",
        "",
        report="DeepSpeed 2074",
        mesh=DATA_AND_EXPERTS,
    ),
    Bug(
        hand.tokens_unpermuted_wrongly, "1", "ep", "", report="prime-rl 3141", mesh=DATA_AND_EXPERTS
    ),
)


SHOAL = (
    Bug(
        ours.replicated_loss_divided_again,
        "0.weight",
        "dp",
        "2 times too small",
        report="bgpt 5",
        mesh={"dp": 2},
    ),
    Bug(
        ours.sharded_sum_not_scaled_up,
        "0.weight",
        "dp",
        "2 times too small",
        report="RL2 11",
        mesh={"dp": 2},
    ),
    Bug(
        ours.sharded_clip_by_local_norm,
        "0.weight",
        "dp",
        "local clip norm",
        report="VeOmni 185",
        mesh={"dp": 2},
    ),
    Bug(
        ours.ignored_parameter_not_reduced,
        "2.bias",
        "dp",
        "missing all-reduce",
        report="torchtitan 956",
        mesh={"dp": 2},
    ),
    Bug(
        ours.sharded_mean_of_uneven_tokens,
        "1.weight",
        "dp",
        "wrong divisor",
        report="torchtune 2172",
        mesh={"dp": 2},
    ),
    Bug(
        ours.replicated_over_one_of_two_axes,
        "0.weight",
        "cp",
        "missing all-reduce",
        report="Megatron-LM 673",
        mesh=DATA_AND_CONTEXT,
    ),
    Bug(
        ours.partial_output_declared_replica,
        "weight",
        "tp",
        "missing all-reduce",
        report="torchtitan 4652",
        mesh={"tp": 2},
    ),
    Bug(
        ours.local_loss_logged, "loss", "dp", "missing all-reduce", report="bgpt 5", mesh={"dp": 2}
    ),
)


def names_bug(report: Any, bug: Bug) -> bool:
    """Tell whether a finding of a report names the parameter, the axes and the words of a bug."""
    for finding in report.findings:
        sentence = finding.sentence()
        is_place = (
            finding.name == bug.name or f" {bug.name}:" in sentence or f" {bug.name}," in sentence
        )
        is_explained = finding.explanations and finding.axes == tuple(bug.axes.split())
        if is_place and is_explained and bug.words in sentence:
            return True
    return False
