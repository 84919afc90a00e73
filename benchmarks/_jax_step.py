"""The training step of `whole_step` under JAX's jit, on as many CPU devices as there are ranks.

A program of its own: `python benchmarks/_jax_step.py RANKS FILE HEADS ACTIVATION` reads weights and
input from the file, then for each line with a number on its input runs so many steps, and answers
with the seconds of a step and the last loss.
"""

import os
import sys
import time

RANKS, FILE, HEADS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={RANKS} --xla_cpu_multi_thread_eigen=false"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402  # reads the flags when it is imported
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

ACT = {"relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}[sys.argv[4]]
LR, BETA1, BETA2, EPS, DECAY = 1e-4, 0.9, 0.999, 1e-8, 1e-2
COLUMNS = ("wq", "wk", "wv", "w1")


def placed(name, value, mesh):
    """A weight of the file, sharded as the styles shard it."""
    kind, layer = name.split(".")[-1], name.split(".")[-2]
    spec = PartitionSpec()
    if layer in COLUMNS:
        spec = PartitionSpec("tp")
    elif layer in ("wo", "w2") and kind == "weight":
        spec = PartitionSpec(None, "tp")
    return jax.device_put(value, NamedSharding(mesh, spec))


def norm(x, weights, name):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[
        f"{name}.bias"
    ]


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def block(x, weights, i):
    batch, length, dim = x.shape
    h = norm(x, weights, f"{i}.norm1")

    def heads(name):
        return (
            linear(h, weights, f"{i}.{name}")
            .reshape(batch, length, HEADS, -1)
            .transpose(0, 2, 1, 3)
        )

    q, k, v = heads("wq"), heads("wk"), heads("wv")
    scores = jnp.where(
        jnp.tril(jnp.ones((length, length), bool)),
        q @ k.transpose(0, 1, 3, 2) / (dim // HEADS) ** 0.5,
        -jnp.inf,
    )
    out = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, dim)
    x = x + linear(out, weights, f"{i}.wo")
    return x + linear(
        ACT(linear(norm(x, weights, f"{i}.norm2"), weights, f"{i}.w1")), weights, f"{i}.w2"
    )


def loss_of(weights, x):
    for i in range(len(weights) // 16):
        x = block(x, weights, i)
    return jnp.square(x).mean()


def step(state, x):
    """Forward, backward, clipping to a norm of 1, AdamW."""
    weights, first, second, count = state
    loss, grads = jax.value_and_grad(loss_of)(weights, x)
    total = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
    factor, count = jnp.minimum(1.0, 1.0 / (total + 1e-6)), count + 1
    new = ({}, {}, {}, count)
    for name, grad in grads.items():
        m = new[1][name] = BETA1 * first[name] + (1 - BETA1) * grad * factor
        v = new[2][name] = BETA2 * second[name] + (1 - BETA2) * jnp.square(grad * factor)
        update = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPS)
        new[0][name] = weights[name] * (1 - LR * DECAY) - LR * update
    return new, loss


def main():
    """Answer until the input ends."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    stored = dict(np.load(FILE))
    x = placed("x.x", stored.pop("x"), mesh)
    weights = {name: placed(name, value, mesh) for name, value in stored.items()}
    zeros = [
        {n: jax.device_put(jnp.zeros_like(w), w.sharding) for n, w in weights.items()}
        for _ in range(2)
    ]
    state = (weights, *zeros, jnp.float32(0))
    run = jax.jit(step, donate_argnums=0)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            state, loss = run(state, x)
        jax.block_until_ready((state, loss))
        print((time.perf_counter() - start) / int(line), float(loss), flush=True)


if __name__ == "__main__":
    main()
