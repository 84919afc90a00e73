"""Layouts of plain local tensors between parallel modules, for random draws as on one device.

Modules with a style return plain local tensors. A dropout between two of them would draw one mask
on every rank, for different shards. To draw this rank's shard of the mask of one device, shoal has
to know the layout of the local tensor, so it follows layouts through the code between styles.

Example: on 2 ranks, `up` is a `ColwiseParallel` Linear and `down` a `RowwiseParallel` one.

    code                     on one device   on a rank   layout   because
    h = up(x)                (3, 5, 8)       (3, 5, 4)   S(2)     the style of `up` declares it
    t = h.transpose(1, 2)    (3, 8, 5)       (3, 4, 5)   S(1)     a DTensor in S(2) has this result
    d = dropout(t)           (3, 8, 5)       (3, 4, 5)   S(1)     it is drawn as a DTensor in S(1)
    y = down(d.mT)           (3, 5, 6)       (3, 5, 6)   equal    the style of `down` declares it

How it works, in the order of a program:

1. `watch_draws` finds the modules whose code may draw (`drawing_modules`), and replaces the forward
   of each module around them by a `DrawRegion` (`region`, `module_axes`). Other models are left
   alone.
2. A call of the outermost `DrawRegion` runs under a `Watch` if some module draws in this call
   (`watch`). The inputs get layouts if they are rows of a batch (`batch_rows`).
3. A module with a style gives its outputs the layouts that its style declares (`styled_calls`,
   `activation_axes`). A program can assert a layout (`asserted_layouts`).
4. Every other torch function gives its results layouts (`layout_inference`), which it gets from a
   run on DTensors without memory (`shadow_calls`, `global_sizes`).
5. A function that draws (`drawing_calls`) runs on the DTensors whose shards its arguments are
   (`sharded_draws`). If a layout is unknown, all ranks raise `LayoutError`.

May import: _torch, dispatch, errors, layout, modules, rng, scopes, spmd, tensor.
"""
