"""Divide a training step among the ranks of a group: each has a copy of the model, or a part of its weights.

    Gradients    one process
    Replicated   DistributedDataParallel (Li et al. 2020): every rank has all weights, and the gradients are summed
    Sharded      fully_shard (FSDP2, Zhao et al. 2023): every rank has a part of weights, gradients and optimizer state

In all of them, the gradient is the sum over the batches of all ranks, because each loss is divided by the number of
labels of the whole step.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard import fast
from regard.batch import Batch
from regard.errors import SpecError
from regard.models.base import Model
from regard.models.build import build
from regard.models.loss import Loss
from regard.nn.block import BlockModule
from regard.training.optim import OptimizerSpec
from regard.training.parallel.group import Group
from regard.training.spec import TrainSpec

LossFunction = Callable[[Batch], Loss]
WARM = 3  # eager steps before a CUDA graph is captured
WARM_REPLICATED = 11  # DistributedDataParallel prepares itself in its first steps


class Gradients:
    """The gradients of a process that trains alone."""

    rank: int = 0
    size: int = 1
    scale: float = 1.0  # factor of the loss, such that the gradients are sums over the ranks
    warm: int = WARM
    unused: bool = False  # True: some weights receive no gradient, which the ranks exchange at every step
    eager: str | None = None  # why steps are neither compiled nor captured as a CUDA graph

    def number(self, batch: int) -> int:
        """Return the number, within the whole step, of batch number `batch` of this rank."""
        return self.rank + batch * self.size

    def loss(self, function: LossFunction, batch: Batch) -> Loss:
        """Return `function(batch)`, where `function` is the loss of the model, perhaps compiled."""
        return function(batch)

    def sharing(self, last: bool) -> AbstractContextManager[object]:
        """Return a context for the gradient of a batch. `last` is true for the last batch of this rank in a step."""
        del last
        return nullcontext()

    def summed(self, values: Tensor) -> Tensor:
        """Return the sums of values over all ranks."""
        return values

    def whole(self, model: Model) -> Model:
        """Return the model with all its weights on rank 0, for validation. Every rank calls this together."""
        return model

    def replaceable(self, model: Model) -> Model:
        """Return, on rank 0, a whole model into which averaged weights can be loaded for validation."""
        return model

    def load(self, model: Model, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint into the model."""
        model.load_state_dict(weights)

    def placed(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        """Return the part of a whole tensor that belongs to this rank, divided as the parameter `like` is."""
        del like
        return tensor


def share(model: Model, spec: TrainSpec, group: Group, plain: bool, unused: Callable[[], bool]) -> Gradients:
    """Return the `Gradients` for a group of ranks. `unused()` returns whether a parameter receives no gradient."""
    if group.device is None:
        return Gradients()
    if spec.parallel == "shard":
        check_sharding(spec, group.device)
        return Sharded(model, group, plain)
    return Replicated(model, group, unused())


def check_batches(accumulate: int, group: Group, sharded: bool) -> None:
    """Raise an error if the batches of a step cannot be divided among the ranks."""
    if accumulate >= group.size and not (sharded and accumulate % group.size):
        return
    fitting = [size for size in range(1, accumulate + 1) if accumulate % size == 0]
    raise SpecError(
        "train.accumulate",
        f"a step has {accumulate} batch{'es' * (accumulate != 1)}, which {group.size} processes cannot share; start "
        f"{' or '.join(map(str, fitting[-3:]))} of them, or begin a run with --set train.accumulate={group.size}",
    )


def check_sharding(spec: TrainSpec, device: torch.device) -> None:
    """Raise an error for settings whose results would be different with sharded weights."""
    optimizer: OptimizerSpec | None = spec.optimizer
    if optimizer is not None and optimizer.kind != "adamw":
        raise SpecError(
            "train.parallel",
            f"shard trains with adamw; {optimizer.kind} combines the rows of a matrix, of which each rank has only "
            "some (Muon is wrong by 2e-5 after 3 steps); use train.parallel=replicate or train.optimizer=adamw",
        )
    if device.type == "cuda" and spec.precision == "float16":
        raise SpecError("train.precision", "shard trains in bfloat16 or float32, not in float16; leave it at auto")


class LossOf(nn.Module):
    """A module that computes the loss of a model, because DistributedDataParallel replaces a call of a module."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: LossFunction, batch: Batch) -> Loss:
        return function(batch)


class Shared(Gradients):
    """Base class for gradients that several ranks compute together."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size

    def summed(self, values: Tensor) -> Tensor:
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values


class Replicated(Shared):
    """Every rank has all weights; gradients are averaged in the backward pass of the last batch, by torch's DDP."""

    warm = WARM_REPLICATED

    def __init__(self, model: Model, group: Group, unused: bool) -> None:
        super().__init__(group)
        self.unused = unused
        self.scale = float(group.size)  # torch divides by the size
        device = next(model.parameters()).device
        side = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        with side:  # as capturing a CUDA graph requires
            module = LossOf(model)
            own = [name for name, _ in module.named_buffers()]  # constants, and counts of this rank
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, own)
            self.module = DistributedDataParallel(module, gradient_as_bucket_view=True, find_unused_parameters=unused)

    def loss(self, function: LossFunction, batch: Batch) -> Loss:
        return self.module(function, batch)

    def sharing(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.module.no_sync()


class Sharded(Shared):
    """Every rank has a part of each weight; a block is gathered before it runs, by torch's `fully_shard`.

    The gradients of every batch are summed and divided among the ranks at once, because keeping whole gradients of a
    model that is too large for one GPU would need the memory that sharding saves.
    """

    eager = "the weights are sharded (train.parallel)"

    def __init__(self, model: Model, group: Group, plain: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # takes a second to import
        from torch.distributed.fsdp import (  # noqa: PLC0415
            FSDPModule,
            fully_shard,
            register_fsdp_forward_method,
        )

        assert group.device is not None
        super().__init__(group)
        self.device, self.plain = group.device, plain
        marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(group.device.type, (group.size,))
        for block in [module for module in model.modules() if isinstance(module, BlockModule)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name, parameter in model.named_parameters():  # new objects, without the marks for weight decay
            vars(parameter).update(marks[name])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # otherwise gloo divides again, and fails in float32
        register_fsdp_forward_method(model, "loss")

    @torch.no_grad()
    def whole(self, model: Model) -> Model:
        whole = self.replaceable(model)
        weights = whole.state_dict()
        for name, part in model.state_dict().items():
            tensor = part.full_tensor() if hasattr(part, "full_tensor") else part
            if self.rank == 0:
                weights[name].copy_(tensor)
        return whole

    def replaceable(self, model: Model) -> Model:
        if self.rank != 0:
            return model
        whole = build(model.spec, self.device, init=False)
        if not self.plain:
            fast.install(whole, self.device)
        return whole

    @torch.no_grad()
    def load(self, model: Model, weights: Mapping[str, Tensor]) -> None:
        for name, part in model.state_dict().items():
            part.copy_(self.placed(weights[name], part))

    def placed(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: PLC0415

        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        # Every rank has read the whole tensor, so no rank sends a part to another.
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank stores; a tensor that is not sharded is returned unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[reportAttributeAccessIssue]
