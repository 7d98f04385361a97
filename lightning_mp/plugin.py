"""The precision plugin: exact fp32 master weights under 16-bit parameters, and loss scaling for fp16.

Read from top to bottom, :class:`MasterWeightPrecision` is a table of contents of a run: convert the module, connect the
optimizers, forward, backward, clip, step, save, restore, tear down. The work is done in

* :mod:`lightning_mp.masters`: where masters are kept, and edits of parameters;
* :mod:`lightning_mp.swap`: any torch optimizer, stepped on masters;
* :mod:`lightning_mp.scaling`: the loss scale around backward, and skipped steps;
* :mod:`lightning_mp.gradients`: fp32 accumulation, reduction and unscaling;
* :mod:`lightning_mp.module`: which parameters are cast, and ``state_dict`` in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.averaging import AverageInFp32
from lightning_mp.cost.devices import bf16_support, check_bf16, check_fp16
from lightning_mp.edits import may_edit_between_steps, may_edit_gradients, may_use_old_gradients
from lightning_mp.gradients import Fp32Reducer, accumulate_in_fp32, clip_by_norm_
from lightning_mp.masters import BF16, FP16, SHORT_NAMES, Masters, Storage
from lightning_mp.module import (
    NORM,
    attach_state_dict_hooks,
    check_module,
    fp32_parameters,
    parameters_to_cast,
)
from lightning_mp.numerics.loss_scale import AdaptiveLossScale, LossScale, NoLossScale, make_loss_scale
from lightning_mp.scaling import LossScaling
from lightning_mp.schedulers import StepwiseSchedulers
from lightning_mp.strategies import check_strategy, root_device
from lightning_mp.swap import BucketedStep, CoupledStep, is_coupled, prepare, requires_closure, state_to_fp32_

log = logging.getLogger(__name__)

PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-master", "16-master", "auto"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionName)
COMPUTE_DTYPE = {"bf16-mixed": BF16, "16-mixed": FP16, "bf16-master": BF16, "16-master": FP16}
#: Under this key a checkpoint says how it was made. It does not depend on the name of the plugin's class.
CHECKPOINT_KEY = "lightning_mp"
MIB = 2**20


class MasterWeightPrecision(Precision):
    """Train with 16-bit parameters and exact fp32 master weights, or under autocast, with loss scaling for fp16.

    ===============  =====================================================================  ============================
    precision        parameters and arithmetic                                               bytes per parameter (AdamW)
    ===============  =====================================================================  ============================
    ``32-true``      fp32                                                                    16
    ``bf16-mixed``   fp32 parameters, bf16 matrix products under autocast                    16
    ``16-mixed``     fp32 parameters, fp16 matrix products under autocast, loss scaling      16
    ``bf16-master``  bf16 parameters, fp32 masters, bf16 matrix products under autocast      14 (split), 16 (copy)
    ``16-master``    fp16 parameters, fp32 masters, fp16 matrix products, loss scaling       16
    ``auto``         ``bf16-master`` where the device computes bf16, else ``16-master`` on
                     CUDA, else ``32-true``
    ===============  =====================================================================  ============================

    The bytes are those of weights, masters, gradients and AdamW's two moments, which is what is kept through forward and
    backward; a parameter that stays fp32 takes 16. Under ``*-master`` the optimizer holds the module's parameters as ever; fp32
    masters stand in for them only while it steps. Every checkpoint holds the masters under the usual names. When the trainer is
    done, the module gets fp32 parameters back, with the masters' values.

    Under fp16 the loss is multiplied by a scale before backward, so that small gradients are not lost. Afterwards they are
    unscaled into fp32. A step whose gradients overflowed is skipped, and changes nothing: no weight, no optimizer state, and no
    step-wise learning rate schedule.

    Args:
        precision: one of the above.
        master: ``"split"`` keeps the 16 bits that a bf16 parameter lacks of its fp32 master; ``"copy"`` keeps a full fp32
            copy, which costs 2 bytes per parameter more and makes the optimizer step somewhat faster. fp16 parameters have a
            full copy in any case; those that are not trained (frozen, or in an evaluation) stay as they are until they have a
            gradient.
        fp32_modules: which modules keep fp32 parameters: module classes, or patterns (``fnmatch``) for the qualified names of
            modules or parameters, or for the names of module classes. ``"norm"`` stands for the normalisation layers and for
            weights that are computed by parametrizations. The list replaces the default; ``()`` casts everything.
        autocast: run forward under ``torch.autocast``, so that delicate operations are computed in fp32 and inputs of any
            floating dtype but float64 meet bf16 weights. With ``False``, and in layers that autocast does not know (on a CPU
            ``nn.Bilinear``), inputs must have the dtype of the weights that they meet.
        bucket_mib: scratch memory of an optimizer step in MiB. Parameters are stepped in buckets of this size, or by
            themselves where one is larger and its optimizer cannot be given a slice of it. 0 makes buckets as small as can be.
        reduce_dtype: under DDP, average gradients over ranks in ``"fp32"``, or in ``"parameter"`` dtype, which halves the
            traffic and the gradients' memory, and rounds averages, and sums over micro-batches, to bf16. fp16 needs ``"fp32"``.
        loss_scale: what the loss is multiplied by before backward: one of :class:`~lightning_mp.AdaptiveLossScale`,
            :class:`~lightning_mp.DynamicLossScale`, :class:`~lightning_mp.StaticLossScale`, :class:`~lightning_mp.NoLossScale`;
            a number, for a static scale; or ``"adaptive"``, ``"dynamic"``, ``"none"``. ``None`` is adaptive for fp16, and no
            scale otherwise.
        skip_nonfinite: skip optimizer steps whose gradients or loss are infinite or NaN. With fp16, or a loss scale, that is so
            in any case.
        max_consecutive_skips: stop with an error when so many steps of an optimizer in a row were skipped.

    Raises:
        ValueError: an argument is not one of the legal values.
        MisconfigurationException: when training starts: the strategy, the device or an optimizer cannot be used with the
            precision, or the module has uninitialised lazy parameters.
        FloatingPointError: while training: too many steps in a row were skipped, or gradients overflow though the scale is at
            its minimum. Weights and checkpoints are as after the last applied step.

    Attributes:
        loss_scale: the scaler in its present state; ``loss_scale.scale`` is the scale of the next backward. It may be set.
        gradient_scale: the scale with which the present gradients were made.
        applied_steps: optimizer steps that changed weights. ``trainer.global_step`` stays Lightning's, which counts all.
        skipped_steps: optimizer steps that were skipped.
        nonfinite_losses: those of them that were skipped because the loss was not finite. They do not lower the scale.
        last_step_skipped: whether the last optimizer step was skipped. In manual optimization, step a scheduler only if not.
        last_overflow: the parameter where the last overflow began: the first in the order of backward; or None.
        headroom_bits: log2(65504 / largest scaled gradient), in the last step; None if it is not known.

    Example:
        >>> from lightning_mp import MasterWeightPrecision, Trainer
        >>> plugin = MasterWeightPrecision("bf16-master", fp32_modules=("norm", "lm_head"))
        >>> trainer = Trainer(precision_plugin=plugin, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.precision_plugin is plugin
        True

    Note:
        In ``on_after_backward``, ``on_before_optimizer_step``, gradient clipping, and in manual optimization after
        ``manual_backward``, ``parameter.grad`` is the true gradient. With a loss scale it is fp32; without, it is bf16 after
        one backward, and fp32 once several were accumulated or averaged over ranks. Only hooks that run *during* backward
        (``Tensor.register_hook``) see scaled gradients. ``on_before_optimizer_step`` and clipping are not called for a step
        that is skipped.

        A step makes no device-to-host sync without a check of gradients, and one with it (fp16, a loss scale, or
        ``skip_nonfinite``); some more when it is skipped.
    """

    def __init__(
        self,
        precision: PrecisionName = "auto",
        *,
        master: Storage = "split",
        fp32_modules: Sequence[str | type[Module]] = (NORM,),
        autocast: bool = True,
        bucket_mib: float = 4.0,
        reduce_dtype: Literal["fp32", "parameter"] = "fp32",
        loss_scale: LossScale | float | str | None = None,
        skip_nonfinite: bool = False,
        max_consecutive_skips: int = 50,
    ) -> None:
        _check_choice("precision", precision, PRECISIONS)
        _check_choice("master", master, get_args(Storage))
        _check_choice("reduce_dtype", reduce_dtype, ("fp32", "parameter"))
        if not isinstance(fp32_modules, Sequence) or isinstance(fp32_modules, str):
            hint = "" if fp32_modules is None else f", such as [{fp32_modules!r}]"
            raise ValueError(f"fp32_modules={fp32_modules!r} must be a list{hint}; [] casts all, [{NORM!r}] is the default.")
        for entry in fp32_modules:
            if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, Module)):
                raise ValueError(f"fp32_modules has {entry!r}; legal are module classes, name patterns and {NORM!r}.")
        for name, value in (("autocast", autocast), ("skip_nonfinite", skip_nonfinite)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be True or False.")
        if isinstance(bucket_mib, bool) or not isinstance(bucket_mib, (int, float)) or not bucket_mib >= 0:
            raise ValueError(f"bucket_mib={bucket_mib!r} must be a number of MiB, 0 or more.")
        if isinstance(max_consecutive_skips, bool) or not isinstance(max_consecutive_skips, int) or max_consecutive_skips < 1:
            raise ValueError(f"max_consecutive_skips={max_consecutive_skips!r} must be a whole number, 1 or more.")
        if precision == "16-master" and reduce_dtype == "parameter":
            raise ValueError(
                "reduce_dtype='parameter' does not work with precision '16-master': sums of scaled gradients would overflow in"
                " fp16. Use reduce_dtype='fp32', or 'bf16-master'."
            )
        self.precision = precision  # type: ignore[assignment]  # Lightning's literal does not know ours
        self.master: Storage = master
        self.fp32_modules = tuple(fp32_modules)
        self.autocast = autocast
        self.bucket_mib = bucket_mib
        self.reduce_dtype = reduce_dtype
        self.skip_nonfinite = skip_nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self._requested = precision
        self._initial_loss_scale = None if loss_scale is None else _make_loss_scale(loss_scale)
        self._scaling = self._new_scaling()  # not part of a run: scale and counts can be read and saved when it is over
        self._reset()

    def _new_scaling(self) -> LossScaling:
        is_fp16 = COMPUTE_DTYPE.get(str(self.precision)) == FP16
        scale = self._initial_loss_scale
        if scale is None:
            scale = AdaptiveLossScale() if is_fp16 else NoLossScale()
        checks = is_fp16 or self.skip_nonfinite or not isinstance(scale, NoLossScale)
        return LossScaling(scale, checks, is_fp16, self.max_consecutive_skips)

    def _reset(self) -> None:
        """Everything that belongs to one run of the trainer."""
        self._module: Module | None = None
        self._masters = Masters(self.master)
        self._without_master: set[int] = set()  # parameters that are to have none, by id
        self._device_type = "cpu"
        self._steppers: dict[int, BucketedStep | CoupledStep] = {}
        self._frozen: dict[int, Any] = {}  # parameters that become fp16, and get a master, with their first gradient; by id
        self._handles: list[RemovableHandle | AverageInFp32 | StepwiseSchedulers] = []
        self._alone: list[Any] = []  # 16-bit parameters whose gradients DistributedDataParallel does not reduce
        self._window_is_open = False  # gradients of a backward wait for their step
        self._is_stepping = False
        self._clears_gradients = False  # before forward
        self._reducer: Fp32Reducer | None = None
        self._backends_before: list[tuple[Any, str, Any]] = []
        self._last_full_copies: list[str] = []  # of the run before, which may be saved yet

    def __getstate__(self) -> dict[str, Any]:
        # a copy is the recipe, without the tensors and hooks of a run
        return {
            "precision": self._requested,
            "master": self.master,
            "fp32_modules": self.fp32_modules,
            "autocast": self.autocast,
            "bucket_mib": self.bucket_mib,
            "reduce_dtype": self.reduce_dtype,
            "loss_scale": self._initial_loss_scale,
            "skip_nonfinite": self.skip_nonfinite,
            "max_consecutive_skips": self.max_consecutive_skips,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.__init__(state.pop("precision"), **state)  # type: ignore[misc]

    def __repr__(self) -> str:
        settings = {**self.__getstate__(), "fp32_modules": [getattr(e, "__qualname__", e) for e in self.fp32_modules]}
        precision = settings.pop("precision")
        return f"{type(self).__name__}({precision!r}, {', '.join(f'{k}={v!r}' for k, v in settings.items())})"

    def settings(self) -> dict[str, Any]:
        """The settings in strings, numbers and plain containers, for a run's config; ``auto`` as it was resolved."""
        modules = [entry if isinstance(entry, str) else entry.__qualname__ for entry in self.fp32_modules]
        scale = self._initial_loss_scale or self._scaling.scale
        return {
            **self.__getstate__(),
            "precision": str(self.precision),
            "fp32_modules": modules,
            "loss_scale": _scaler_settings(scale),
        }

    # --- before training -----------------------------------------------------------------------------------------------

    def convert_module(self, module: Module) -> Module:
        """Take the masters of the module's fp32 parameters, and cast the parameters to 16 bits, in place.

        Args:
            module: its weights are those of a fresh initialisation or of a checkpoint, in fp32.

        Returns:
            ``module``.
        """
        self._restore_module()  # a run that was broken off without teardown
        self._last_full_copies = []
        device = root_device(module)
        self._device_type = device.type
        self._resolve_precision(device)
        self._module = module
        if self._trainer is None or self._is_fitting or not self._scaling.was_used:
            self._scaling = self._new_scaling()
        dtype = COMPUTE_DTYPE.get(str(self.precision))
        if dtype is None:
            return module
        (check_fp16 if dtype == FP16 else check_bf16)(str(self.precision), device)
        self._accumulate_products_in_fp32()
        if self.has_masters:
            check_strategy(module)
            check_module(module)
            self._take_masters(module, dtype)
        return module

    def _resolve_precision(self, device: torch.device) -> None:
        precision = self._requested
        if precision == "auto":
            computes, reason = bf16_support(device)
            precision = "bf16-master" if computes else "16-master" if device.type == "cuda" else "32-true"
        self.precision = precision  # type: ignore[assignment]
        if self._requested == "auto":
            rank_zero_info(f"precision 'auto' is {self.precision!r} here: {reason}.")

    def _take_masters(self, module: Module, dtype: torch.dtype) -> None:
        self._masters = Masters(self.master, dtype)
        for name, param in parameters_to_cast(module, self.fp32_modules, dtype):
            # without a remainder, an fp32 copy beside a parameter that nothing updates would only cost memory
            is_updated = param.requires_grad and (self._trainer is None or self._is_fitting)
            if dtype == FP16 and not is_updated and self.autocast:
                self._frozen[id(param)] = param
            else:
                self._masters.adopt(param, name)
        if self._frozen:
            log.info("%d parameters that are not trained keep their dtype until they have a gradient.", len(self._frozen))
        self._without_master = {id(param) for param in module.parameters() if self._masters.get(param) is None}
        self._handles += attach_state_dict_hooks(module, self._masters)
        self._report_infinite()
        if self._is_fitting:
            self._handles.append(AverageInFp32(self._trainer.callbacks, self.fp32_parameters))
            self._masters.guarding = may_edit_between_steps(module, self._trainer)
            self._masters.end_step()  # edits before the first step, in on_fit_start say, are edits between steps

    @property
    def _trainer(self) -> Any:
        return getattr(self._module, "_trainer", None)

    @property
    def _is_fitting(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Make the optimizers ready for fp32 masters; called once the module is on its device."""
        if len(self._masters):
            self._masters.to_device()
            self._alone = [master.param for master in self._masters]
            if isinstance(self._trainer and self._trainer.strategy, DDPStrategy):
                self._connect_ddp(model)
            for optimizer in optimizers:
                self._stepper(optimizer)
            # a scheduler of the user's runs between steps, too
            self._masters.guarding |= any(
                not type(config.scheduler).__module__.startswith("torch.") for config in lr_schedulers
            )
        self._connect_scaling(optimizers, lr_schedulers)
        return model, optimizers, lr_schedulers

    def _connect_scaling(self, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> None:
        module = self._module
        if module is None or not self._is_fitting:
            return
        if self.has_masters or self._scaling.checks:
            self._handles += [
                optimizer.register_step_pre_hook(self._refuse_direct_step)
                for optimizer in optimizers
                if hasattr(optimizer, "_optimizer_step_pre_hooks")  # a wrapper may not have run Optimizer.__init__
            ]
        plain = all(type(optimizer).zero_grad is Optimizer.zero_grad for optimizer in optimizers)
        self._clears_gradients = self.has_masters and plain and not may_use_old_gradients(module, self._trainer)
        self._scaling.connect(module, optimizers, may_edit_gradients(module, self._trainer))
        stepwise = [config.scheduler for config in lr_schedulers if config.interval == "step"]
        if self._scaling.checks and stepwise and isinstance(module, pl.LightningModule):
            self._handles.append(StepwiseSchedulers(module, stepwise, lambda: self._scaling.last_step_skipped))

    def _connect_ddp(self, model: Module) -> None:
        module = cast(Module, self._module)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        shared = [param for name, param in module.named_parameters() if name not in ignored]
        self._masters.broadcast(shared)  # as was done with the parameters by now
        if not isinstance(model, DistributedDataParallel):
            return
        shared_ids = set(map(id, shared))
        self._alone = [param for param in self._alone if id(param) not in shared_ids]
        if self.reduce_dtype != "fp32":
            return
        strategy = self._trainer.strategy
        if getattr(strategy, "_ddp_comm_hook", None) is not None and strategy.root_device.type == "cuda":
            if self._masters.dtype == FP16:
                raise MisconfigurationException(
                    "precision '16-master' averages gradients in fp32 by a communication hook of its own. Leave ddp_comm_hook"
                    " out of the strategy, or use '16-mixed'."
                )
            rank_zero_warn(
                "The strategy has a ddp_comm_hook, so gradients are averaged as that hook does, and accumulated in bf16. Leave"
                " the hook out for fp32, or set reduce_dtype='parameter' to hide this warning."
            )
            return
        self._reducer = Fp32Reducer(model, [master.param for master in self._masters if id(master.param) in shared_ids])

    def _stepper(self, optimizer: Optimizer) -> BucketedStep | CoupledStep:
        """The object that steps this optimizer on masters; made when the optimizer is seen first."""
        stepper = self._steppers.get(id(optimizer))
        if stepper is None:
            check_optimizer(optimizer)
            self._handles += prepare(optimizer, self._masters)
            if is_coupled(optimizer):
                name = type(optimizer).__qualname__
                log.info(
                    "%s is not known to update each parameter by itself, so it is given all fp32 masters at once: 8 bytes per"
                    " parameter of temporary memory in each step.",
                    name,
                )
                stepper = CoupledStep(optimizer, self._masters)
            else:
                stepper = BucketedStep(optimizer, self._masters, self.bucket_mib * MIB)
            self._steppers[id(optimizer)] = stepper
        return stepper

    def _adopt_late_parameters(self, optimizer: Optimizer) -> None:
        """Give masters to 16-bit parameters that came to the optimizer later, and to those that were frozen before."""
        late = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if self._masters.get(param) is None
            and (
                (param.dtype == self._masters.dtype and id(param) not in self._without_master)
                or (id(param) in self._frozen and param.grad is not None)
            )
        ]
        if late:
            names = {id(param): name for name, param in cast(Module, self._module).named_parameters()}
            for param in late:
                self._frozen.pop(id(param), None)
                self._masters.adopt(param, names.get(id(param), f"a parameter of {type(optimizer).__qualname__}"))
            state_to_fp32_(optimizer, self._masters)
            log.info("%d parameters that were added or unfrozen later have fp32 masters from now on.", len(late))

    def _accumulate_products_in_fp32(self) -> None:
        """Switch torch's reduced-precision reductions off until teardown."""
        matmul = torch.backends.cuda.matmul
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            self._backends_before.append((matmul, name, getattr(matmul, name)))
            setattr(matmul, name, False)

    def _report_infinite(self) -> None:
        infinite = [
            self._masters.name(master)
            for master in self._masters
            if bool((master.param.isinf() & master.value().isfinite()).any())
        ]
        if infinite:
            dtype = self._masters.dtype
            name = SHORT_NAMES[dtype]
            rank_zero_warn(
                f"Values beyond {name}'s largest finite number ({torch.finfo(dtype).max:.3g}) are infinite in the {name}"
                f" parameters of {', '.join(infinite[:5])}. Their masters are finite. Keep these modules in fp32 with"
                " fp32_modules."
            )

    # --- forward and backward ------------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast to bf16 or fp16, unless the precision is ``32-true``, or ``autocast`` is off and parameters are 16-bit."""
        dtype = COMPUTE_DTYPE.get(str(self.precision))
        if dtype is not None and (self.autocast or not self.has_masters):
            with torch.autocast(self._device_type, dtype=dtype, cache_enabled=False):
                yield
        else:
            yield

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The context of ``training_step``. Edits since the last step become part of the masters as it is entered.

        In automatic optimization Lightning clears the gradients of the last step after the next forward. They would take memory
        while activations fill it, so they are cleared here, unless somebody may want them until then.
        """
        self._masters.drop_guards()
        if self._clears_gradients and not self._window_is_open:
            for optimizer in self._trainer.optimizers:
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.grad = None
        with self.forward_context():
            yield

    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """The context of ``validation_step``. Edits in it are edits between steps."""
        if self._is_fitting:
            self._masters.raise_guards()
        with self.forward_context():
            yield

    def backward(  # type: ignore[override]  # as in Lightning's own plugins
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        """Scale the loss, run backward, with gradients that are there already accumulated in fp32, and unscale."""
        self._window_is_open = True
        self._masters.drop_guards()  # in manual optimization there may have been a step since forward began
        accumulate_in_fp32(self._alone)
        scaled = self._scaling.before_backward(tensor)
        if self._reducer is not None:
            self._reducer.before_backward()
        super().backward(scaled, model, optimizer, *args, **kwargs)
        if self._reducer is not None or self._scaling.checks:
            self._reduce_static_graph(model)
        if self._reducer is not None:
            self._reducer.after_backward()
        self._scaling.after_backward()

    def _reduce_static_graph(self, model: pl.LightningModule) -> None:
        """Reduce the first gradients of a static graph now.

        In manual optimization Lightning does this in the strategy, once the plugin's backward is over: too late for fp32
        averages to be in place when user code reads or clips gradients.
        """
        strategy = self._trainer.strategy
        if model.automatic_optimization or not getattr(strategy.model, "static_graph", False):
            return
        if strategy._pl_static_graph_delay_done:
            return
        strategy.model.reducer._delay_all_reduce()
        strategy._pl_static_graph_delay_done = True

    # --- the optimizer step --------------------------------------------------------------------------------------------

    def optimizer_step(  # type: ignore[override]  # as in Lightning's own plugins
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, the hooks and gradient clipping, then step the optimizer, on fp32 masters if there are any.

        With a loss scale or ``skip_nonfinite``, the step ends after the closure if gradients are not finite.
        """
        unwrapped = cast(Optimizer, optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        self._is_stepping = True
        try:
            if self._scaling.checks:
                result = self._checked_step(unwrapped, model, closure, kwargs)
            else:
                result = self._step(unwrapped, model, closure, kwargs)
                self._scaling.count_applied(unwrapped)
        finally:
            self._is_stepping = False
        self._window_is_open = False
        return result

    def _refuse_direct_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            raise MisconfigurationException(
                f"{type(optimizer).__qualname__}.step() was called on the bare torch optimizer, past the precision plugin."
                f" Under {self.precision!r} the plugin has to put masters in and to check gradients. In manual optimization,"
                " step what self.optimizers() returns."
            )

    def _step(self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        if not len(self._masters):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self._adopt_late_parameters(optimizer)
        stepper = self._stepper(optimizer)
        if isinstance(stepper, CoupledStep):
            if closure is do_nothing_closure and requires_closure(optimizer):
                raise MisconfigurationException(
                    f"{type(optimizer).__qualname__} evaluates the model inside step() and was given no closure. Pass one that"
                    " computes the loss, calls manual_backward and returns the loss: optimizer.step(closure=...)."
                )
            return stepper.run(lambda: self._wrap_closure(model, optimizer, closure), **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        stepper.run(**kwargs)
        return result

    def _checked_step(
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], kwargs: dict[str, Any]
    ) -> Any:
        result = closure()
        if not self._scaling.may_step(optimizer):
            self._masters.settle()  # between steps from now on
            self._masters.end_step()
            return result
        self._after_closure(model, optimizer)
        if self.has_masters:
            self._adopt_late_parameters(optimizer)
            self._stepper(optimizer).run(**kwargs)
        else:
            optimizer.step(**kwargs)
        self._scaling.count_applied(optimizer)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the joint 2-norm of the unscaled gradients, in fp32. Clipped bf16 gradients are rounded to bf16 once."""
        if not len(self._masters):
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            clip_by_norm_(cast(Iterable[Any], self.main_params(optimizer)), clip_val)

    # --- masters -------------------------------------------------------------------------------------------------------

    @property
    def has_masters(self) -> bool:
        """Whether the precision is one with 16-bit parameters and fp32 masters. ``auto`` is not, until a run resolves it."""
        return str(self.precision) in ("bf16-master", "16-master")

    def masters(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The fp32 masters by parameter name, while the trainer runs.

        Args:
            names: of the parameters that are wanted; None for all.

        Returns:
            A new dict of new fp32 tensors, one for each of the module's ``named_parameters()`` that is floating; a parameter
            that is fp32 itself is its own master. Edits of parameters are in them. It takes 4 bytes per parameter.

        Raises:
            KeyError: a name is not that of a floating parameter.
            RuntimeError: no run is active. Outside one, the module's own parameters are the masters.
        """
        named = {name: (param, master) for name, param, master in self._named_masters(remove_duplicate=names is None)}
        wanted = list(named) if names is None else list(names)
        for name in wanted:
            if name not in named:
                raise KeyError(f"There is no master {name!r}; the first of {len(named)} names are {list(named)[:5]}.")
        return {
            name: param.detach().clone() if master is None else master.value()
            for name, (param, master) in ((name, named[name]) for name in wanted)
        }

    def set_masters(self, values: Mapping[str, Tensor]) -> None:
        """Set masters, and the parameters with them.

        Args:
            values: by parameter name, tensors of the parameter's shape and any floating dtype. Parameters that are not named
                stay as they are.

        Raises:
            KeyError: a name is not one of :meth:`masters`; nothing is changed.
            ValueError: a shape differs; nothing is changed.
            RuntimeError: no run is active.
        """
        named = {name: (param, master) for name, param, master in self._named_masters(remove_duplicate=False)}
        for name, value in values.items():
            if name not in named:
                raise KeyError(f"There is no master {name!r}; the first of {len(named)} names are {list(named)[:5]}.")
            if value.shape != named[name][0].shape:
                raise ValueError(f"{name!r} has shape {tuple(named[name][0].shape)}, got {tuple(value.shape)}.")
        with torch.no_grad():
            for name, value in values.items():
                param, master = named[name]
                if master is None:
                    param.copy_(value)
                else:
                    master.set_(value)

    @contextmanager
    def fp32_parameters(self) -> Generator[None, None, None]:
        """A context in which the module's parameters are fp32, with the masters' values.

        For export or for an evaluation in full precision. It takes 4 bytes per parameter. What is written to the parameters
        inside becomes the masters. Outside a run it does nothing, as the parameters are fp32 then.

        Example:
            >>> from lightning_mp import MasterWeightPrecision
            >>> plugin = MasterWeightPrecision("bf16-master")
            >>> with plugin.fp32_parameters():
            ...     pass  # in a callback: torch.onnx.export(pl_module, ...)
        """
        if self._module is None:
            yield
        else:
            with fp32_parameters(self._module, self._masters):
                yield

    def master_tensors(self) -> list[Tensor]:
        """What is kept beside the parameters: the remainders and the full copies. Empty without 16-bit parameters."""
        return [tensor for master in self._masters for tensor in master.tensors]

    def _named_masters(self, remove_duplicate: bool = True) -> list[tuple[str, Any, Any]]:
        if self._module is None:
            raise RuntimeError(
                "There are no masters now: they exist while a Trainer with this plugin runs. Before and after, the module's own"
                " parameters are the masters, in fp32."
            )
        return [
            (name, param, self._masters.get(param))
            for name, param in self._module.named_parameters(remove_duplicate=remove_duplicate)
            if param.is_floating_point()
        ]

    # --- loss scaling --------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> LossScale:
        """The scaler in its present state."""
        return self._scaling.scale

    @loss_scale.setter
    def loss_scale(self, value: LossScale | float | str) -> None:
        scale = _make_loss_scale(value)
        if self._module is None:
            self._initial_loss_scale = scale
            self._scaling = self._new_scaling()
        elif self._scaling.checks:
            self._scaling.scale = scale
        else:
            raise RuntimeError(
                f"precision {self.precision!r} runs without checking gradients, so that no loss scale can be set now. Pass"
                " loss_scale to the plugin's constructor."
            )

    @property
    def gradient_scale(self) -> float:
        """The scale with which the present gradients were made; 1 without scaling."""
        return self._scaling.gradient_scale

    @property
    def applied_steps(self) -> int:
        """Optimizer steps of this run that changed weights."""
        return self._scaling.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps of this run that were skipped."""
        return self._scaling.skipped_steps

    @property
    def nonfinite_losses(self) -> int:
        """Those of the skipped steps whose loss was not finite."""
        return self._scaling.nonfinite_losses

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return self._scaling.last_step_skipped

    @property
    def last_overflow(self) -> str | None:
        """The name of the parameter where the last overflow began, the first in the order of backward; None without one."""
        return self._scaling.last_overflow

    @property
    def headroom_bits(self) -> float | None:
        """log2(65504 / largest scaled gradient) in the last step; None if it is not known."""
        return self._scaling.headroom_bits

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in the checkpoint how it was made.

        Keys of ``checkpoint["lightning_mp"]``: ``format`` (1), ``precision``, ``master``, ``full_copies``, the names of the
        parameters that have a full copy, and ``loss_scaling``, the counts of steps and the loss scale (see
        :meth:`lightning_mp.scaling.LossScaling.state_dict`). The masters themselves are in ``checkpoint["state_dict"]``.
        """
        if self._window_is_open:
            rank_zero_warn(
                "A checkpoint is saved in the middle of an accumulation window. The gradients gathered so far are not in it:"
                " a run that resumes from it goes on without them. Save after an optimizer step to keep them."
            )
        checkpoint[CHECKPOINT_KEY] = {
            "format": 1,
            "precision": str(self.precision),
            "master": str(self.master),
            "full_copies": self._masters.full_copies if self._module is not None else self._last_full_copies,
        }
        checkpoint[CHECKPOINT_KEY]["loss_scaling"] = self._scaling.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up where the checkpoint left off, and say what it lacks."""
        saved = checkpoint.get(CHECKPOINT_KEY)
        if len(self._masters) and self._is_fitting:
            if self.master == "copy" and saved is not None:
                self._masters.make_full(self._masters.named(saved["full_copies"]))
            weights = (checkpoint["state_dict"].get(self._masters.name(master)) for master in self._masters)
            if any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in weights):
                rank_zero_warn(
                    "The checkpoint holds 16-bit weights, so the fp32 masters start from rounded values. A checkpoint saved"
                    " under 'bf16-master', 'bf16-mixed' or '32-true' has them in full."
                )
        if self._is_fitting:
            self._load_scaling(checkpoint)
        if saved is not None and saved["precision"] != self.precision:
            rank_zero_info(f"The checkpoint was saved under {saved['precision']!r}; the run goes on under {self.precision!r}.")

    def _load_scaling(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(CHECKPOINT_KEY, {}).get("loss_scaling")
        stock = checkpoint.get("MixedPrecision", {}).get("scale")  # Lightning's own 16-mixed: the state of torch's GradScaler
        before = _scaler_settings(self._scaling.scale)
        if saved is not None:
            self._scaling.load_state_dict(saved)
        if not self._scaling.is_active:
            return
        if stock is not None:
            self._scaling.scale = self._scaling.scale.with_scale(stock)
            rank_zero_info(f"The loss scale goes on at {stock:g}, from a checkpoint of Lightning's '16-mixed'.")
        elif saved is None or saved.get("loss_scale", {}).get("kind", "none") == "none":
            rank_zero_info(f"The checkpoint has no loss scale; it starts at {self._scaling.scale.scale:g}.")
        else:
            after = _scaler_settings(self._scaling.scale)
            replaced = {key: value for key, value in after.items() if key in before and before[key] != value}
            given = {key: before[key] for key in replaced}
            if replaced:
                rank_zero_info(
                    f"Settings of the loss scale are those of the checkpoint: {replaced}, where the plugin was given {given}."
                    " To change them, set trainer.precision_plugin.loss_scale in on_train_start."
                )

    # --- after training ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Give the module fp32 parameters with the masters' values, and put torch's switches back."""
        self._restore_module()

    def _restore_module(self) -> None:
        for handle in self._handles:
            handle.remove()
        last_full_copies = self._masters.full_copies
        self._masters.release()
        self._scaling.release()
        for owner, name, value in self._backends_before:
            setattr(owner, name, value)
        self._reset()
        self._last_full_copies = last_full_copies


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be stepped on masters.

    Raises:
        MisconfigurationException: it shards its parameters over ranks.
    """
    sharded = [cls.__qualname__ for cls in type(optimizer).__mro__ if cls.__qualname__ in ("ZeroRedundancyOptimizer",)]
    if sharded:
        raise MisconfigurationException(
            f"{type(optimizer).__qualname__} keeps its parameters in shards, on which masters cannot stand in. Use a plain"
            " torch optimizer, or precision 'bf16-mixed'."
        )


def _scaler_settings(scale: LossScale) -> dict[str, Any]:
    return {"kind": scale.kind, **{f.name: getattr(scale, f.name) for f in fields(scale) if f.init}}  # type: ignore[arg-type]


def _make_loss_scale(value: LossScale | float | str) -> LossScale:
    try:
        return make_loss_scale(value)
    except ValueError as error:
        raise ValueError(f"loss_scale={value!r}: {error}") from error


def _check_choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value in legal:
        return
    hint = ""
    if name == "precision" and (close := get_close_matches(str(value).replace("_", "-").lower(), legal, n=1, cutoff=0.75)):
        hint = f" Did you mean {close[0]!r}?"
    if name == "precision" and value in ("bf16", "16", "fp16"):
        hint = " '*-master' has 16-bit parameters with fp32 masters, '*-mixed' fp32 parameters under autocast."
    if name == "precision" and value in ("bf16-true", "16-true", "64-true"):
        hint = f" {value!r} is Lightning's own: pass precision={value!r} to the Trainer, and no precision plugin."
    raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, legal))}.{hint}")
