"""Step any torch optimizer on fp32 masters, a bucket at a time.

An optimizer holds the module's 16-bit parameters. For the time of ``optimizer.step()`` the masters stand in for them: in each
``group["params"]`` and as the keys of ``optimizer.state``, with fp32 gradients. Before and after, the optimizer is an ordinary
optimizer over the module's own parameters.

torch optimizers skip a parameter whose gradient is None, so stepping a few parameters at a time gives the same result as
stepping all at once, as long as no parameter's update looks at another's. That is what keeps the memory down: only the masters
of one bucket are fp32 at a time. For optimizers whose update is elementwise, a bucket may even hold a *slice* of a parameter,
which keeps the whole step in the processor's cache. Three kinds, then:

==============  ==============================================  ==============================================
kind            optimizers                                      a bucket holds
==============  ==============================================  ==============================================
elementwise     :data:`ELEMENTWISE`                             slices of parameters, or several whole ones
per parameter   :data:`PER_PARAMETER`                           whole parameters
coupled         LBFGS and every optimizer that is not known     all parameters at once; ``closure`` runs inside
==============  ==============================================  ==============================================

What a bucket goes through (split masters; ``M`` and ``G`` are fp32 scratch)::

    M <- join(parameter, remainder)     G <- gradient     optimizer.step() on M, G     parameter, remainder <- split(M)
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.masters import Master, Masters, laid_out_like
from lightning_mp.numerics.split import canonical_nan_, round_to_bf16_bits_

#: Optimizers that update each element from that element's own gradient and state.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
#: Optimizers that update each parameter from that parameter's own gradient and state.
PER_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    {torch.optim.Adafactor, torch.optim.SparseAdam, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])}
)

#: Scratch bytes per element of a bucket: an fp32 gradient, and an fp32 master where there is no full copy.
SCRATCH_BYTES = {"split": 8, "copy": 4}
#: Slices are not made smaller than this, whatever the bucket: the fixed cost of a bucket would dominate.
MIN_SLICE = 4096


def is_coupled(optimizer: Optimizer) -> bool:
    """Whether the optimizer's update may look at several parameters at once, so that it has to see all of them."""
    return type(optimizer) not in ELEMENTWISE and type(optimizer) not in PER_PARAMETER


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` has a ``closure`` argument without a default, as LBFGS has."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


# --- buckets -----------------------------------------------------------------------------------------------------------


class _Piece:
    """A parameter, or the slice ``[start, stop)`` of its flattened elements, in a bucket."""

    __slots__ = ("before", "group", "master", "param", "size", "slice", "stand_in", "views")

    def __init__(
        self,
        group: int,
        param: Parameter,
        master: Master,
        part: slice | None = None,
        before: dict[Any, Any] | None = None,
    ) -> None:
        self.group = group
        self.param = param
        self.master = master
        self.slice = part  # None: the whole parameter
        self.size = param.numel() if part is None else part.stop - part.start
        self.stand_in: Tensor = param
        self.before = {} if before is None else before  # state of the whole parameter, from which each of its slices starts
        self.views: dict[Any, Tensor] = {}  # this slice of the whole parameter's state tensors

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of ``tensor``, which has the parameter's shape."""
        return tensor if self.slice is None else tensor.view(-1)[self.slice]

    def shape(self, elements: Tensor) -> Tensor:
        """1-d ``elements`` in the shape, and the memory layout, in which the optimizer is to see this piece."""
        return elements if self.slice is not None else laid_out_like(elements, self.param)


def _size(pieces: list[_Piece]) -> int:
    return sum(piece.size for piece in pieces)


class _Bucket:
    """The pieces that are stepped together, with the aliases that a step needs of their memory and of its scratch."""

    def __init__(self, pieces: list[_Piece], scratch: _Scratch) -> None:
        self.pieces = pieces
        self.is_full = pieces[0].master.full is not None
        device = pieces[0].param.device
        sizes = [piece.size for piece in pieces]
        total = _size(pieces)
        self.params = [piece.of(piece.param.detach()) for piece in pieces]
        self.param_bits = [param.view(torch.int16) for param in self.params]
        gradients = scratch.get("gradient", total, device)
        self.gradients = [piece.shape(part) for piece, part in zip(pieces, gradients.split(sizes), strict=True)]
        if self.is_full:
            self.masters = [piece.of(cast(Tensor, piece.master.full)) for piece in pieces]
        else:
            self.fp32 = scratch.get("master", total, device)
            self.masters = [piece.shape(part) for piece, part in zip(pieces, self.fp32.split(sizes), strict=True)]
            self.master_bits = [master.view(torch.int32) for master in self.masters]
            self.remainders = [piece.of(cast(Tensor, piece.master.remainder)) for piece in pieces]
            # the gradient's scratch is free while masters are joined
            self.fp32_remainder = gradients.view(torch.int32)
            self.joined_remainders = [gradient.view(torch.int32) for gradient in self.gradients]
        for piece, master in zip(pieces, self.masters, strict=True):
            # an alias of its own: the full copy itself must not carry a gradient
            piece.stand_in = _with_attributes(master.detach(), piece.param)

    def load(self) -> None:
        """Make the stand-ins the masters of the parameters as they are now, with fp32 gradients."""
        if not self.is_full:
            torch._foreach_copy_(self.masters, self.params)
            torch._foreach_copy_(self.joined_remainders, self.remainders)
            self.fp32.view(torch.int32).add_(self.fp32_remainder)  # the join, see numerics.split
        targets, sources = [], []
        for piece, target in zip(self.pieces, self.gradients, strict=True):
            grad = cast(Tensor, piece.param.grad).detach()
            if grad.layout != torch.strided:
                piece.stand_in.grad = grad.to(torch.float32)
                continue
            if piece.slice is not None:
                grad = grad.reshape(-1)[piece.slice]
            if grad.dtype == torch.float32:
                piece.stand_in.grad = grad
            else:
                piece.stand_in.grad = target
                targets.append(target)
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    def store(self) -> None:
        """Write the stepped masters back to the parameters."""
        if self.is_full:
            torch._foreach_copy_(self.params, self.masters)
        else:
            canonical_nan_(self.fp32)
            torch._foreach_copy_(self.remainders, self.master_bits)
            round_to_bf16_bits_(self.fp32)
            torch._foreach_copy_(self.param_bits, self.master_bits)


class _Scratch:
    """Memory that buckets use in turn.

    Args:
        size: the number of elements of the largest bucket.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def get(self, use: str, size: int, device: torch.device) -> Tensor:
        """``size`` fp32 elements (1-d, uninitialised)."""
        if (use, device) not in self._buffers:
            self._buffers[use, device] = torch.empty(self._size, device=device, dtype=torch.float32)
        return self._buffers[use, device][:size]


# --- preparing an optimizer ---------------------------------------------------------------------------------------------------


def prepare(optimizer: Optimizer, masters: Masters) -> list[RemovableHandle]:
    """Make an optimizer that was built over bf16 parameters hold the state that it would hold over fp32 ones.

    State that exists already, since some optimizers make it in their constructor, becomes fp32. State that is loaded later
    is kept at fp32, where torch would cast it to the parameter's dtype.

    Args:
        optimizer: its groups hold the module's parameters.
        masters: the masters of those parameters that have one.

    Returns:
        The handles of the hooks that were put on ``optimizer.load_state_dict``.
    """
    for nested in nested_optimizers(optimizer):
        state_to_fp32_(nested, masters)
    if isinstance(optimizer, torch.optim.Adagrad):
        # its constructor rounded the initial value to bf16
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                if masters.get(param) is not None and not state["step"].item():
                    state["sum"].fill_(group["initial_accumulator_value"])

    loaded: list[dict[str, Any]] = []

    def remember(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        loaded.append(state_dict)

    def restore(optimizer: Optimizer) -> None:
        state_dict = loaded.pop()
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for key, param in zip(ids, params, strict=True):
            if masters.get(param) is not None and key in state_dict["state"]:
                state = optimizer.state[param]
                for name, value in state_dict["state"][key].items():
                    # the others are as torch makes them; step counts are not cast, and may live on another device
                    if isinstance(value, Tensor) and value.is_floating_point() and state[name].dtype == param.dtype:
                        state[name] = value.detach().to(param.device, torch.float32, copy=True)

    # a wrapper that never ran Optimizer.__init__ has no hooks of its own, and passes state on to the one that it wraps
    hooked = next((o for o in nested_optimizers(optimizer) if hasattr(o, "_optimizer_load_state_dict_pre_hooks")), None)
    if hooked is None:
        return []
    return [hooked.register_load_state_dict_pre_hook(remember), hooked.register_load_state_dict_post_hook(restore)]


def state_to_fp32_(optimizer: Optimizer, masters: Masters) -> None:
    """Bring floating 16-bit state of parameters with a master to fp32."""
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor) and masters.get(param) is not None:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                    state[name] = value.to(torch.float32)


# --- the step ----------------------------------------------------------------------------------------------------------


class BucketedStep:
    """Step an elementwise or per-parameter optimizer on the masters of the parameters that have a gradient.

    Args:
        optimizer: not coupled (see :func:`is_coupled`); its groups hold the module's parameters.
        masters: the masters of those parameters that have one; the others are stepped as they are.
        bucket_bytes: bound on the scratch memory, see :data:`SCRATCH_BYTES`. A parameter that cannot be sliced and needs
            more gets memory of its own for the time of its bucket.
    """

    def __init__(self, optimizer: Optimizer, masters: Masters, bucket_bytes: float) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._limit = bucket_bytes / SCRATCH_BYTES[masters.storage]
        self._signature: list[Any] = []
        self._plan: list[list[_Piece]] = []
        self._buckets: list[_Bucket | None] = []

    @torch.no_grad()
    def run(self, **kwargs: Any) -> Any:
        """Step once. Gradients may be bf16 or fp32; parameters without one are left alone.

        If the optimizer raises, ``param_groups`` and ``state`` hold the module's parameters all the same, and the masters of
        the bucket at fault are as before. No device-to-host sync.

        Args:
            kwargs: passed on to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns.
        """
        optimizer, masters = self._optimizer, self._masters
        masters.settle()
        self._make_plan()
        lists = [group["params"] for group in optimizer.param_groups]
        originals = [list(params) for params in lists]
        result = None
        with _step_hooks_once(optimizer, kwargs) as hooks_follow:
            try:
                # parameters that are fp32 themselves are stepped first, with no scratch
                for params in lists:
                    params[:] = [param for param in params if masters.get(param) is None]
                if any(lists) or not self._plan:
                    result = optimizer.step(**kwargs)
                for pieces, bucket in zip(self._plan, self._buckets, strict=True):
                    if bucket is not None:
                        result = self._step_bucket(bucket, lists, kwargs)
                    else:
                        result = self._step_bucket(_Bucket(pieces, _Scratch(_size(pieces))), lists, kwargs)
                        for piece in pieces:  # lets go of the scratch
                            piece.stand_in = piece.param
                            lists[piece.group].clear()
            finally:
                for params, original in zip(lists, originals, strict=True):
                    params[:] = original
                masters.end_step(guard=hooks_follow)
        return result

    def _make_plan(self) -> None:
        """Spread the parameters that have a gradient over buckets, unless the last step's plan still holds."""
        masters = self._masters
        signature: list[tuple[Any, ...]] = []
        wanted = []
        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                grad, master = param.grad, masters.get(param)
                if grad is None or master is None:
                    continue
                if master.full is None and masters.storage == "copy":
                    masters.make_full([master])
                strided = grad.layout == torch.strided
                signature.append((index, id(param), param.data_ptr(), strided))
                wanted.append((index, param, master, strided))
        signature.append((masters.generation,))
        if signature == self._signature:
            return
        self._signature = signature
        self._plan = []
        filled, room = 0, False
        for index, param, master, strided in wanted:
            for piece in self._pieces(index, param, master, strided):
                if not room or not strided or filled + piece.size > self._limit:
                    self._plan.append([])
                    filled = 0
                self._plan[-1].append(piece)
                filled += piece.size
                room = strided  # a sparse gradient has its bucket to itself
        totals = [_size(pieces) for pieces in self._plan]
        scratch = _Scratch(max((total for total in totals if total <= self._limit), default=0))
        self._buckets = [
            _Bucket(pieces, scratch) if total <= self._limit else None for pieces, total in zip(self._plan, totals, strict=True)
        ]

    def _pieces(self, group: int, param: Parameter, master: Master, strided: bool) -> list[_Piece]:
        size = param.numel()
        most = max(MIN_SLICE, int(min(self._limit, 2**62)) // 64 * 64)  # whole vector registers
        if type(self._optimizer) not in ELEMENTWISE or size <= most or not strided or not param.is_contiguous():
            return [_Piece(group, param, master)]
        before: dict[Any, Any] = {}
        return [_Piece(group, param, master, slice(start, min(start + most, size)), before) for start in range(0, size, most)]

    def _step_bucket(self, bucket: _Bucket, lists: list[list[Tensor]], kwargs: dict[str, Any]) -> Any:
        state = self._optimizer.state
        bucket.load()
        for params in lists:
            params.clear()
        for piece in bucket.pieces:
            lists[piece.group].append(piece.stand_in)
        try:
            for piece in bucket.pieces:
                _swap_state_in(state, piece)
            result = self._optimizer.step(**kwargs)
        finally:
            for piece in bucket.pieces:
                _swap_state_out(state, piece)
        bucket.store()
        return result


# --- optimizer.state ---------------------------------------------------------------------------------------------------


def _swap_state_in(state: dict[Any, Any], piece: _Piece) -> None:
    if piece.slice is None:
        before = state.pop(piece.param, None)
        if before is not None:
            state[piece.stand_in] = before
        return
    if piece.slice.start == 0:
        piece.before.clear()
        piece.before.update(state.get(piece.param, {}))
    sliced = {}
    for key, value in piece.before.items():
        if isinstance(value, Tensor) and value.shape == piece.param.shape:
            if not value.is_contiguous():
                value = piece.before[key] = state[piece.param][key] = value.contiguous()
            sliced[key] = piece.views[key] = value.view(-1)[piece.slice]
        else:
            # such as the step count: each slice advances its own from the same start
            sliced[key] = value.clone() if isinstance(value, Tensor) else value
    if sliced:
        state[piece.stand_in] = sliced


def _swap_state_out(state: dict[Any, Any], piece: _Piece) -> None:
    stepped = state.pop(piece.stand_in, None)
    if stepped is None:
        return
    if piece.slice is None:
        state[piece.param] = stepped
        return
    whole = state[piece.param]
    for key, value in stepped.items():
        if isinstance(value, Tensor) and value.shape == piece.stand_in.shape:
            if value is not piece.views.get(key):  # not updated in place
                if not isinstance(whole.get(key), Tensor):  # made in this step
                    whole[key] = torch.empty_like(piece.param, dtype=value.dtype, requires_grad=False)
                whole[key].view(-1)[piece.slice].copy_(value)
        elif piece.slice.stop == piece.param.numel():
            whole[key] = value
    piece.views.clear()


def _with_attributes(stand_in: Tensor, param: Tensor) -> Tensor:
    # some optimizers are steered by attributes that users set on their parameters
    if param.__dict__:
        stand_in.__dict__.update(param.__dict__)
    return stand_in


@contextlib.contextmanager
def _step_hooks_once(optimizer: Optimizer, kwargs: dict[str, Any]) -> Iterator[bool]:
    """Call the hooks that users registered on ``step`` once for all buckets, with the module's parameters in place.

    Yields whether hooks are going to follow the step.
    """
    hooked: tuple[tuple[Any, str], ...] = (
        (torch_optimizer, "_global_optimizer_pre_hooks"),
        (optimizer, "_optimizer_step_pre_hooks"),
        (optimizer, "_optimizer_step_post_hooks"),
        (torch_optimizer, "_global_optimizer_post_hooks"),
    )
    hooks = [getattr(owner, name, {}) for owner, name in hooked]  # wrappers may not have run Optimizer.__init__
    if not any(hooks):
        yield False
        return
    for hook in chain(hooks[0].values(), hooks[1].values()):
        changed = hook(optimizer, (optimizer,), kwargs)
        if changed is not None:
            kwargs.update(changed[1])
    for owner, name in hooked:
        setattr(owner, name, OrderedDict())
    try:
        yield bool(hooks[2] or hooks[3])
    finally:
        for (owner, name), original in zip(hooked, hooks, strict=True):
            setattr(owner, name, original)
    for hook in chain(hooks[2].values(), hooks[3].values()):
        hook(optimizer, (optimizer,), kwargs)


# --- coupled optimizers ------------------------------------------------------------------------------------------------


class CoupledStep:
    """Step an optimizer that has to see all parameters at once, and may run its closure any number of times.

    All masters are made fp32 for the time of the step, so that it takes 8 bytes per parameter of temporary memory. While the
    closure runs, the module's parameters, rounded from the masters as they are at that moment, stand in the optimizer.

    Args:
        optimizer: any optimizer.
        masters: the masters of its parameters.
    """

    def __init__(self, optimizer: Optimizer, masters: Masters) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._lists: list[list[Tensor]] = []
        self._originals: list[list[Tensor]] = []
        self._states: list[dict[Any, Any]] = []
        self._stand_ins: dict[Tensor, Tensor] = {}

    def run(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step once, with ``closure`` as the optimizer's closure.

        Args:
            closure: runs forward and backward; None if gradients are there already and the step needs no other ones.
            kwargs: passed on to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns.
        """

        def closure_on_parameters() -> Any:
            assert closure is not None
            self._swap_out()
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                self._swap_in()

        if closure is not None:
            kwargs["closure"] = closure_on_parameters
        optimizers = nested_optimizers(self._optimizer)
        # optimizers that wrap others share groups with them, as a rule
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._lists = list({id(group["params"]): group["params"] for group in groups}.values())
        self._states = list({id(optimizer.state): optimizer.state for optimizer in optimizers}.values())
        self._originals = [list(params) for params in self._lists]
        with _step_hooks_once(self._optimizer, kwargs) as hooks_follow:
            self._swap_in()
            try:
                return self._optimizer.step(**kwargs)
            finally:
                self._swap_out()
                self._stand_ins = {}
                self._masters.end_step(guard=hooks_follow)

    @torch.no_grad()
    def _swap_in(self) -> None:
        self._masters.settle()
        for params, original in zip(self._lists, self._originals, strict=True):
            for index, param in enumerate(original):
                master = self._masters.get(param)
                if master is None:
                    continue
                if self._masters.storage == "copy" and param.grad is not None:
                    self._masters.make_full([master])
                stand_in = self._stand_ins.get(param)
                if stand_in is None:
                    stand_in = self._stand_ins[param] = _with_attributes(master.value(), param)
                else:
                    stand_in.copy_(master.value())
                stand_in.grad = None if param.grad is None else param.grad.detach().to(torch.float32)
                params[index] = stand_in
                _rekey(self._states, param, stand_in)

    @torch.no_grad()
    def _swap_out(self) -> None:
        for params, original in zip(self._lists, self._originals, strict=True):
            params[:] = original
        for param, stand_in in self._stand_ins.items():
            master = self._masters.get(param)
            assert master is not None
            master.set_(stand_in)
            # the optimizer may have cleared gradients, or changed them
            param.grad = stand_in.grad
            stand_in.grad = None
            _rekey(self._states, stand_in, param)


def nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and those that it holds in attributes, at any depth, as wrappers such as SAM and Lookahead do."""
    found = [optimizer]
    for outer in found:
        found += [inner for inner in vars(outer).values() if isinstance(inner, Optimizer) and inner not in found]
    return found


def _rekey(states: list[dict[Any, Any]], old: Tensor, new: Tensor) -> None:
    for state in states:
        if (value := state.pop(old, None)) is not None:
            state[new] = value
