"""Gradients, accumulated, reduced, unscaled and measured in fp32.

autograd gives a bf16 parameter a bf16 gradient. That is what one backward computed, and it is kept as it is: 2 bytes per
parameter. But a *sum* in bf16 loses what is below half an ulp of it: 256 + 0.25 = 256. So as soon as a second gradient is to be
added, the sum goes over to fp32:

* on one device autograd itself adds to the fp32 gradient that it finds, as masters' parameters have a free ``grad_dtype``;
* under DistributedDataParallel, which demands gradients of the parameter's dtype, the sum is taken away before backward and
  added in afterwards.

DistributedDataParallel also averages over the ranks in the gradient's dtype. :class:`Fp32Reducer` registers a communication
hook that averages in fp32, and leaves the fp32 average in ``parameter.grad``.

Gradients of a scaled loss are unscaled as soon as backward is over (:func:`unscale_`), into fp32: in fp16 a gradient of 2^-9
made at scale 2^17 would become 2^-26, which is 0. The pass that unscales them also finds their largest magnitude, which is
infinite or NaN if any element is, so that one number tells both how much of fp16's range is used and whether it was left.
"""

# no `from __future__ import annotations`: torch checks the annotations of a communication hook as objects
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.masters import laid_out_like

FP32 = torch.float32
LOW = (torch.bfloat16, torch.float16)
#: On a CPU, gradients with fewer elements than this are handled many at a time, as each call has a fixed cost.
SMALL = 1 << 14


def accumulate_in_fp32(params: Iterable[Parameter]) -> None:
    """Make those gradients fp32 that another is going to be added to; to be called before a backward, on one device.

    Args:
        params: 16-bit parameters with ``grad_dtype=None``.
    """
    for param in params:
        grad = param.grad
        if grad is not None and grad.dtype != FP32 and grad.layout == torch.strided:
            param.grad = grad.to(FP32)


class Fp32Reducer:
    """Accumulates over micro-batches and averages over ranks in fp32, under DistributedDataParallel.

    Args:
        model: the wrapped module, with no communication hook yet.
        params: its 16-bit parameters, with ``grad_dtype=None``.

    On every rank and after each backward ``parameter.grad`` is fp32: the sum of this rank's micro-batches so far while
    synchronisation is off, the average over ranks after the synchronised one. It takes 4 bytes per parameter from the end of
    backward until the gradients are cleared, and twice the traffic of 16 bits.
    """

    def __init__(self, model: DistributedDataParallel, params: Iterable[Parameter]) -> None:
        self._model = model
        self._params = list(params)
        self._ids = {id(param) for param in self._params}
        self._sums: dict[int, Tensor] = {}  # fp32 gradients taken away during backward, by the parameter's id
        self._averages: dict[int, Tensor] = {}
        model.register_comm_hook(model.process_group, self._reduce)

    def before_backward(self) -> None:
        """Take fp32 sums away, as DistributedDataParallel demands gradients of the parameter's dtype."""
        for param in self._params:
            if param.grad is not None and param.grad.dtype == FP32:
                self._sums[id(param)] = param.grad
                param.grad = None

    def after_backward(self) -> None:
        """Put fp32 gradients in place; to be called after each backward."""
        synchronised = self._model.require_backward_grad_sync
        if synchronised and self._model.gradient_as_bucket_view:
            # now, not at the next forward, where it would put 16-bit views in the place of the fp32 averages
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


# --- scaled gradients ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def scale_(params: Iterable[Parameter], scale: float) -> None:
    """Multiply gradients by ``scale``, in place unless they have a graph: exact for a power of two, if they are fp32."""
    if scale == 1.0:
        return
    grads = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.requires_grad:
            param.grad = _multiplied(grad, scale, grad.dtype)
        else:
            grads.append(_elements(grad))
    if grads:
        torch._foreach_mul_(grads, scale)


