"""Rows of a batch for each rank of data axes, in accelerate and in transformers' Trainer.

Inside `single_process()` both see one process, which reads all rows. With data axes of 4 ranks and
a batch size of 2, each rank then reads every fourth batch of 2 rows, and a step trains on 8 rows:

    rank 0       rank 1       rank 2       rank 3
    rows 0, 1    rows 2, 3    rows 4, 5    rows 6, 7
    rows 8, 9    ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh, all_gather, all_reduce


class DataRows:
    """The rows of one rank of data axes.

    Args:
        mesh: the data axes, one or several.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        flat = mesh if mesh.ndim == 1 else mesh.flatten()
        self.ranks = flat.size()
        self.rank = flat.get_local_rank()
        self._comm = flat.comm(0)

    def install_in_accelerator(self, accelerator: Any) -> None:
        """Make an accelerator's loaders read this rank's rows, and its `gather` all ranks' rows."""
        inner = accelerator.prepare_data_loader

        def prepare_data_loader(loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
            if getattr(loader, "_is_accelerate_prepared", False):
                return inner(loader, device_placement)
            return self._own_loader(accelerator, loader, device_placement)

        accelerator.prepare_data_loader = prepare_data_loader
        accelerator.gather = self._gather

    def install_in_trainer(self, trainer: Any) -> None:
        """Have a Trainer's losses and counts of tokens be those of all data-parallel ranks.

        Gradients are means over the ranks. So each rank divides the sum of its losses by the mean
        number of tokens, and the loss of all rows is the mean of the ranks' losses.
        """
        count_items = trainer._get_num_items_in_batch
        step = trainer.training_step

        def mean_items(*args: Any, **kwargs: Any) -> Any:
            count = count_items(*args, **kwargs)
            if count is None:
                return None
            number = torch.as_tensor(count, dtype=torch.float64, device=trainer.args.device)
            return self._mean(number)

        def step_of_all(*args: Any, **kwargs: Any) -> Tensor:
            return self._mean(step(*args, **kwargs))

        trainer._get_num_items_in_batch = mean_items
        trainer.training_step = step_of_all

    def _own_loader(self, accelerator: Any, loader: Any, device_placement: bool | None) -> Any:
        from accelerate.data_loader import prepare_data_loader

        placed = accelerator.device_placement if device_placement is None else device_placement
        loader_of_rank = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self.ranks,
            process_index=self.rank,
            split_batches=accelerator.split_batches,
            put_on_device=placed,
            rng_types=accelerator.rng_types.copy(),
            # rank 0 would read for all processes, of which accelerate sees one
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(loader_of_rank)
        return loader_of_rank

    def _gather(self, tensors: Any) -> Any:
        """Return tensors with the rows of all ranks, in any container; numbers become rows."""
        from accelerate.utils import recursively_apply

        def gather_rows(tensor: Tensor) -> Tensor:
            rows = tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()
            return all_gather(rows.contiguous(), self._comm)

        return recursively_apply(gather_rows, tensors, error_on_other_type=True)

    def _mean(self, number: Tensor) -> Tensor:
        return all_reduce(number.detach().clone(), self._comm, "avg")
