"""Programs on a sequence: some mix positions by plain operators, others treat each one alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, CLASSES = 2, 16, 8, 11


@dataclass(frozen=True)
class Inputs:
    """A sequence, and weights that are the same on all ranks.

    Attributes:
        x: features (batch, length, width).
        labels: (batch, length), below the number of classes.
        shifted: the label of the next position, -100 for the last one.
        positions: (length,).
        square: a weight (width, width).
        head: a weight (classes, width).
        table: rows for all positions, (length, width).
    """

    x: Tensor
    labels: Tensor
    shifted: Tensor
    positions: Tensor
    square: Tensor
    head: Tensor
    table: Tensor

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors with positions."""
        return [self.x, self.labels, self.shifted, self.positions]

    @property
    def weights(self) -> list[Tensor]:
        """The tensors that need gradients."""
        return [self.square, self.head, self.table]

    # the sequence dims of `buffers`
    dims = (1, 1, 1, 0)

    @classmethod
    def sample(cls, length: int = LENGTH) -> Inputs:
        """Random inputs, equal on all ranks."""
        generator = torch.Generator().manual_seed(0)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        labels = torch.randint(CLASSES, (BATCH, length), generator=generator)
        shifted = functional.pad(labels[:, 1:], (0, 1), value=-100)
        return cls(
            values(BATCH, length, WIDTH),
            labels,
            shifted,
            torch.arange(length),
            values(WIDTH, WIDTH).requires_grad_(),
            values(CLASSES, WIDTH).requires_grad_(),
            values(length, WIDTH).requires_grad_(),
        )

    def in_heads(self) -> Tensor:
        """(batch, 2 heads, length, width / 2)."""
        return (self.x @ self.square).view(*self.x.shape[:2], 2, -1).transpose(1, 2)

    def channels_first(self) -> Tensor:
        """(batch, width, length)."""
        return (self.x @ self.square).transpose(1, 2)


Program = Callable[[Inputs], Tensor]


def attend_by_hand(given: Inputs) -> Tensor:
    q = given.in_heads()
    return (q @ q.transpose(-2, -1)).softmax(-1) @ q


def attend_by_einsum(given: Inputs) -> Tensor:
    return torch.einsum("bthd,bshd->bhts", *[given.in_heads().transpose(1, 2)] * 2)


def attend_linearly(given: Inputs) -> Tensor:
    q = given.in_heads().exp()
    return q @ (q.transpose(-2, -1) @ q)


def shift_inside_the_loss(given: Inputs) -> Tensor:
    logits = given.x @ given.head.T
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), given.labels[:, 1:].flatten())


def shift_labels_alone(given: Inputs) -> Tensor:
    labels = functional.pad(given.labels, (0, 1), value=-100)[:, 1:]
    return functional.cross_entropy((given.x @ given.head.T).transpose(1, 2), labels)


def run_step_by_step(given: Inputs) -> Tensor:
    state = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    for step in given.x.unbind(1):
        state = (step + state @ given.square).tanh()
    return state


def run_step_by_index(given: Inputs) -> Tensor:
    state = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    for step in range(given.x.shape[1]):
        state = (given.x[:, step] + state @ given.square).tanh()
    return state


def write_the_first_position(given: Inputs) -> Tensor:
    x = given.x @ given.square
    x[:, 0] = 0.0
    return x


def mask_of_documents(given: Inputs) -> Tensor:
    return given.labels[:, :, None] == given.labels[:, None, :]


def sequence_mask_by_lengths(given: Inputs) -> Tensor:
    lengths = torch.tensor([[3], [9]])
    padded = torch.arange(given.x.shape[1]) >= lengths
    return (given.x @ given.square).masked_fill(padded[..., None], 0.0)


def embed_counted_positions(given: Inputs) -> Tensor:
    return given.x + functional.embedding(torch.arange(given.x.shape[1]), given.table)


