"""What master weights do to a module: which parameters are cast, and how its ``state_dict`` stays an fp32 one."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from lightning_mp.masters import BF16, FP16, SHORT_NAMES, Masters

log = logging.getLogger(__name__)

#: In a list of modules to keep in fp32: the normalisation layers, and weights that are computed by parametrizations.
NORM = "norm"
_NORM_CLASS = re.compile(r"(?i)norm(alization)?(\d+d)?$")


# --- which parameters ------------------------------------------------------------------------------------------------------


def check_module(module: Module) -> None:
    """Refuse parameters whose fp32 value does not exist or is not plain.

    Raises:
        MisconfigurationException: a parameter is lazy and uninitialised, on the meta device, or sharded.
    """
    for name, param in module.named_parameters():
        if is_lazy(param):
            problem, remedy = "is lazy and not initialised", "Run one batch through the module in configure_model or setup"
        elif param.is_meta:
            problem, remedy = "is on the meta device", "Give it a real device and values in configure_model"
        elif hasattr(param, "device_mesh"):
            problem, remedy = "is sharded (a DTensor)", "Leave sharding out, or use precision 'bf16-mixed'"
        else:
            continue
        raise MisconfigurationException(
            f"Parameter {name!r} {problem}, so it has no fp32 value to take a master from. {remedy}."
        )


def parameters_to_cast(
    module: Module, fp32_modules: Sequence[str | type[Module]], dtype: torch.dtype = BF16
) -> list[tuple[str, Parameter]]:
    """The parameters that are to be 16-bit under masters, each once, with its qualified name.

    These are the fp32 parameters that ``fp32_modules`` does not keep, and those that are bf16 already, or for fp16 either
    16-bit dtype. Parameters of other dtypes, and buffers, are left alone. 16-bit parameters that ``fp32_modules`` keeps become
    fp32 here.

    Args:
        module: the root.
        fp32_modules: see :class:`~lightning_mp.MasterWeightPrecision`.
        dtype: bf16 or fp16, what the parameters are going to be.
    """
    low = (BF16,) if dtype == BF16 else (BF16, FP16)
    kept: set[int] = set()
    unused = set(fp32_modules)
    for name, child in module.named_modules(remove_duplicate=False):
        for entry in fp32_modules:
            if entry == NORM:
                kept.update(map(id, _norm_parameters(child)))
                unused.discard(entry)
            elif _matches_module(entry, name, child):
                kept.update(map(id, child.parameters()))
                unused.discard(entry)
    cast, foreign = [], []
    for name, param in module.named_parameters():
        for entry in fp32_modules:
            if isinstance(entry, str) and fnmatchcase(name, entry):
                kept.add(id(param))
                unused.discard(entry)
        if id(param) in kept or not param.is_floating_point():
            continue
        plain = param.layout == torch.strided and type(param.data) is Tensor
        if plain and (param.dtype == torch.float32 or param.dtype in low):
            cast.append((name, param))
        elif param.dtype != torch.float64:
            foreign.append(f"{name} ({param.dtype})")
    # a parameter that is shared with a module that is kept stays fp32 under all its names
    cast = [(name, param) for name, param in cast if id(param) not in kept]
    for name, param in module.named_parameters():
        if id(param) in kept and param.dtype in low:
            log.info("%s was %s, and is fp32 from now on, as fp32_modules has it.", name, SHORT_NAMES[param.dtype])
            param.grad = None
            param.data = param.data.float()
    if unused:
        rank_zero_warn(
            f"fp32_modules names what this module does not have: {sorted(map(str, unused))}. Legal are module classes,"
            f" and patterns for the names of modules, parameters or module classes, such as"
            f" {[name for name, _ in module.named_children()][:4]}."
        )
    if shared := _names_that_share_memory(cast):
        rank_zero_warn(
            f"Parameters {' and '.join(shared)} share memory but are separate parameters. Under master weights they are apart"
            " from now on. Assign the same Parameter to both to tie them."
        )
    if foreign:
        log.info("No masters for parameters of another dtype, or that are not plain tensors: %s.", ", ".join(foreign))
    already = [f"{name} ({SHORT_NAMES[param.dtype]})" for name, param in cast if param.dtype in SHORT_NAMES]
    if already:
        log.info("Masters start from the 16-bit value of parameters that were 16-bit before: %s.", ", ".join(already))
    return cast


def _names_that_share_memory(named: list[tuple[str, Parameter]]) -> list[str]:
    """The names of the first two parameters whose elements overlap in memory, or none."""
    places = sorted(
        (param.untyped_storage().data_ptr(), param.storage_offset(), param.numel(), name)
        for name, param in named
        if param.numel()
    )
    for (storage, start, size, name), (other_storage, other_start, _, other_name) in pairwise(places):
        if storage == other_storage and other_start < start + size:
            return [name, other_name]
    return []


def _norm_parameters(module: Module) -> list[Parameter]:
    """The module's own parameters if it normalises, or those from which it computes its weights in each forward.

    The latter are parametrizations, and the hooks of weight_norm and spectral_norm: they mix weights with fp32 buffers, and
    have operations that autocast does not know and that fail in bf16 (the matrix exponential of ``orthogonal``). Not the
    parameters of its children: a wrapper that has the word in its name, such as PreNorm, is not to keep what it wraps.
    """
    own = dict(module.named_parameters(recurse=False))
    if _NORM_CLASS.search(type(module).__name__):
        return list(own.values())
    if isinstance(module, ParametrizationList):
        return list(own.values())
    prefixes = tuple(
        f"{hook.name}_"  # weight_norm and spectral_norm, as hooks, keep weight_orig or weight_g and weight_v
        for hook in module._forward_pre_hooks.values()
        if _NORM_CLASS.search(type(hook).__name__) and hasattr(hook, "name")
    )
    return [param for name, param in own.items() if prefixes and name.startswith(prefixes)]


def _matches_module(entry: str | type[Module], name: str, module: Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    return bool(name) and (fnmatchcase(name, entry) or fnmatchcase(type(module).__name__, entry))


# --- state_dict ------------------------------------------------------------------------------------------------------------


def attach_state_dict_hooks(module: Module, masters: Masters) -> list[RemovableHandle]:
    """Make ``state_dict`` of the module, and of each of its children, give masters, and ``load_state_dict`` take them.

    Args:
        module: the root.
        masters: of the module's parameters.

    Returns:
        The handles of the hooks.
    """
    handles = []
    for child in module.modules():
        hooks = _StateDictHooks(child, masters)
        handles.append(child._register_state_dict_hook(hooks.save))
        handles.append(child.register_load_state_dict_pre_hook(hooks.load))
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in module.named_parameters(remove_duplicate=False):
        if masters.get(param) is not None:
            names[id(param)].append(name)
    tied = [aliases for aliases in names.values() if len(aliases) > 1]
    if tied:
        handles.append(module._register_state_dict_hook(_TiedNames(tied)))
    return handles


class _StateDictHooks:
    """The hooks of one module, for the parameters that it holds itself. In a copy of the module they go on with its masters."""

    def __init__(self, module: Module, masters: Masters) -> None:
        self._module = module
        self._masters = masters

    def __getstate__(self) -> dict[str, Any]:
        self._masters.report_copy()
        return {"_module": self._module, "_masters": self._masters.only(self._module._parameters.values())}

    def save(self, module: Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        # looked up now: pruning, for one, gives parameters other names
        for name, param in module._parameters.items():
            master = None if param is None else self._masters.get(param)
            # with keep_vars=True the live parameters are asked for
            if master is not None and not isinstance(state_dict.get(prefix + name), (Parameter, type(None))):
                state_dict[prefix + name] = master.value()

    def load(self, module: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module._parameters.items():
            master = None if param is None else self._masters.get(param)
            value = state_dict.get(prefix + name)
            # what does not fit is left to torch, which knows how to complain
            if master is None or not isinstance(value, Tensor) or value.shape != master.param.shape:
                continue
            if value.is_floating_point() and master.param.dtype == master.dtype:
                if value.dtype in (torch.bfloat16, torch.float16):
                    self._masters.report_rounded(prefix + name, value.dtype)
                master.set_(value)
                state_dict[prefix + name] = master.param  # copied onto itself, so that nothing is rounded again


class _TiedNames:
    """The root's hook: one tensor for all names of a shared parameter, as an fp32 ``state_dict`` has it."""

    def __init__(self, tied: list[list[str]]) -> None:
        self._tied = tied

    def __call__(self, module: Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for first, *others in self._tied:
            for other in others:
                if prefix + first in state_dict and prefix + other in state_dict:
                    state_dict[prefix + other] = state_dict[prefix + first]


# --- fp32 parameters -------------------------------------------------------------------------------------------------------


@contextmanager
def fp32_parameters(module: Module, masters: Masters) -> Generator[None, None, None]:
    """Put fp32 parameters with the masters' values in place of the 16-bit ones; what is written to them becomes the masters."""
    replaced: list[tuple[Module, str, Parameter]] = []
    stand_ins: dict[int, Parameter] = {}
    for child in module.modules():
        for name, param in list(child._parameters.items()):
            if param is None or (master := masters.get(param)) is None:
                continue
            if id(param) not in stand_ins:
                stand_ins[id(param)] = Parameter(master.value(), requires_grad=param.requires_grad)
            replaced.append((child, name, param))
            # not by .data, which would cost a wrapped module its gradient hooks; setattr, as recurrent layers keep a list
            setattr(child, name, stand_ins[id(param)])
    try:
        yield
    finally:
        for child, name, param in replaced:
            setattr(child, name, param)
        for param in {id(param): param for _, _, param in replaced}.values():
            master = masters.get(param)
            assert master is not None
            master.set_(stand_ins[id(param)])
