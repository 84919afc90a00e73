"""Covers: scopes.py: blocks, threads, and the threads on which autograd runs a backward pass."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from textwrap import dedent

from shoal_dtensor import random_mode, set_random_mode
from shoal_dtensor.rng.state import current_mode
from shoal_mesh.internal import ScopedValue


def test_blocks_nest_and_threads_do_not_see_them() -> None:
    value, seen = ScopedValue("shoal_dtensor_test", 0), []
    with value.entered(1), value.entered(2):
        thread = threading.Thread(target=lambda: seen.append(value.get()))
        thread.start()
        thread.join()
        inside = contextvars.copy_context()
        assert (value.get(), seen) == (2, [0])
    assert value.get() == 0 and not value.blocks
    assert inside.run(value.get) == 2  # a task that was started in the block


def test_a_mode_that_is_set_holds_until_the_next() -> None:
    def program() -> str:
        set_random_mode("counter")
        with random_mode("local"):
            pass
        return current_mode().mode

    context = contextvars.Context()
    assert context.run(program) == "counter"
    context.run(set_random_mode, "single_device")


def test_a_backward_on_another_thread_has_the_value_of_its_caller() -> None:
    """A reentrant backward that is nested more than 60 times runs on a thread of autograd.

    This is so on the CPU too.
    """
    script = """
        import os, threading, torch
        from shoal_dtensor import communication, random_mode
        from shoal_dtensor.rng.state import current_mode
        from shoal_dtensor.scopes import current

        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, depth):
                ctx.depth = depth
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                seen.add((threading.get_ident(), current().communication, current_mode().mode))
                if ctx.depth:
                    with torch.enable_grad():
                        y = Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1)
                    y.backward()
                return grad, None

        x = torch.ones(1, requires_grad=True)
        for policy, mode in (("forbid", "local"), ("allow", "single_device"), ("warn", "counter")):
            seen = set()
            y = Nested.apply(x, 70)
            with communication(policy), random_mode(mode):
                y.backward()
            threads, settings = {thread for thread, *_ in seen}, {tuple(rest) for _, *rest in seen}
            print(len(threads), settings == {(policy, mode)})
        os._exit(0)  # torch does not end those threads
    """
    done = subprocess.run(
        [sys.executable, "-uc", dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["2 True"] * 3, done.stdout
