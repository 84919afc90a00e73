"""Seeded bugs in hand-written parallel training, re-made from public reports as small programs.

Every program takes the mesh; with a mesh of sizes 1 it is right, so it is its own reference.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hand_written import (
    Axis,
    Block,
    CopyToAxis,
    GatherRows,
    ReduceFromAxis,
    ScatterSum,
    average,
    batch,
    clip,
    column,
    make_axes,
    row,
    rows,
    tokens,
    total_norm,
)

Mesh = dict[str, int]
WIDTH = 8


def _train(model: nn.Module, dp: Axis, divisor: float | None = None) -> None:
    """Train on this rank's rows of a global batch of 8."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x = rows(batch(step, 8, WIDTH), dp)
        model(x).square().mean().backward()
        average(model.parameters(), dp, divisor)
        optimizer.step()
        optimizer.zero_grad()


def _train_block(mesh: Mesh, wrong: str = "", divisor: str = "dp") -> None:
    """Train a tensor-parallel block, gradients divided by the size of an axis."""
    axes = make_axes(mesh)
    torch.manual_seed(1)
    divisors = {
        "dp": axes["dp"].size,
        "tp": axes["tp"].size,
        "world": dist.get_world_size(),
        "1": 1,
    }
    _train(nn.Sequential(Block(WIDTH, axes["tp"], wrong)), axes["dp"], divisors[divisor])


# --- reductions over tensor-parallel axes ---------------------------------------------------------


def no_copy_into_column_parallel(mesh: Mesh) -> None:
    """Leave out the all-reduce of the input's gradient."""
    _train_block(mesh, "no copy")


def no_reduce_after_row_parallel(mesh: Mesh) -> None:
    """Leave out the all-reduce of the output."""
    _train_block(mesh, "no reduce")


def bias_before_reduce(mesh: Mesh) -> None:
    """Add the bias of a row-parallel layer on every rank before the all-reduce."""
    _train_block(mesh, "bias before")


class SequenceParallel(nn.Module):
    """A norm on this rank's rows of the sequence before a tensor-parallel MLP."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = column(nn.Linear(WIDTH, 16), tp)
        self.down = row(nn.Linear(16, WIDTH, bias=False), tp)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm and the MLP."""
        hidden = GatherRows.apply(self.norm(x), self._tp, 1, True)
        hidden = self.down(torch.tanh(self.up(hidden)))
        return x + ScatterSum.apply(hidden, self._tp, 1)


