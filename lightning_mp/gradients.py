"""Gradients of 16-bit parameters, accumulated and reduced in fp32.

autograd gives a bf16 parameter a bf16 gradient. That is what one backward computed, and it is kept as it is: 2 bytes per
parameter. But a *sum* in bf16 loses what is below half an ulp of it: 256 + 0.25 = 256. So as soon as a second gradient is to be
added, the sum goes over to fp32:

* on one device autograd itself adds to the fp32 gradient that it finds, as masters' parameters have a free ``grad_dtype``;
* under DistributedDataParallel, which demands gradients of the parameter's dtype, the sum is taken away before backward and
  added in afterwards.

DistributedDataParallel also averages over the ranks in the gradient's dtype. :class:`Fp32Reducer` registers a communication
hook that averages in fp32, and leaves the fp32 average in ``parameter.grad``.
"""

# no `from __future__ import annotations`: torch checks the annotations of a communication hook as objects
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.masters import laid_out_like

FP32 = torch.float32


def accumulate_in_fp32(params: Iterable[Parameter]) -> None:
    """Make those gradients fp32 that another is going to be added to; to be called before a backward, on one device.

    Args:
        params: bf16 parameters with ``grad_dtype=None``.
    """
    for param in params:
        grad = param.grad
        if grad is not None and grad.dtype != FP32 and grad.layout == torch.strided:
            param.grad = grad.to(FP32)


class Fp32Reducer:
    """Accumulates over micro-batches and averages over ranks in fp32, under DistributedDataParallel.

    Args:
        model: the wrapped module, with no communication hook yet.
        params: its bf16 parameters, with ``grad_dtype=None``.

    On every rank and after each backward ``parameter.grad`` is fp32: the sum of this rank's micro-batches so far while
    synchronisation is off, the average over ranks after the synchronised one. It takes 4 bytes per parameter from the end of
    backward until the gradients are cleared, and twice bf16's traffic.
    """

    def __init__(self, model: DistributedDataParallel, params: Iterable[Parameter]) -> None:
        self._model = model
        self._params = list(params)
        self._ids = {id(param) for param in self._params}
        self._sums: dict[int, Tensor] = {}  # fp32 gradients taken away during backward, by the parameter's id
        self._averages: dict[int, Tensor] = {}
        model.register_comm_hook(model.process_group, self._reduce)

    def before_backward(self) -> None:
        """Take fp32 sums away, as DistributedDataParallel demands bf16 gradients."""
        for param in self._params:
            if param.grad is not None and param.grad.dtype == FP32:
                self._sums[id(param)] = param.grad
                param.grad = None

    def after_backward(self) -> None:
        """Put fp32 gradients in place; to be called after each backward."""
        synchronised = self._model.require_backward_grad_sync
        if synchronised and self._model.gradient_as_bucket_view:
            # now, not at the next forward, where it would put bf16 views in the place of the fp32 averages
            self._model.reducer._rebuild_buckets()
        for param in self._params:
            key, grad = id(param), param.grad
            if key in self._averages:
                average = self._averages.pop(key)
                if grad is not None:
                    self._sums.pop(key, None)  # part of the average
                    param.grad = average
            elif not synchronised and grad is not None and grad.dtype != FP32:
                total = self._sums.pop(key, None)
                param.grad = grad.to(FP32) if total is None else total.add_(grad)
            if key in self._sums:
                param.grad = self._sums.pop(key)

    def _reduce(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        params = bucket.parameters()
        if id(params[0]) not in self._ids:  # DistributedDataParallel's buckets have one dtype each
            buffer.div_(group.size())
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])
        average = buffer.to(FP32)
        sizes = [param.numel() for param in params]
        parts = [laid_out_like(part, param) for param, part in zip(params, average.split(sizes), strict=True)]
        for param, part in zip(params, parts, strict=True):
            if id(param) in self._sums:
                part.add_(self._sums[id(param)])
        average.div_(group.size())
        work = dist.all_reduce(average, group=group, async_op=True)

        def keep(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            future.value()
            for param, part in zip(params, parts, strict=True):
                self._averages[id(param)] = part
            return buffer.copy_(average)

        return work.get_future().then(keep)


def clip_by_norm_(params: Iterable[Parameter], clip_val: float) -> Tensor | None:
    """Scale gradients down so that their joint 2-norm is at most ``clip_val``, with the norm and the factor in fp32.

    torch's own function computes the norm of 16-bit gradients in 16 bits.

    Args:
        params: parameters; those without a gradient are passed over.
        clip_val: the largest norm.

    Returns:
        The norm before clipping (0-dim, fp32), or None if there is no gradient. No device-to-host sync.
    """
    grads = []
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()
            grads.append(param.grad._values())
        else:
            grads.append(param.grad.detach())
    if not grads:
        return None
    device = grads[0].device
    low = [grad for grad in grads if grad.dtype in (torch.bfloat16, torch.float16)]
    high = [grad for grad in grads if grad.dtype not in (torch.bfloat16, torch.float16)]
    norms = [*(torch._foreach_norm(low, 2, dtype=FP32) if low else ()), *(torch._foreach_norm(high, 2) if high else ())]
    total = torch.linalg.vector_norm(torch.stack([norm.to(device, FP32) for norm in norms]))
    factor = (clip_val / (total + 1e-6)).clamp(max=1.0)
    # the product is to be formed in fp32 and rounded once: a CPU does so with a 0-dim factor, others need a dimension
    if all(grad.device.type == "cpu" for grad in grads):
        torch._foreach_mul_(grads, factor)
    else:
        for grad in grads:
            local = factor.to(grad.device)
            grad.mul_(local.view(1) if grad.dim() else local)
    return total