def embed_counted_positions_from_zero(given: Inputs) -> Tensor:
    return given.x + given.table[torch.arange(0, given.x.size(1))]


def rotate_by_counted_positions(given: Inputs) -> Tensor:
    steps = torch.arange(given.x.shape[1], dtype=torch.float64)
    angles = torch.outer(steps, torch.arange(WIDTH) / 100.0)
    return given.x * angles.cos()


def normalize_batches(given: Inputs) -> Tensor:
    return functional.batch_norm(given.channels_first(), None, None, training=True)


def normalize_layers_over_positions(given: Inputs) -> Tensor:
    return functional.layer_norm(given.x.flatten(1), (given.x[0].numel(),))


def loss_of_pooled_features(given: Inputs) -> Tensor:
    return functional.cross_entropy(given.x.mean(1) @ given.head.T, torch.tensor([1, 2]))


def pool_adaptively(given: Inputs) -> Tensor:
    return functional.adaptive_avg_pool1d(given.channels_first(), 1).sigmoid()


def convolve_positions(given: Inputs) -> Tensor:
    return functional.conv1d(
        given.channels_first(),
        given.head[None, :8, :3].transpose(0, 1).expand(-1, 8, -1),
        padding=1,
    )


def convolve_two_dims(given: Inputs) -> Tensor:
    return functional.conv2d(
        given.in_heads(), torch.ones(2, 2, 3, 3, dtype=torch.float64), padding=1
    )


def interpolate_positions(given: Inputs) -> Tensor:
    return functional.interpolate(given.channels_first(), scale_factor=2, mode="linear")


def gather_positions(given: Inputs) -> Tensor:
    return given.x.gather(1, (given.labels % given.x.shape[1])[..., None].expand_as(given.x))


def run_recurrently_length_first(given: Inputs) -> Tensor:
    out: Tensor = nn.LSTM(WIDTH, 4).double()(given.x.transpose(0, 1))[0]
    return out