def _train_sequence_parallel(mesh: Mesh, times: int) -> None:
    axes = make_axes(mesh)
    torch.manual_seed(2)
    model = SequenceParallel(axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = rows(rows(batch(step, 4, 4, WIDTH), axes["dp"]), axes["tp"], 1)
        (model(x).square().mean() / axes["tp"].size).backward()
        for _ in range(times):
            average(model.norm.parameters(), axes["tp"], 1)
        average(model.parameters(), axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


def sequence_parallel_norm_not_reduced(mesh: Mesh) -> None:
    """Forget the norm's gradients, which each rank has of its rows of the sequence."""
    _train_sequence_parallel(mesh, 0)


def sequence_parallel_norm_reduced_twice(mesh: Mesh) -> None:
    """Reduce the norm's gradients in a hook and again before the step."""
    _train_sequence_parallel(mesh, 2)


class Latent(nn.Module):
    """A replicated projection: six rows pass a column-parallel layer, two go to a rank's heads."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 8, bias=False)
        self.up = column(nn.Linear(6, 8, bias=False), tp)
        self.out = row(nn.Linear(8, WIDTH, bias=False), tp)
        self.rope = row(nn.Linear(8, WIDTH, bias=False), tp)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Project down and up."""
        compressed, rope = self.down(x).split([6, 2], -1)
        hidden = self.up(CopyToAxis.apply(compressed, self._tp))
        heads = torch.cat([rope] * (self.rope.in_features // 2), -1)
        return ReduceFromAxis.apply(self.out(torch.tanh(hidden)) + self.rope(heads), self._tp)


def latent_projection_partly_reduced_twice(mesh: Mesh) -> None:
    """Reduce all rows of the projection again, of which six were reduced in the backward."""
    axes = make_axes(mesh)
    torch.manual_seed(3)
    model = Latent(axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().mean().backward()
        average(model.down.parameters(), axes["tp"], 1)
        average(model.parameters(), axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


def latent_rope_rows_not_reduced(mesh: Mesh) -> None:
    """Trust the all-reduce in the backward, which two of the rows do not pass."""
    axes = make_axes(mesh)
    torch.manual_seed(3)
    _train(Latent(axes["tp"]), axes["dp"])


class Heads(nn.Module):
    """A fused head whose copy function returns its input for transposed tensors."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = column(nn.Linear(WIDTH, 16, bias=False), tp)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's logits."""
        return self.head(self.body(x).T.contiguous().T)


def fused_head_skips_reduction(mesh: Mesh) -> None:
    """Train on unreduced gradients of the hidden states."""
    axes = make_axes(mesh)
    torch.manual_seed(4)
    model = Heads(axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        logits = model(rows(batch(step, 8, WIDTH), axes["dp"]))
        (logits.square().mean() / axes["tp"].size).backward()
        average(model.parameters(), axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


class TiedStages(nn.Module):
    """The first or the last stage of a pipeline, each with its own copy of one tied embedding."""

    def __init__(self, pp: Axis) -> None:
        super().__init__()
        table = torch.randn(11, WIDTH)
        body = nn.Linear(WIDTH, WIDTH)
        if pp.position == 0:
            self.embedding = nn.Embedding.from_pretrained(table.clone(), freeze=False)
        if pp.position == pp.size - 1:
            self.body = body
        if pp.size > 1 and pp.position == pp.size - 1:
            self.head = nn.Embedding.from_pretrained(table.clone(), freeze=False)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        table = self.head if hasattr(self, "head") else self.embedding
        return torch.tanh(self.body(hidden)) @ table.weight.T


def _run_stage(model: TiedStages, pp: Axis, ids: Tensor) -> None:
    """Run this rank's stage forward and backward."""
    if pp.size == 1:
        F.cross_entropy(model.last(model.embedding(ids)), ids.roll(1)).backward()
    elif pp.position == 0:
        hidden = model.embedding(ids)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        received = torch.empty(len(ids), WIDTH)
        dist.recv(received, 0)
        received.requires_grad_()
        F.cross_entropy(model.last(received), ids.roll(1)).backward()
        assert received.grad is not None
        dist.send(received.grad, 0)


def tied_embedding_of_stages_not_reduced(mesh: Mesh) -> None:
    """Forget to add the gradients of the two copies of a tied embedding."""
    axes = make_axes(mesh)
    torch.manual_seed(5)
    model = TiedStages(axes["pp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        _run_stage(model, axes["pp"], tokens(step, 11, 6))
        optimizer.step()
        optimizer.zero_grad()


def vocabulary_loss_without_reduction(mesh: Mesh) -> None:
    """Normalize the logits of each rank's words alone."""
    axes = make_axes(mesh)
    tp = axes["tp"]
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), column(nn.Linear(WIDTH, 12, bias=False), tp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 12 // tp.size * tp.position
    for step in range(2):
        ids = tokens(step, 12, 8)
        logits = model[1](CopyToAxis.apply(model[0](batch(step, 8, WIDTH)), tp))
        is_here = (ids >= first) & (ids < first + logits.shape[1])
        places = (ids - first).clamp(0, logits.shape[1] - 1)
        local = logits.gather(1, places[:, None])[:, 0]
        chosen = ReduceFromAxis.apply(local * is_here, tp)
        (logits.logsumexp(1) - chosen).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- divisors and data parallelism ----------------------------------------------------------------


def divided_by_the_world(mesh: Mesh) -> None:
    """Divide by all ranks where data-parallel ranks alone have other rows."""
    _train_block(mesh, divisor="world")


def summed_not_averaged(mesh: Mesh) -> None:
    """Sum gradients of local means."""
    _train_block(mesh, divisor="1")


def loss_averaged_over_wrong_ranks(mesh: Mesh) -> None:
    """Divide a sum over the data-parallel ranks by the number of tensor-parallel ones."""
    _train_block(mesh, divisor="tp")


def averaged_twice(mesh: Mesh) -> None:
    """Divide the loss by the number of ranks and average the gradients."""
    axes = make_axes(mesh)
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = rows(batch(step, 8, WIDTH), axes["dp"])
        (model(x).square().mean() / axes["dp"].size).backward()
        average(model.parameters(), axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


def one_parameter_not_reduced(mesh: Mesh) -> None:
    """Reduce the gradients of matrices only."""
    axes = make_axes(mesh)
    torch.manual_seed(1)
    model = nn.Sequential(Block(WIDTH, axes["tp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().mean().backward()
        average([p for p in model.parameters() if p.ndim > 1], axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


def _accumulate(mesh: Mesh, wrong: str) -> None:
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mistake = wrong if dp.size > 1 else ""
    for step in range(2):
        for number, x in enumerate(batch(step, 12, WIDTH).chunk(3)):
            loss = model(rows(x, dp)).square().mean()
            (loss if mistake == "not divided" else loss / 3).backward()
            if mistake == "reduced each time":
                average(model.parameters(), dp, 1)
            if mistake == "zeroed" and number == 0:
                optimizer.zero_grad()
        if mistake == "reduced each time":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= dp.size
        else:
            average(model.parameters(), dp)
        optimizer.step()
        if mistake != "never zeroed":
            optimizer.zero_grad()


def accumulation_not_divided(mesh: Mesh) -> None:
    """Add the mean gradients of three microbatches."""
    _accumulate(mesh, "not divided")


def accumulation_reduced_each_time(mesh: Mesh) -> None:
    """All-reduce the accumulated gradient after each microbatch."""
    _accumulate(mesh, "reduced each time")


def accumulation_loses_a_microbatch(mesh: Mesh) -> None:
    """Zero the gradients after the first microbatch."""
    _accumulate(mesh, "zeroed")


def gradients_never_zeroed(mesh: Mesh) -> None:
    """Add the gradients of all steps."""
    _accumulate(mesh, "never zeroed")


def mean_of_uneven_rows(mesh: Mesh) -> None:
    """Average the means of ranks that have two, two and one rows."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = rows(batch(step, 5, WIDTH), dp)
        F.mse_loss(model(x), torch.ones_like(x)).backward()
        average(model.parameters(), dp)
        optimizer.step()
        optimizer.zero_grad()


def mean_of_uneven_tokens(mesh: Mesh) -> None:
    """Average token means of ranks that have other numbers of padded tokens."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(9)
    model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = tokens(step, 11, 4, 6)
        labels = ids.roll(1, 1)
        labels[0, :4] = -100
        logits = model(rows(ids, dp))
        F.cross_entropy(logits.flatten(0, 1), rows(labels, dp).flatten()).backward()
        average(model.parameters(), dp)
        optimizer.step()
        optimizer.zero_grad()


def second_reduction_left_out(mesh: Mesh) -> None:
    """Reduce over the shards' axis of a hybrid mesh, not over the replicas."""
    axes = make_axes(mesh)
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = rows(rows(batch(step, 8, WIDTH), axes["replicate"]), axes["shard"])
        model(x).square().mean().backward()
        average(model.parameters(), axes["shard"])
        optimizer.step()
        optimizer.zero_grad()


# --- state and weights ----------------------------------------------------------------------------


def weights_initialized_by_rank(mesh: Mesh) -> None:
    """Seed by rank, and never broadcast."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(11 + dp.position)
    _train(nn.Sequential(nn.Linear(WIDTH, WIDTH)), dp)


class Gathered(nn.Module):
    """A layer whose weight is gathered from shards, for each forward or once."""

    def __init__(self, dp: Axis, once: bool) -> None:
        super().__init__()
        whole = nn.Linear(WIDTH, WIDTH, bias=False).weight.detach()
        self.weight = nn.Parameter(rows(whole, dp).clone())
        self._dp = dp
        self._once = once
        self._cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        weight = GatherRows.apply(self.weight, self._dp, 0, True)
        if self._cache is None:
            self._cache = weight.detach().clone()
        if self._once:
            # The values of the cache, the gradient of the shard.
            weight = weight + (self._cache - weight).detach()
        return torch.tanh(x @ weight.T)


def stale_gathered_weights(mesh: Mesh) -> None:
    """Gather weights before the first step only."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(12)
    model = Gathered(dp, dp.size > 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        x = rows(batch(step, 8, WIDTH), dp)
        (model(x).square().mean() / dp.size).backward()
        optimizer.step()
        optimizer.zero_grad()


def updated_shard_not_broadcast(mesh: Mesh) -> None:
    """Update each parameter on the rank that has its optimizer state, and do not broadcast it."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    updated = model[dp.position] if dp.size > 1 else model
    optimizer = torch.optim.AdamW(updated.parameters(), lr=0.01)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), dp)).square().mean().backward()
        average(model.parameters(), dp)
        optimizer.step()
        model.zero_grad()


def resumed_state_in_another_order(mesh: Mesh) -> None:
    """Load the shards of the optimizer's state in the order of another degree."""
    tp = make_axes(mesh)["tp"]
    torch.manual_seed(14)
    layer = column(nn.Linear(WIDTH, WIDTH, bias=False), tp)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    saved = batch(50, WIDTH, WIDTH)
    chunks = saved.tensor_split(tp.size)
    position = (tp.position + 1) % tp.size
    optimizer.state[layer.weight]["momentum_buffer"] = chunks[position].clone()
    for step in range(2):
        (layer(batch(step, 4, WIDTH)) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class FusedAttention(nn.Module):
    """Attention of this rank's heads from one fused projection."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        fused = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.qkv = column(fused, tp)
        self.out = row(nn.Linear(WIDTH, WIDTH, bias=False), tp)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a sequence."""
        heads = list[Tensor]()
        for part in self.qkv(CopyToAxis.apply(x, self._tp)).chunk(3, -1):
            heads.append(part.unflatten(-1, (-1, 2)).transpose(1, 2))
        q, k, v = heads
        mixed = F.scaled_dot_product_attention(q, k, v)
        return ReduceFromAxis.apply(self.out(mixed.transpose(1, 2).flatten(2)), self._tp)


def fused_weight_split_without_heads(mesh: Mesh) -> None:
    """Load contiguous rows of a fused q, k, v where each rank needs its heads of all three."""
    axes = make_axes(mesh)
    torch.manual_seed(15)
    model = FusedAttention(axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 4, 3, WIDTH), axes["dp"])).square().mean().backward()
        average(model.parameters(), axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


# --- clipping -------------------------------------------------------------------------------------


def clipped_by_local_norm(mesh: Mesh) -> None:
    """Clip by the norm of this rank's shards."""
    axes = make_axes(mesh)
    torch.manual_seed(16)
    model = nn.Sequential(Block(WIDTH, axes["tp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().sum().backward()
        average(model.parameters(), axes["dp"], 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_counted_replicas(mesh: Mesh) -> None:
    """Sum squares over all ranks, which have the gradients of norms several times."""
    axes = make_axes(mesh)
    torch.manual_seed(16)
    model = nn.Sequential(Block(WIDTH, axes["tp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().sum().backward()
        average(model.parameters(), axes["dp"], 1)
        square = total_norm(model.parameters()).square()
        dist.all_reduce(square, group=axes["tp"].group)
        clip(model.parameters(), 0.5, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()


# --- randomness -----------------------------------------------------------------------------------


def dropout_alike_on_data_ranks(mesh: Mesh) -> None:
    """Seed all ranks alike, so that different rows are dropped alike."""
    axes = make_axes(mesh)
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    _train(model, axes["dp"])


def dropout_differs_on_replicas(mesh: Mesh) -> None:
    """Seed all ranks apart, so that replicated activations are dropped differently."""
    axes = make_axes(mesh)
    torch.manual_seed(17)
    model = nn.Sequential(Block(WIDTH, axes["tp"]), nn.Dropout(0.5), Block(WIDTH, axes["tp"]))
    torch.manual_seed(100 + dist.get_rank())
    _train(model, axes["dp"])


# --- context parallelism --------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention of this rank's queries to gathered keys and values."""

    def __init__(self, cp: Axis, wrong: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self._cp = cp
        self._wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the whole sequence."""
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        sums = self._wrong != "keys not reduced"
        k = GatherRows.apply(k, self._cp, 2, sums)
        v = GatherRows.apply(v, self._cp, 2, sums)
        start = x.shape[1] * self._cp.position
        if self._wrong == "mask by block" and self._cp.size > 1:
            start += x.shape[1]
        queries = torch.arange(start, start + x.shape[1])
        mask = queries[:, None] >= torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.squeeze(1))


class Sequence(nn.Module):
    """Tokens, positions and one attention."""

    def __init__(self, cp: Axis, wrong: str) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.positions = nn.Embedding(12, WIDTH)
        self.attention = Attention(cp, wrong)
        self.head = nn.Linear(WIDTH, 11)
        self._cp = cp
        self._wrong = wrong

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of this rank's tokens."""
        start = 0 if self._wrong == "positions" else ids.shape[1] * self._cp.position
        positions = torch.arange(start, start + ids.shape[1])
        return self.head(self.attention(self.words(ids) + self.positions(positions)))


def _train_sequence(mesh: Mesh, wrong: str) -> None:
    axes = make_axes(mesh)
    cp = axes["cp"]
    torch.manual_seed(18)
    model = Sequence(cp, wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = rows(tokens(step, 11, 4, 12), axes["dp"])
        target = rows(ids.roll(-1, 1), cp, 1)
        if wrong == "labels":
            target = rows(ids, cp, 1).roll(-1, 1)
        logits = model(rows(ids, cp, 1))
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        average(model.parameters(), axes["dp"])
        average(model.parameters(), cp, 1 if wrong == "loss" else None)
        optimizer.step()
        optimizer.zero_grad()


def positions_restart_on_each_rank(mesh: Mesh) -> None:
    """Number the positions of each rank from 0."""
    _train_sequence(mesh, "positions")


def mask_off_by_a_block(mesh: Mesh) -> None:
    """Let queries see the next block."""
    _train_sequence(mesh, "mask by block")


def keys_gathered_without_reduction(mesh: Mesh) -> None:
    """Gather keys and values by a function whose backward only slices."""
    _train_sequence(mesh, "keys not reduced")


def context_loss_scaled(mesh: Mesh) -> None:
    """Sum the gradients over context-parallel ranks that have means of their tokens."""
    _train_sequence(mesh, "loss")


def labels_shifted_by_rank(mesh: Mesh) -> None:
    """Shift labels after the sequence was split."""
    _train_sequence(mesh, "labels")


# --- experts --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Experts of this rank on the tokens that the router sends, and a replicated router."""

    def __init__(self, ep: Axis, wrong: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        count = 4 // ep.size
        self.experts = nn.ModuleList(experts[count * ep.position : count * (ep.position + 1)])
        self._ep = ep
        self._wrong = wrong if ep.size > 1 else ""

    def forward(self, x: Tensor) -> Tensor:
        """Add the results of the experts to the tokens."""
        shares = self.router(x).softmax(-1)
        if self._wrong != "router":
            shares = CopyToAxis.apply(shares, self._ep)
        inputs = CopyToAxis.apply(x, self._ep)
        first = len(self.experts) * self._ep.position
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            is_routed = shares[:, first + number] >= shares.median(1).values
            if self._wrong == "dropped":
                is_routed[2:] = False
            order = is_routed.nonzero()[:, 0]
            result = expert(inputs[order]) * shares[order, first + number, None]
            if self._wrong == "unpermute":
                order = order.flip(0)
            total = total.index_add(0, order, result)
        return x + ReduceFromAxis.apply(total, self._ep)


def _train_experts(mesh: Mesh, wrong: str) -> None:
    axes = make_axes(mesh)
    torch.manual_seed(19)
    experts = Experts(axes["ep"], wrong)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().mean().backward()
        average(model.parameters(), axes["dp"])
        for parameter in experts.experts.parameters() if wrong == "doubled" else ():
            if parameter.grad is not None:
                parameter.grad *= axes["ep"].size
        optimizer.step()
        optimizer.zero_grad()


def router_not_reduced(mesh: Mesh) -> None:
    """Leave the router the gradient of the local experts."""
    _train_experts(mesh, "router")


def expert_gradients_doubled(mesh: Mesh) -> None:
    """Scale the gradients of experts by the number of their ranks."""
    _train_experts(mesh, "doubled")


def tokens_dropped_by_experts(mesh: Mesh) -> None:
    """Drop the tokens behind the second."""
    _train_experts(mesh, "dropped")


def tokens_unpermuted_wrongly(mesh: Mesh) -> None:
    """Return the results of experts to other tokens."""
    _train_experts(mesh, "unpermute")
