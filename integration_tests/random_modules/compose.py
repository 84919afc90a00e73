"""The program of a number: random blocks, sizes, layouts, optimizer and features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from integration_tests.random_modules.program import Program, model_of

from random_specs import draw_spec
from shoal_mesh import abstract_mesh

__all__ = ["compose"]

# Optimizers and options of theirs; `foreach` and `fused` are drawn where there is that form.  `eps`
# is so large that a gradient near zero does not magnify the rounding of a sum in another order.
OPTIMIZERS = {
    "SGD": ("", "momentum=0.9", "momentum=0.9, nesterov=True, weight_decay=0.1", "maximize=True"),
    "Adam": ("eps=1e-2", "eps=1e-2, amsgrad=True", "eps=1e-2, weight_decay=0.1"),
    "AdamW": ("eps=1e-2", "eps=1e-2, amsgrad=True", "eps=1e-2, maximize=True"),
    "Adagrad": ("eps=1e-2", "eps=1e-2, lr_decay=0.1"),
    "RMSprop": ("eps=1e-2", "eps=1e-2, momentum=0.9, centered=True"),
    "Adadelta": ("eps=1e-2",),
    "Adamax": ("eps=1e-2",),
    "NAdam": ("eps=1e-2", "eps=1e-2, decoupled_weight_decay=True"),
    "RAdam": ("eps=1e-2",),
    "ASGD": ("",),
    "Rprop": ("",),
    "Adafactor": ("",),
    "LBFGS": ("max_iter=3", "max_iter=3, line_search_fn='strong_wolfe'"),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
ELEMENTWISE = tuple(name for name in OPTIMIZERS if name not in ("Adafactor", "LBFGS"))


def compose(seed: int) -> Program:
    """The program of a number: the same everywhere."""
    r = Random(seed)
    mesh = r.choice([(4,), (2, 2)])
    b, t = r.choice([(2, 4), (3, 5), (4, 6), (1, 8)])
    dim = r.choice([4, 6, 8, 12])
    vocabulary = r.choice([0, 11, 16])
    blocks = tuple(_block(r, dim, t) for _ in range(r.randint(1, 3)))
    if not vocabulary:
        blocks += (("Mlp", (dim, 8, "tanh", True, 0.0)),)  # something to train
    plan = r.choice(["distribute", "parallelize"])
    program = Program(
        mesh, blocks, (b, t, dim, vocabulary), plan, (), "", (), r.choice([1, 2, 2]), seed
    )
    program = replace(program, features=_features(r, program))
    program = replace(program, optimizer=_optimizer(r, program))
    # lists that mix plain and distributed parameters are refused
    if plan == "parallelize" and r.random() < 0.75:
        program = _unmixed(program)
    layouts = _placements(r, program) if plan == "distribute" else _styles(r, program)
    return replace(program, layouts=tuple(layouts.items()))


def _block(r: Random, dim: int, length: int) -> tuple[str, tuple[Any, ...]]:
    heads, kv_heads = r.choice([(4, 4), (4, 2), (2, 1), (8, 4), (3, 3)])
    drop = r.choice([0.0, 0.0, 0.3])
    options: list[tuple[str, tuple[Any, ...]]] = [
        (
            "Mlp",
            (
                dim,
                r.choice([8, 10, 12]),
                r.choice(["gelu", "relu", "silu", "tanh", "square"]),
                r.random() < 0.7,
                drop,
            ),
        ),
        ("Gated", (dim, r.choice([8, 9, 12]), r.random() < 0.5)),
        ("Norm", (dim, r.choice(["layer", "rms", "group", "batch", "instance"]), r.random() < 0.8)),
        (
            "Attention",
            (dim, heads, kv_heads, r.choice([2, 4]), r.choice(["sdpa", "hand"]), r.random() < 0.3),
        ),
        ("MultiHead", (dim, r.choice([2, dim // 2]), r.random() < 0.7)),
        ("Conv", (dim, r.choice(["plain", "circular", "transposed", "picture"]), r.choice([4, 6]))),
        ("Average", (dim,)),
        ("Custom", (dim,)),
        ("Views", (r.choice(["flatten", "chunk", "roll", "write", "stack", "permute"]),)),
        ("Einsum", (dim, length)),
        ("Twice", (dim,)),
        ("Parametrized", (dim, r.choice(["weight_norm", "spectral_norm", "symmetric"]))),
        ("Experts", (dim, r.choice([2, 3]))),
        ("Pool", (r.choice(["adaptive", "max", "avg"]),)),
        ("Drop", (dim, r.choice(["plain", "alpha", "channels"]))),
        ("Encoder", (dim, r.choice([2, dim // 2]), r.random() < 0.5, r.random() < 0.5, drop)),
    ]
    return r.choice([*options, *options[:4]])


def _features(r: Random, program: Program) -> tuple[str, ...]:
    drawn = {
        "tie": 0.2 if program.sizes[3] else 0,
        "share": 0.1,
        "accumulate": 0.25,
        "evaluate": 0.15,
        "zero": 0.2,
        "functional": 0.08,
        "grad": 0.1,
        "closure": 0.1,
        "average": 0.1,
        "groups": 0.15,
        "schedule": 0.1,
        "read": 0.2,
    }
    found = [name for name, share in drawn.items() if r.random() < share]
    if "functional" in found and "tie" in found:
        found.remove("tie")  # it wants one tensor per name
    kinds = {
        "clip": (0.3, ["2", "2", "inf", "1", "value", "foreach", "ours"]),
        "checkpoint": (0.3, ["reentrant", "plain", "plain", "selective"]),
        "inputs": (0.2, ["all", "halves"]),
        "scope": (
            0.3,
            [
                f"{name}{after}"
                for name in ("allowed", "replicated", "loss", "single")
                for after in ("", " after")
            ],
        ),
        "hook": (
            0.35,
            ["parameter", "accumulated", "activation", "forward", "backward", "foreign", "before"],
        ),
    }
    for name, (share, options) in kinds.items():
        if r.random() < share:
            found.append(f"{name}:{r.choice(options)}")
    if r.random() < 0.2:
        found.append(r.choice(["state", "copy"]))
    if "functional" in found or program.plan == "distribute":
        found = [name for name in found if name != "hook:before"]
    if r.random() < 0.15:
        names = [
            name for name, _ in model_of(replace(program, features=tuple(found))).named_parameters()
        ]
        if len(names) > 1:
            found.append(f"freeze:{r.choice(names)}")
    return tuple(found)


def _optimizer(r: Random, program: Program) -> str:
    name = r.choice(["SGD", "Adam", "AdamW", *OPTIMIZERS])
    if name == "LBFGS" and (program.has("groups") or program.has("state") or program.has("copy")):
        name = "Adafactor"
    if program.plan == "parallelize" and name not in ELEMENTWISE and r.random() < 0.8:
        name = "AdamW"
    options = [f"lr={r.choice([0.01, 0.05])}", r.choice(OPTIMIZERS[name])]
    form = r.random()
    if form < 0.3 and name != "LBFGS":
        options.append("foreach=True")
    elif form < 0.5 and name in FUSED:
        options.append("fused=True")
    elif form < 0.7 and name != "LBFGS":
        options.append("foreach=False")
    return f"torch.optim.{name}(groups, {', '.join(filter(None, options))})"


def _unmixed(program: Program) -> Program:
    """The program with the ways that are for plain parameters beside DTensors."""
    features = tuple(
        "clip:ours" if f in ("clip:foreach", "clip:value", "clip:1") else f
        for f in program.features
    )
    optimizer = program.optimizer
    if not any(f".{name}(" in optimizer for name in ELEMENTWISE):
        optimizer = optimizer.replace(", foreach=True", "")
    return replace(program, features=features, optimizer=optimizer)


# --- distribute: any placement of anything --------------------------------------------------------


def _placements(r: Random, program: Program) -> dict[str, str]:
    model = model_of(program)
    b, t, dim, vocabulary = program.sizes
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    shapes |= {
        "input": (b, t) if vocabulary else (b, t, dim),
        "target": (b, t) if vocabulary else (b, t, dim),
    }
    mesh = abstract_mesh(program.mesh)
    found = {}
    for name, shape in shapes.items():
        if r.random() < 0.75:
            spec = draw_spec(r, mesh, shape, ops=(), ragged=0.3)
            found[name] = f"{list(spec.placements)}, {tuple(map(tuple, spec.shard_order))}"
    return found


# --- parallelize: styles that keep a block's meaning ----------------------------------------------


SEQUENCE = (
    "PrepareModuleInputOutput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), "
    "use_local_input={local}, output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))"
)
COL, ROW = "ColwiseParallel()", "RowwiseParallel()"
WHOLE_COL, WHOLE_ROW = (
    "ColwiseParallel(output_layouts=Replicate())",
    "RowwiseParallel(input_layouts=Replicate())",
)


def _styles(r: Random, program: Program) -> dict[str, str]:
    plan: dict[str, str] = {}
    if program.sizes[3] and r.random() < 0.7:
        tied = program.has("tie")
        if r.random() < 0.5:
            plan["embed"] = "RowwiseParallel(input_layouts=Replicate())"
            head = WHOLE_COL
        else:
            plan["embed"] = "ColwiseParallel(output_layouts=Replicate())"
            head = WHOLE_ROW
        if tied or r.random() < 0.7:
            plan["head"] = head
    for index, (name, args) in enumerate(program.blocks):
        if program.has("share") and index == len(program.blocks) - 1 and index:
            break
        styles = _STYLES.get(name, _alone)
        plan |= {
            f"blocks.{index}{'.' + path if path else ''}": text
            for path, text in styles(r, args).items()
        }
    # a plain shard of the sequence is taken for an even one
    if program.sizes[1] % program.mesh[-1]:
        plan = {
            path: text.replace("use_local_input=True", "use_local_input=False").replace(
                "RowwiseParallel(output_layouts=Shard(1))",
                "RowwiseParallel(output_layouts=Shard(1), use_local_output=False)",
            )
            for path, text in plan.items()
        }
    return plan


def _linear(r: Random) -> str:
    """A style for a Linear that takes and gives what is replicated."""
    return r.choice([WHOLE_COL, WHOLE_ROW, f"{WHOLE_COL[:-1]}, use_local_output=True)"])


def _pair(r: Random, column: str, row: str) -> dict[str, str]:
    kind = r.random()
    aligned = ".aligned(2)" if r.random() < 0.2 else ""
    if kind < 0.45:
        return {column: COL + aligned, row: ROW + aligned}
    if kind < 0.6:
        return {column: "ColwiseParallel(use_local_output=False)", row: ROW}
    if kind < 0.7:
        return {
            column: COL,
            row: "RowwiseParallel(output_layouts=Shard(1), use_local_output=False)",
            "": (
                "PrepareModuleOutput(output_layouts=(Shard(1),), "
                "desired_output_layouts=(Replicate(),))"
            ),
        }
    if kind < 0.8:
        return {
            column: "ColwiseParallel(input_layouts=Shard(1))",
            row: "RowwiseParallel(output_layouts=Shard(1))",
            "": (SEQUENCE.format(local="True")),
        }
    return {name: _linear(r) for name in (column, row) if r.random() < 0.8}


def _mlp(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    return _pair(r, "up", "down")


def _gated(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    if args[2]:
        packed = f"PackedColwiseParallel(blocks={{'a': {args[1]}, 'b': {args[1]}}})"
        return r.choice([{"up": packed, "down": ROW}, {"up": WHOLE_COL, "down": WHOLE_ROW}])
    plan = _pair(r, "up", "down")
    return plan | ({"gate": plan["up"]} if "up" in plan else {})


def _norm(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    if args[1] not in ("layer", "rms") or r.random() < 0.3:
        return {}
    return {"": SEQUENCE.format(local=r.choice(["True", "False"])), "norm": "SequenceParallel()"}


def _attention(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    _, heads, kv_heads, size, _, normed = args
    if r.random() < 0.3:
        return {name: _linear(r) for name in "qkvo" if r.random() < 0.8}
    plan = {"q": f"{COL}.heads({heads}, {size})", "o": f"{ROW}.heads({heads}, {size})"}
    plan |= dict.fromkeys("kv", f"{COL}.heads({kv_heads}, {size})")
    if heads % 4 == 0 == kv_heads % 4 and r.random() < 0.5:
        plan = {"q": COL, "k": COL, "v": COL, "o": ROW}
    return plan | ({"q_norm": "SequenceParallel(sequence_dim=1)"} if normed else {})


def _encoder(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    """Attention by heads, or not; the two layers behind it, or not."""
    plan = {"inner.self_attn": "HeadParallel()"} if r.random() < 0.7 else {}
    return plan | ({"inner.linear1": COL, "inner.linear2": ROW} if r.random() < 0.7 else {})


def _conv(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    return r.choice([{"a": COL, "b": ROW} if args[1] != "transposed" else {}, {"a": WHOLE_COL}, {}])


def _twice(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    style = _linear(r)
    return (
        {"first": style}
        if r.random() < 0.1
        else {"first": style, "second": style}
        if r.random() < 0.1
        else {}
    )


def _alone(r: Random, args: tuple[Any, ...]) -> dict[str, str]:
    return {}


_STYLES: dict[str, Callable[[Random, tuple[Any, ...]], dict[str, str]]] = {
    "Mlp": _mlp,
    "Gated": _gated,
    "Norm": _norm,
    "Attention": _attention,
    "Conv": _conv,
    "Encoder": _encoder,
    "MultiHead": lambda r, args: {"inner": "HeadParallel()"} if r.random() < 0.7 else {},
    "Twice": _twice,
    "Parametrized": lambda r, args: {"inner": _linear(r)},
    "Experts": lambda r, args: {"gate": _linear(r)} if r.random() < 0.5 else {},
    "Drop": lambda r, args: (
        {"": SEQUENCE.format(local="True"), "drop": "SequenceParallel()"}
        if r.random() < 0.4
        else {}
    ),
}
