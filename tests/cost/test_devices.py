"""What is said about devices that this machine does not have is tested on stand-ins for torch's own answers."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.cost.devices import bf16_support, check_bf16

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    def pretend(computes: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or computes)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")

    return pretend


def test_a_gpu_without_bf16_units_is_refused_with_its_name_and_the_remedy(gpu):
    gpu(computes=False)
    assert not bf16_support(CUDA)[0]  # although torch would emulate it
    with pytest.raises(MisconfigurationException, match=r"bf16-master.*Tesla T4.*'32-true'.*'auto'"):
        check_bf16("bf16-master", CUDA)


def test_a_gpu_with_bf16_units_is_accepted(gpu):
    gpu(computes=True)
    assert bf16_support(CUDA)[0]
    check_bf16("bf16-master", CUDA)


@pytest.mark.parametrize(
    ("capabilities", "computes"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx2": True}, False), ({}, False)],
)
def test_a_cpu_is_accepted_whether_or_not_it_computes_bf16(capabilities, computes, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert bf16_support(torch.device("cpu"))[0] is computes
    check_bf16("bf16-master", torch.device("cpu"))


def test_an_unknown_device_is_refused_and_not_guessed_about():
    with pytest.raises(MisconfigurationException, match="nothing is known about bf16 on 'mps' devices"):
        check_bf16("bf16-mixed", torch.device("mps"))
