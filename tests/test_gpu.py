"""What only a CUDA device shows. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lightning_mp import MasterWeightPrecision, Trainer
from lightning_mp.gradients import unscale_
from tests.modules import QUIET, M
from tests.reference import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]
ON_GPU = {**QUIET, "accelerator": "gpu", "devices": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscaling_on_a_gpu_gives_what_it_gives_on_a_cpu(dtype, bad):
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        params = [Parameter(torch.zeros(size, dtype=dtype, device=device)) for size in (3, 0, 1000, 100_000)]
        for param in params:
            param.grad = torch.randn(param.shape).to(device, dtype)
        if bad is not None:
            params[-1].grad[-1] = bad
        amax = unscale_(params, 2.0**10, widen=True)
        results.append([amax.cpu(), *(param.grad.cpu() for param in params if param.numel())])
    assert all(same_bits(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("precision", ["16-master", "16-mixed", "bf16-master"])
def test_a_step_waits_for_the_device_once_under_fp16_and_never_under_bf16(precision):
    class Strict(MasterWeightPrecision):
        syncs = 0

        def backward(self, *args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().backward(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    counted = []
    plugin = Strict(precision)
    measure = plugin._scaling.__class__._measure

    def counting(self, unmeasured):
        counted.append(1)
        return measure(self, unmeasured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_mp.scaling.LossScaling._measure", counting)
        module = M()
        Trainer(precision_plugin=plugin, **ON_GPU).fit(module)
    assert len(counted) == (0 if precision == "bf16-master" else plugin.applied_steps + plugin.skipped_steps)


@pytest.mark.parametrize("precision", ["16-master", "16-mixed", "bf16-master"])
def test_a_run_on_a_gpu_ends_near_fp32(precision):
    ends = []
    for name in ("32-true", precision):
        torch.manual_seed(0)
        module = M()
        Trainer(precision_plugin=name, **ON_GPU).fit(module)
        ends.append([param.detach().cpu() for param in module.parameters()])
    for expected, param in zip(*ends, strict=True):
        torch.testing.assert_close(param, expected, rtol=0.05, atol=0.02)