@torch.no_grad()
def unscale_(params: Iterable[Parameter], scale: float, widen: bool) -> Tensor | None:
    """Divide gradients by the loss scale, and find the largest magnitude that they had.

    Sparse gradients are coalesced, in fp32.

    Args:
        params: parameters; those without a gradient are passed over.
        scale: a power of two, so that the division is exact.
        widen: replace 16-bit gradients by fp32 ones before they are divided. Others are divided in place, unless they have a
            graph (``create_graph=True``).

    Returns:
        The largest magnitude before the division (0-dim, fp32), infinite or NaN if any element is, or None if there is no
        element. No device-to-host sync.
    """
    kinds: dict[tuple[bool, torch.dtype, bool], list[tuple[Parameter, Tensor]]] = {}
    with_graph: list[tuple[Parameter, Tensor]] = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        dtype, size = grad.dtype, grad.numel()
        if dtype in LOW and (widen or grad.is_sparse) and param.grad_dtype is not None:
            param.grad_dtype = None  # was frozen when masters were taken
        if grad.is_sparse:
            grad = param.grad = (grad.to(FP32) if dtype in LOW else grad).coalesce()
            dtype, size = grad.dtype, grad._nnz()
        if grad.requires_grad and size:
            with_graph.append((param, grad))
        elif size:
            # what is put together loses its memory layout
            is_small = size < SMALL and not grad.is_sparse and grad.is_contiguous()
            kinds.setdefault((grad.is_cpu, dtype, is_small), []).append((param, grad))
    largest: list[Tensor] = []
    for param, grad in with_graph:
        largest.append(_elements(grad.detach()).abs().max())
        param.grad = _multiplied(grad, 1.0 / scale, FP32 if widen and grad.dtype in LOW else grad.dtype)
    for (is_cpu, dtype, is_small), pairs in kinds.items():
        if widen and dtype in LOW:
            unscale = _widen_on_accelerator_ if not is_cpu else _widen_together_ if is_small else _widen_each_
        else:
            unscale = _divide_on_accelerator_ if not is_cpu else _divide_together_ if is_small else _divide_each_
        extremes: list[Tensor] = []
        unscale(pairs, 1.0 / scale, extremes)
        largest.append(torch.stack(extremes).abs_().max())
    if len(largest) > 1:
        largest = [torch.stack([amax.to(largest[0].device, FP32) for amax in largest]).max()]
    return largest[0].to(FP32) if largest else None


def _multiplied(grad: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    with torch.enable_grad():
        return grad.to(dtype) * factor


def _elements(grad: Tensor) -> Tensor:
    """The elements of a gradient as a dense real tensor that shares its memory."""
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad) if grad.dtype.is_complex else grad


def _divide_each_(pairs: list[tuple[Parameter, Tensor]], inverse: float, extremes: list[Tensor]) -> None:
    factor = torch.tensor(inverse)  # made once, as a number is made a tensor in each call
    for _, grad in pairs:
        elements = _elements(grad)
        extremes += elements.aminmax()
        if inverse != 1.0:
            elements.mul_(factor)  # while it is still in the processor's cache


def _divide_together_(pairs: list[tuple[Parameter, Tensor]], inverse: float, extremes: list[Tensor]) -> None:
    grads = [_elements(grad) for _, grad in pairs]
    extremes += _flatten_dense_tensors(grads).aminmax()
    if inverse != 1.0:  # what torch's GradScaler calls, as foreach operations are slow on small tensors here
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(inverse))


def _widen_each_(pairs: list[tuple[Parameter, Tensor]], inverse: float, extremes: list[Tensor]) -> None:
    while pairs:  # each 16-bit gradient is gone before the next fp32 one is made
        param, grad = pairs.pop()
        extremes += grad.aminmax()
        param.grad = grad.to(FP32).mul_(inverse)


def _widen_together_(pairs: list[tuple[Parameter, Tensor]], inverse: float, extremes: list[Tensor]) -> None:
    grads = [grad for _, grad in pairs]
    together = _flatten_dense_tensors(grads)
    extremes += together.aminmax()
    wide = _unflatten_dense_tensors(together.to(FP32).mul_(inverse), grads)
    for (param, _), grad in zip(pairs, wide, strict=True):
        param.grad = grad


def _divide_on_accelerator_(pairs: list[tuple[Parameter, Tensor]], inverse: float, extremes: list[Tensor]) -> None:
    grads = [_elements(grad) for _, grad in pairs]
    extremes += torch._foreach_norm(grads, torch.inf)
    if inverse != 1.0:
        torch._foreach_mul_(grads, inverse)


def _widen_on_accelerator_(pairs: list[tuple[Parameter, Tensor]], inverse: float, extremes: list[Tensor]) -> None:
    extremes += torch._foreach_norm([grad for _, grad in pairs], torch.inf)
    wide = []
    while pairs:  # as above
        param, grad = pairs.pop()
        param.grad = grad.to(FP32)
        wide.append(param.grad)
    torch._foreach_mul_(wide, inverse)


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
    low = [grad for grad in grads if grad.dtype in LOW]
    high = [grad for grad in grads if grad.dtype not in LOW]
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