MIXING: dict[str, Program] = {
    "attention by hand": attend_by_hand,
    "attention by einsum": attend_by_einsum,
    "linear attention": attend_linearly,
    "product of batches": lambda given: torch.bmm(given.x, given.x.transpose(1, 2)),
    "distances": lambda given: torch.cdist(given.x @ given.square, given.x),
    "differences of positions": lambda given: given.positions[:, None] - given.positions,
    "mask of documents": mask_of_documents,
    "softmax over positions": lambda given: (given.x @ given.square).softmax(1),
    "log_softmax over positions": lambda given: functional.log_softmax(given.x, dim=-2),
    "cumsum": lambda given: (given.x @ given.square).cumsum(1),
    "cumsum of labels": lambda given: given.labels.cumsum(-1),
    "cumprod": lambda given: given.x.cumprod(1),
    "cummax": lambda given: given.x.cummax(1)[0],
    "roll": lambda given: given.x.roll(1, dims=1),
    "roll of labels": lambda given: torch.roll(given.labels, -1, 1),
    "flip": lambda given: given.x.flip(1),
    "sort": lambda given: given.x.sort(1)[0],
    "topk": lambda given: given.x.topk(2, dim=1)[0],
    "argmax over positions": lambda given: given.x.argmax(1),
    "median over positions": lambda given: given.x.median(1)[0],
    "diff": lambda given: given.x.diff(dim=1),
    "centered over positions": lambda given: given.x - given.x.mean(1, keepdim=True),
    "scaled by the mean": lambda given: given.x / given.x.mean(),
    "normalized over positions": lambda given: functional.normalize(given.x, dim=1),
    "standard deviation": lambda given: given.x.std(1),
    "batch norm": normalize_batches,
    "instance norm": lambda given: functional.instance_norm(given.channels_first()),
    "group norm": lambda given: functional.group_norm(given.channels_first(), 2),
    "layer norm over positions": normalize_layers_over_positions,
    "pooled mean": lambda given: (given.x.mean(1) @ given.square).relu(),
    "pooled sum": lambda given: given.x.sum(1).tanh(),
    "pooled maximum": lambda given: given.x.amax(1) @ given.square,
    "pooled loss": loss_of_pooled_features,
    "sigmoid of a sum": lambda given: functional.logsigmoid((given.x @ given.square).sum()),
    "penalty of a norm": lambda given: 0.1 * (given.x @ given.square).norm(),
    "square of a loss": lambda given: ((given.x @ given.square) ** 2).mean() ** 2,
    "adaptive pooling": pool_adaptively,
    "last token": lambda given: given.x[:, -1],
    "first token": lambda given: given.x.select(1, 0),
    "last token of each row": lambda given: given.x[torch.arange(BATCH), -1],
    "part of the positions": lambda given: given.x[:, 1:],
    "chosen positions": lambda given: given.x[:, [0, -1]],
    "triangle": lambda given: given.x.tril(),
    "shifted inside the loss": shift_inside_the_loss,
    "shifted labels": shift_labels_alone,
    "step by step": run_step_by_step,
    "step by index": run_step_by_index,
    "written position": write_the_first_position,
    "convolution": convolve_positions,
    "convolution of two dims": convolve_two_dims,
    "average pooling": lambda given: functional.avg_pool1d(given.channels_first(), 2, stride=1),
    "maximum pooling": lambda given: functional.max_pool1d(given.channels_first(), 2, stride=1),
    "windows": lambda given: given.x.unfold(1, 2, 1),
    "padding": lambda given: functional.pad(given.x, (0, 0, 1, 0)),
    "interpolation": interpolate_positions,
    "class token": lambda given: torch.cat([given.head[:2, None], given.x], 1),
    "two sequences": lambda given: torch.cat([given.x, given.x], 1),
    "repeated sequence": lambda given: given.x.repeat(1, 2, 1),
    "Fourier transform": lambda given: torch.fft.fft(given.x, dim=1).real,
    "gathered positions": gather_positions,
    "recurrent layer": lambda given: nn.GRU(WIDTH, 4, batch_first=True).double()(given.x)[0],
    "recurrent layer, length first": run_recurrently_length_first,
    "counted positions": embed_counted_positions,
    "counted positions from 0": embed_counted_positions_from_zero,
    "counted angles": rotate_by_counted_positions,
    "table of counted rows": lambda given: given.x + given.table[: given.x.shape[1]],
    "mask by lengths": sequence_mask_by_lengths,
    "joined batch rows": lambda given: given.x.transpose(0, 1).reshape(-1, 2 * WIDTH).softmax(0),
}


def attend(given: Inputs) -> Tensor:
    q = given.in_heads()
    out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return (given.x + out.transpose(1, 2).flatten(2)).square().sum()


def loss_of_flat_tokens(given: Inputs) -> Tensor:
    logits = functional.linear(given.x.view(-1, WIDTH), given.head)
    return functional.cross_entropy(logits, given.labels.view(-1), reduction="sum")


def loss_of_shifted_labels(given: Inputs) -> Tensor:
    logits = (given.x @ given.square).relu() @ given.head.T
    return functional.cross_entropy(
        logits.transpose(1, 2), given.shifted, ignore_index=-100, reduction="sum"
    )


def experts_by_indices(given: Inputs) -> Tensor:
    tokens = given.x.reshape(-1, WIDTH)
    chosen = (tokens @ given.head.T).topk(2, dim=-1)
    weights = chosen.values.softmax(-1)
    mask = functional.one_hot(chosen.indices, CLASSES).permute(2, 1, 0)
    out = torch.zeros_like(tokens)
    for expert in range(CLASSES):
        slot, token = torch.where(mask[expert])
        rows = (tokens[token] @ given.square).tanh() * (1 + expert)
        out.index_add_(0, token, rows * weights[token, slot, None])
    return (out.reshape(given.x.shape) + given.x).square().sum()


