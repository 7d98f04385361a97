"""The fp32 master weights of a module: where they are kept, and how edits of the 16-bit parameters reach them.

Each distinct parameter has one :class:`Master`, however many modules or optimizers share it. It is kept in one of two forms:

``split``
    parameter (bf16) + remainder (int16) = master, exactly; 2 bytes per parameter beside the parameter (see
    :mod:`lightning_mp.numerics.split`).
``copy``
    a full fp32 tensor; 4 bytes per parameter. It exists from the first gradient on; until then the remainder serves, so that
    frozen and unused parameters cost the same 2 bytes in both forms.

An fp16 parameter has a full copy from the start: with fp16's few exponent bits, 16 more bits do not make every fp32 value.

**Edits.** Users write to parameters between steps: clamping, re-initialisation, pruning, weight averaging. The edited value has
to become the master, and the elements that were not touched have to keep their master bits. A full copy can always be compared
with the parameter. A split master cannot: every pair of halves is a valid one. So where hooks or callbacks could edit weights
(:mod:`lightning_mp.edits`), a *guard*, a copy of the bf16 bits, is taken when a step ends and compared when the next forward
begins; then it is dropped. It costs 2 bytes per parameter between steps and nothing while gradients and activations are alive.
An edit that finds no guard, as between the start of forward and the end of the step, is noticed by the tensor's version
counter, and on a CPU by a checksum. It is kept to bf16 precision, and reported once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_mp.numerics.split import join, split

log = logging.getLogger(__name__)

Storage = Literal["split", "copy"]
BF16 = torch.bfloat16
FP16 = torch.float16
SHORT_NAMES = {BF16: "bf16", FP16: "fp16"}
CHUNK = 1 << 17  # elements


def bits(tensor: Tensor) -> Tensor:
    """The bits of a 16-bit tensor, as an int16 alias."""
    return tensor.detach().view(torch.int16)


def laid_out_like(elements: Tensor, param: Tensor) -> Tensor:
    """View 1-d ``elements`` with the shape and the memory layout of the dense tensor ``param``."""
    return elements.as_strided(param.size(), param.stride(), elements.storage_offset())


class Master:
    """The fp32 value of one bf16 or fp16 parameter.

    Args:
        param: the parameter: fp32, or 16-bit, whose master starts with the same value. It is cast to ``dtype`` in place.
        dtype: bf16 or fp16.
    """

    # with the parameter's shape and memory layout
    remainder: Tensor | None  # int16; None once there is a full copy
    full: Tensor | None  # fp32
    guard: Tensor | None  # int16: the parameter's bits when it was last written here

    def __init__(self, param: Parameter, dtype: torch.dtype = BF16) -> None:
        self.param = param
        self.dtype = dtype
        self.remainder = self.full = self.guard = None
        self._host_bits: tuple[int, np.ndarray[Any, Any]] | None = None
        grad, param.grad = param.grad, None
        # through .data: the Parameter object, which optimizers and user code may hold, stays the same
        if dtype != BF16:
            self.full = param.detach().to(torch.float32, copy=True)
            param.data = self.full.to(dtype)
        elif param.dtype == torch.float32:
            param.data, self.remainder = split(param)
        else:
            param.data = param.data.clone()  # dense, and nobody else's memory
            self.remainder = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
        param.grad_dtype = None  # 16-bit as autograd makes it, fp32 as unscaling, accumulation, reduction and users may
        param.grad = grad
        self.mark()

    def __getstate__(self) -> dict[str, Any]:
        # in a copy of the module nobody keeps the guard in step, so the copy carries one and stays exact under edits
        guard = self.guard if self.guard is not None or self.full is not None else bits(self.param).clone()
        return {**self.__dict__, "guard": guard, "_host_bits": None}

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept beside the parameter for the whole run: the remainder or the full copy."""
        return [t for t in (self.remainder, self.full) if t is not None]

    def to_device(self) -> bool:
        """Follow the parameter to its device. Returns whether anything moved."""
        device, moved = self.param.device, False
        for name in ("remainder", "full", "guard"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != device:
                setattr(self, name, tensor.to(device))
                moved = True
        return moved

    def value(self) -> Tensor:
        """The master as a new fp32 tensor with the parameter's shape; edits of the parameter are taken in.

        On an accelerator this makes no device-to-host sync.
        """
        self.to_device()
        param = self.param.detach()
        if param.dtype != self.dtype:  # somebody put other data in
            return param.to(torch.float32, copy=True)
        if self.full is not None:
            return torch.where(bits(self.full.to(self.dtype)) != bits(param), param.float(), self.full)
        assert self.remainder is not None
        if self.guard is not None:
            return join(param, self.remainder.masked_fill(self.guard != bits(param), 0))
        remainder = self.remainder.clone()
        mend_remainders_([remainder], [bits(param)], were_edited=self.is_edited_unguarded)
        return join(param, remainder)

    @property
    def is_edited_unguarded(self) -> bool:
        """Whether the parameter is known to have been written to by others since the last :meth:`mark`."""
        return self.param._version != self.version or self.checksum != self._checksum_now()

    def mark(self) -> None:
        """Remember the parameter as it is, as far as that takes no memory."""
        self.version = self.param._version
        self.checksum = self._checksum_now()

    def _checksum_now(self) -> int | None:
        """The parameter's checksum, or None where reading it would be a sync."""
        param = self.param
        if param.device.type != "cpu" or param.dtype != BF16:
            return None
        if not param.is_contiguous():
            return checksum(bits(param).numpy().ravel(order="K"))
        place = param.data_ptr()
        if self._host_bits is None or self._host_bits[0] != place:  # an alias, made once, as that takes the most time
            self._host_bits = (place, bits(param).view(-1).numpy())
        return checksum(self._host_bits[1])

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Set the master, and with it the parameter, to ``value`` (any floating dtype, the parameter's shape)."""
        self.to_device()
        if self.param.dtype != self.dtype:
            self.param.data = torch.empty_like(self.param, dtype=self.dtype)
        if self.full is not None:
            self.full.copy_(value)
            self.param.copy_(self.full)
        else:
            assert self.remainder is not None
            # the parameter's own layout, whatever the source's
            rounded, remainder = split(torch.empty_like(self.param, dtype=torch.float32).copy_(value))
            bits(self.param).copy_(bits(rounded))
            self.remainder.copy_(remainder)
            if self.guard is not None:
                self.guard.copy_(bits(self.param))
        self.mark()

    def make_full(self) -> None:
        """Go over from the remainder to a full fp32 copy; the master keeps its bits."""
        self.full = self.value()
        self.remainder = self.guard = None
        # ties to even from now on: the parameter is compared with what torch makes of the copy
        self.param.detach().copy_(self.full)

    def release(self) -> None:
        """Make the parameter fp32 again, with the master's value; a gradient follows its dtype."""
        value, grad = self.value(), self.param.grad
        self.param.grad = None
        self.param.data = value  # grad_dtype stays free, so that it follows whatever the parameter is cast to
        if grad is not None:
            self.param.grad = grad.to(value.dtype)


class Masters:
    """The masters of a module's parameters, each once.

    Args:
        storage: ``"split"`` or ``"copy"``, see the module's docstring; for fp16 always ``"copy"``.
        dtype: of the parameters, bf16 or fp16.
    """

    def __init__(self, storage: Storage, dtype: torch.dtype = BF16) -> None:
        self.storage: Storage = storage if dtype == BF16 else "copy"
        self.dtype = dtype
        # by id, as hashing a tensor costs a microsecond; a Master keeps its parameter alive
        self._masters: dict[int, Master] = {}
        self._names: dict[int, str] = {}
        self._edits_reported = False
        self._rounded_reported = False
        self._copy_reported = False
        #: Whether to guard parameters between steps.
        self.guarding = True
        #: Changes whenever a remainder, a full copy or a parameter's memory is replaced, for those who hold aliases.
        self.generation = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_masters": list(self), "_names": [self.name(master) for master in self]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ids = [id(master.param) for master in state["_masters"]]
        self.__dict__.update(state)
        self._masters = dict(zip(ids, state["_masters"], strict=True))
        self._names = dict(zip(ids, state["_names"], strict=True))

    def only(self, params: Iterable[Tensor | None]) -> Masters:
        """The masters of ``params``, as an object of its own."""
        some = Masters(self.storage, self.dtype)
        for param in params:
            if param is not None and (master := self.get(param)) is not None:
                some._masters[id(param)] = master
                some._names[id(param)] = self.name(master)
        return some

    def __len__(self) -> int:
        return len(self._masters)

    def __iter__(self) -> Iterator[Master]:
        return iter(self._masters.values())

    def get(self, param: Tensor) -> Master | None:
        """The master of ``param``, or None where the parameter is its own master."""
        return self._masters.get(id(param))

    def adopt(self, param: Parameter, name: str) -> Master:
        """Take the master of ``param`` from its present value and cast the parameter to 16 bits in place."""
        master = self._masters.get(id(param))
        if master is None:
            master = self._masters[id(param)] = Master(param, self.dtype)
            self._names[id(param)] = name
            self.generation += 1
        return master

    def name(self, master: Master) -> str:
        """The name under which the master's parameter was adopted."""
        return self._names[id(master.param)]

    @property
    def full_copies(self) -> list[str]:
        """Names of the parameters whose master is a full copy by now."""
        return [self.name(master) for master in self if master.full is not None]

    def named(self, names: Iterable[str]) -> list[Master]:
        """The masters of those parameters whose name is among ``names``."""
        wanted = set(names)
        return [master for master in self if self.name(master) in wanted]

    def make_full(self, masters: Iterable[Master]) -> None:
        """Go over to full copies, for those that have none yet."""
        for master in masters:
            if master.full is None:
                master.make_full()
                self.generation += 1

    def to_device(self) -> None:
        """Follow the parameters to their device."""
        for master in self:
            if master.to_device():
                self.generation += 1

    def take_foreign_data(self) -> None:
        """Take the values in where somebody gave a parameter data of another dtype, and cast it to 16 bits again."""
        for master in self:
            if master.param.dtype != self.dtype:
                master.set_(master.value())
                self.generation += 1

    @torch.no_grad()
    def broadcast(self, params: Iterable[Tensor]) -> None:
        """Give every rank the masters of rank 0, for those of ``params`` that have one, and are equal already."""
        for master in filter(None, map(self.get, params)):
            master.guard = None
            # not every backend sends int16; as bf16 the bits travel as they are
            dist.broadcast(cast(Tensor, master.full) if master.remainder is None else master.remainder.view(BF16), src=0)
        self.end_step()

    @torch.no_grad()
    def end_step(self, guard: bool = False) -> None:
        """Remember the parameters, to find out later whether they were edited: if guarding, or asked to, by their bits."""
        for master in self:
            if master.full is not None:
                continue  # can be compared with its parameter at any time
            if self.guarding or guard:
                master.guard = bits(master.param).clone()
            else:
                master.mark()

    @torch.no_grad()
    def raise_guards(self) -> None:
        """Remember the bits of every split parameter that was not edited since it was remembered last."""
        for master in self:
            if master.full is None and master.guard is None and not master.is_edited_unguarded:
                master.guard = bits(master.param).clone()

    @torch.no_grad()
    def drop_guards(self) -> None:
        """Take guarded edits into the masters, and free the guards. No device-to-host sync."""
        self.take_foreign_data()
        guarded = [master for master in self if master.guard is not None]
        edited = [master for master in guarded if not known_equal(cast(Tensor, master.guard), bits(master.param))]
        if edited:
            clear_edited_(
                [cast(Tensor, master.remainder) for master in edited],
                [cast(Tensor, master.guard) for master in edited],
                [bits(master.param) for master in edited],
            )
        for master in guarded:
            master.guard = None
            master.mark()

    @torch.no_grad()
    def settle(self) -> None:
        """Take every edit of the parameters into the masters; to be called before a step. No device-to-host sync."""
        self.drop_guards()
        copies = [master for master in self if master.full is not None]
        take_edits_([cast(Tensor, master.full) for master in copies], [master.param.detach() for master in copies])
        unguarded = [master for master in self if master.full is None]
        edited = [master for master in unguarded if master.is_edited_unguarded]
        for masters, were_edited in ((edited, True), ([m for m in unguarded if m.param.device.type != "cpu"], False)):
            if masters:  # where there is no checksum, edits may go unnoticed, but they are not to make NaNs
                mend_remainders_([cast(Tensor, m.remainder) for m in masters], [bits(m.param) for m in masters], were_edited)
        for master in edited:
            master.mark()
        if edited and not self._edits_reported:
            self._edits_reported = True
            log.warning(
                "Parameters were edited where no edit is expected, such as between the start of forward and the end of the "
                "optimizer step: %s%s. With split masters such an edit is kept to bf16 precision (within half a bf16 ulp). For "
                "an exact one, edit in a hook between steps, such as on_train_batch_end, or use master='copy'.",
                ", ".join(self.name(master) for master in edited[:5]),
                ", ..." if len(edited) > 5 else "",
            )

    def report_copy(self) -> None:
        """Say once what a copy of the module is that is made now."""
        if not self._copy_reported:
            self._copy_reported = True
            log.warning(
                "A module was copied or pickled during a run. The copy has 16-bit parameters; its state_dict has their masters,"
                " but what is averaged into it is rounded to 16 bits. Copy it, and average, within"
                " trainer.precision_plugin.fp32_parameters() to have an fp32 module."
            )

    def report_rounded(self, name: str, dtype: torch.dtype) -> None:
        """Say once that masters were set from 16-bit values."""
        if not self._rounded_reported:
            self._rounded_reported = True
            log.warning(
                "Masters were loaded from 16-bit values, the first from %s (%s). Load fp32 values to have all bits.",
                name,
                dtype,
            )

    def release(self) -> None:
        """Give the module its fp32 parameters back, with the masters' values, and forget them."""
        for master in self:
            master.release()
        self._masters.clear()
        self._names.clear()
        self.generation += 1


def known_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two int16 tensors are known to be equal without a device-to-host sync: never, on an accelerator.

    On a CPU, where the comparison transfers nothing, it spares the work that only an edit makes necessary. It is numpy's,
    which is eight times as fast as ``torch.equal`` here.
    """
    return left.device.type == "cpu" and bool((left.numpy() == right.numpy()).all())


def take_edits_(masters: list[Tensor], params: list[Tensor]) -> None:
    """Set each element of the fp32 masters that does not round to its 16-bit parameter to the parameter's value."""
    together: tuple[list[Tensor], list[Tensor]] = ([], [])
    for master, param in zip(masters, params, strict=True):
        if master.numel() < CHUNK and master.device.type == "cpu":
            together[0].append(master)
            together[1].append(param)
        elif master.is_contiguous() and param.is_contiguous():
            for part, part_param in zip(master.view(-1).split(CHUNK), param.view(-1).split(CHUNK), strict=True):
                _take_edit_(part, part_param)
        else:
            _take_edit_(master, param)
    # small ones are compared many at a time, as each comparison has a fixed cost
    start, size = 0, 0
    for stop, master in enumerate(together[0], 1):
        size += master.numel()
        if size >= CHUNK or stop == len(together[0]):
            batch, batch_params = together[0][start:stop], together[1][start:stop]
            dtype = batch_params[0].dtype
            if not known_equal(_gather_bits(batch, size, dtype), _gather_bits(batch_params, size, dtype)):
                for master, param in zip(batch, batch_params, strict=True):
                    _take_edit_(master, param)
            start, size = stop, 0


def _gather_bits(tensors: list[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    gathered = torch.empty(size, dtype=dtype)
    parts = gathered.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_([part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)], tensors)
    return gathered.view(torch.int16)


def _take_edit_(master: Tensor, param: Tensor) -> None:
    rounded = bits(master.to(param.dtype))  # in bits, NaN equals NaN
    if not known_equal(rounded, bits(param)):
        master.copy_(torch.where(rounded != bits(param), param.float(), master))


def clear_edited_(remainders: list[Tensor], guards: list[Tensor], present: list[Tensor]) -> None:
    """Zero the remainder of every element whose bits are not the guarded ones; ``guards`` is overwritten.

    Args:
        remainders: int16 tensors.
        guards: the bits that each parameter had, int16.
        present: the bits that it has, int16.
    """
    # int16 arithmetic over whole lists, as no mask leaves the device: changed = sign(guard - bits)^2. A difference wraps, but
    # is 0 only for equal bits.
    torch._foreach_sub_(guards, present)
    torch._foreach_sign_(guards)
    torch._foreach_mul_(guards, guards)
    torch._foreach_mul_(guards, remainders)
    torch._foreach_sub_(remainders, guards)


def mend_remainders_(remainders: list[Tensor], present: list[Tensor], were_edited: bool) -> None:
    """Mend remainders that cannot belong to their bf16 value, for parameters that may have been edited with no guard up.

    A remainder left beside an edited value moves it by less than half a bf16 ulp, except at the ends: a negative one at zero
    and a positive one at infinity would carry into a NaN. No fp32 number splits into such a pair, so nothing that is right is
    lost. In parameters that are known to be edited, all remainders at zero and infinity go, as those at zero would undo
    pruning; what that takes from an element that was not edited is below 2^-133 or beyond 3.38e38.

    Args:
        remainders: int16 tensors.
        present: the parameters' present bits, int16.
        were_edited: whether the parameters are known to be edited.
    """
    # int16 arithmetic over whole lists; differences wrap, but are 0 only for equal bits
    finite = torch._foreach_sub(present, 0x7F80)  # inf
    negative_finite = torch._foreach_add(present, 0x0080)  # -inf is 0xFF80 = -0x0080
    torch._foreach_sign_(finite)
    torch._foreach_sign_(negative_finite)
    torch._foreach_mul_(finite, negative_finite)
    torch._foreach_mul_(finite, finite)  # 0 at both infinities, else 1
    nonzero = torch._foreach_abs(present)  # -0.0 is -32768, whose magnitude wraps to itself
    torch._foreach_clamp_max_(nonzero, 1)  # 0 at 0.0, below 0 at -0.0, else 1
    if were_edited:
        torch._foreach_clamp_min_(nonzero, 0)
        torch._foreach_mul_(remainders, nonzero)
        torch._foreach_mul_(remainders, finite)
    else:
        torch._foreach_mul_(nonzero, -32768)  # the least remainder that may be; wraps to 0 at -0.0
        torch._foreach_maximum_(remainders, nonzero)
        torch._foreach_mul_(finite, 32767)  # the greatest
        torch._foreach_minimum_(remainders, finite)


def checksum(elements: np.ndarray[Any, Any]) -> int:
    """A checksum of int16 elements (1-d, contiguous) and their places.

    They are added up eight bytes at a time in 64 stretches, which is as fast as they can be read. Elements that change places
    within a stretch go unnoticed.
    """
    whole = elements.size // 256 * 256
    if not whole:
        return hash(elements.tobytes())
    sums = elements[:whole].view(np.int64).reshape(64, -1).sum(axis=1)
    return hash((sums.tobytes(), elements[whole:].tobytes()))
