"""Peak FLOP/s by device and format, and FLOPs counted while a step runs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_mp.cost import roofline
from lightning_mp.cost.roofline import PEAKS, FlopCount, is_compiled, matmul_format, peak_tflops

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "fmt", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        # half of the 1979 that the datasheet prints, which is with sparsity
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA A40", "bf16", 149.7),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        # tensor cores with fp32 accumulation, not the shaders' rate
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_peaks_are_dense(name: str, fmt: str, tflops: float) -> None:
    found = peak_tflops(name, fmt)
    assert found is not None
    assert found[0] == tflops
    assert "datasheet" in found[1] or "whitepaper" in found[1]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "cpu",
        "",
    ],
)
def test_a_device_that_is_not_in_the_table_is_not_taken_for_its_relative(name: str) -> None:
    assert peak_tflops(name, "fp32") is None


def test_a_format_without_units_has_no_peak_but_tf32_falls_back_to_fp32_as_in_torch() -> None:
    assert peak_tflops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_tflops("Tesla V100-SXM2-16GB", "tf32") == peak_tflops("Tesla V100-SXM2-16GB", "fp32")


def test_numbers_of_the_table_are_in_the_order_of_the_formats_and_no_name_matches_twice() -> None:
    for peak in PEAKS:
        ordered = [peak.tflops[fmt] for fmt in ("fp32", "tf32", "fp16") if fmt in peak.tflops]
        assert ordered == sorted(ordered), peak
        assert peak.tflops.get("bf16", peak.tflops["fp16"]) == peak.tflops["fp16"]
    names = [peak.pattern.split("|")[0].replace("(40|80)", "40") for peak in PEAKS]
    assert all(sum(bool(re.fullmatch(peak.pattern, name)) for peak in PEAKS) <= 1 for name in names)


@pytest.mark.parametrize(
    ("precision", "fmt"),
    [
        ("32-true", "fp32"),
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("bf16-master", "bf16"),
        ("16-mixed", "fp16"),
        ("16-master", "fp16"),
        ("64-true", None),
        ("transformer-engine", None),
    ],
)
def test_the_format_follows_from_the_precision(precision: str, fmt: str | None) -> None:
    assert matmul_format(precision, CPU) == matmul_format(precision, CUDA) == fmt


def test_fp32_products_on_cuda_are_tf32_if_torch_says_so_by_either_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        assert (matmul_format("32-true", CUDA), matmul_format("32-true", CPU)) == ("tf32", "fp32")
        torch.set_float32_matmul_precision("highest")
        assert matmul_format("32-true", CUDA) == "fp32"
        matmul.fp32_precision = "tf32"  # after this torch refuses to answer by the old names
        assert matmul_format("32-true", CUDA) == "tf32"
    finally:
        matmul.fp32_precision = before


def test_flops_of_a_step_are_three_times_those_of_its_products_less_the_gradient_of_the_input() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    count = FlopCount()
    with count.counting("forward"):
        loss = model(torch.randn(5, 8)).sum()
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    assert count.flops == forward
    with count.counting("backward"):
        loss.backward()
    assert count.flops == 3 * forward - 2 * 5 * 8 * 16
    assert count.blocks == {"forward", "backward"}


def test_a_block_inside_another_is_not_counted_twice_and_an_error_ends_the_count() -> None:
    count = FlopCount()
    with count.counting(), count.counting():
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert count.flops == 48

    def fail() -> None:
        with count.counting():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    torch.ones(2, 3) @ torch.ones(3, 4)
    assert count.flops == 48
    with count.counting():
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert count.flops == 96


def test_attention_counts_on_a_cpu_as_its_four_and_ten_products_do() -> None:
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 3 * 8 * 8 * 4
    count = FlopCount()
    with count.counting():
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert count.flops == 2 * product
    with count.counting():
        out.sum().backward()
    assert count.flops == (2 + 5) * product  # the scores are computed again in backward


def test_counting_changes_no_bit() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(5, 8)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        with FlopCount().counting():
            model(batch).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        model(batch).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for one in gradients for a, b in zip(gradients[0], one, strict=True))


def test_compiled_layers_are_found_wherever_they_are() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_compiled(plain)
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    plain[1].compile()
    assert is_compiled(plain)


def test_every_source_is_named() -> None:
    assert all(peak.source for peak in roofline.PEAKS)