def experts_in_sorted_order(given: Inputs) -> Tensor:
    tokens = given.x.reshape(-1, WIDTH)
    expert = (tokens @ given.head.T).argmax(-1)
    order = expert.argsort()
    rows = tokens[order] * (1 + expert[order, None])
    back = torch.empty_like(rows).index_copy(0, order, rows @ given.square)
    return (back.view_as(given.x) * given.x).sum()


def valid_tokens_only(given: Inputs) -> Tensor:
    valid = given.shifted != -100
    logits = (given.x @ given.head.T)[valid]
    return functional.cross_entropy(logits, given.shifted[valid], reduction="sum")


def rotate_by_positions(given: Inputs) -> Tensor:
    frequencies = torch.arange(WIDTH // 2, dtype=torch.float64) / 10
    angles = given.positions[:, None] * frequencies
    cos = torch.cat([angles.cos()] * 2, -1)[: given.x.shape[1]]
    sin = torch.cat([angles.sin()] * 2, -1)[None, :, :]
    first, second = (given.x @ given.square).chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return ((given.x @ given.square) * cos + turned * sin).square().sum()


def gathered_log_probabilities(given: Inputs) -> Tensor:
    logits = (given.x @ given.head.T).float().double()
    chosen = logits.log_softmax(-1).gather(-1, given.labels.unsqueeze(-1)).squeeze(-1)
    weights = (given.labels > 2).to(chosen.dtype)
    return -(chosen * weights).sum()


def one_row_of_logits(given: Inputs) -> Tensor:
    logits = (given.x @ given.head.T)[0]
    return logits[torch.arange(len(logits)), given.labels[0]].exp().sum()


def pairs_of_positions(given: Inputs) -> Tensor:
    pairs = (given.x @ given.square).view(BATCH, given.x.shape[1] // 2, 2, WIDTH)
    return pairs.mean(2).square().sum()


def sum_of_each_row(given: Inputs) -> Tensor:
    rows = (given.x @ given.square).square().sum(1)
    return (rows @ given.square.detach()).sum() + 3 * rows.mean(-1).sum()


def loss_of_some_positions_at_a_time(given: Inputs) -> Tensor:
    hidden = torch.split(given.x @ given.square, 2, dim=1)
    labels = torch.split(given.labels, 2, dim=1)
    losses = [
        functional.cross_entropy((part @ given.head.T).mT, part_labels, reduction="sum")
        for part, part_labels in zip(hidden, labels, strict=True)
    ]
    return torch.stack(losses).sum()


def loss_by_slices(given: Inputs) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for start in range(0, given.x.shape[1], 2):
        logits = given.x[:, start : start + 2] @ given.head.T
        labels = given.labels[:, start : start + 2].flatten()
        loss = loss + functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    return loss


def report_a_loss(given: Inputs) -> Tensor:
    loss = (given.x @ given.square).square().sum()
    perplexity = loss.detach().exp()
    with torch.no_grad():
        perplexity = perplexity + loss.sigmoid()
    return loss + 0 * perplexity.isnan()


def stacked_and_split(given: Inputs) -> Tensor:
    first, second = torch.stack([given.x @ given.square, given.x], 1).unbind(1)
    return first.exp().sum() + (2 * second).exp().sum()


def masked_by_a_plain_tensor(given: Inputs) -> Tensor:
    kept = torch.ones(BATCH, given.x.shape[1], 1, dtype=torch.bool)
    return (given.x @ given.square).masked_fill(~kept, 0.0).exp().sum()


def add_rows_of_a_table(given: Inputs) -> Tensor:
    return (given.x + functional.embedding(given.positions, given.table)).tanh().square().sum()


def normalize_features(given: Inputs) -> Tensor:
    return functional.rms_norm(given.x @ given.square, (WIDTH,)).exp().sum()


def order_features(given: Inputs) -> Tensor:
    return ((given.x @ given.square).flip(-1).roll(1, -1).cumsum(-1).sort(-1)[0] * given.x).sum()


def convolve_one_position(given: Inputs) -> Tensor:
    return functional.conv1d(given.channels_first(), given.square[..., None]).square().sum()


def convolve_features(given: Inputs) -> Tensor:
    return (
        functional.conv1d((given.x @ given.square).reshape(-1, 1, WIDTH), given.head[:2, None, :3])
        .square()
        .sum()
    )


def normalize_batches_of_evaluation(given: Inputs) -> Tensor:
    return (
        functional.batch_norm(
            given.channels_first(),
            torch.ones(WIDTH, dtype=torch.float64),
            torch.full((WIDTH,), 2.0, dtype=torch.float64),
        )
        .square()
        .sum()
    )


def multiply_features_by_einsum(given: Inputs) -> Tensor:
    return torch.einsum("btd,de,bte->bt", given.x, given.square, given.x).tanh().sum()


def mean_of_squares(given: Inputs) -> Tensor:
    mean = ((given.x @ given.square) ** 2).mean()
    reported_norm = (given.x @ given.square).norm().detach()
    total: Tensor = mean * given.x.numel() + reported_norm * 0
    return total


def penalize_weights(given: Inputs) -> Tensor:
    loss = (given.x @ given.square).square().sum() / 2
    penalty = (given.x @ given.square).square().sum().nan_to_num()
    return loss - penalty


def repeat_heads(given: Inputs) -> Tensor:
    return (given.in_heads().repeat_interleave(2, 1) * given.in_heads().repeat(1, 2, 1, 1)).sum()


def convolve_pairs(given: Inputs) -> Tensor:
    return (
        functional.conv1d(given.channels_first(), given.head[None, :8, :2], stride=2).square().sum()
    )


def flatten_and_back(given: Inputs) -> Tensor:
    return (given.x.reshape(-1, WIDTH) @ given.square).view(BATCH, -1, WIDTH).tanh().square().sum()


def write_features(given: Inputs) -> Tensor:
    x = given.x @ given.square
    x[..., 0] = 0.0
    x[:, :, 1:3] *= 2
    x += given.x
    return x.exp().sum()


RIGHT: dict[str, Program] = {
    "attention of the block": attend,
    "flat tokens": loss_of_flat_tokens,
    "shifted labels as a buffer": loss_of_shifted_labels,
    "experts by indices": experts_by_indices,
    "experts in sorted order": experts_in_sorted_order,
    "valid tokens only": valid_tokens_only,
    "rotated by positions": rotate_by_positions,
    "gathered log-probabilities": gathered_log_probabilities,
    "one row of logits": one_row_of_logits,
    "pairs of positions": pairs_of_positions,
    "sum of each row": sum_of_each_row,
    "masked by a plain tensor": masked_by_a_plain_tensor,
    "rows of a table by positions": add_rows_of_a_table,
    "norm of features": normalize_features,
    "softmax of features": lambda given: ((given.x @ given.square).softmax(-1) * given.x).sum(),
    "order of features": order_features,
    "convolution of one position": convolve_one_position,
    "convolution of features": convolve_features,
    "batch norm of evaluation": normalize_batches_of_evaluation,
    "einsum of features": multiply_features_by_einsum,
    "mean of squares": mean_of_squares,
    "report of a loss": report_a_loss,
    "loss with a penalty of weights": penalize_weights,
    "stacked and split": stacked_and_split,
    "written features": write_features,
    "repeated heads": repeat_heads,
    "some positions at a time": loss_of_some_positions_at_a_time,
    "positions by slices": loss_by_slices,
    "pooled pairs": lambda given: functional.avg_pool1d(given.channels_first(), 2).square().sum(),
    "convolution of pairs": convolve_pairs,
    "flat and back": flatten_and_back,
}
