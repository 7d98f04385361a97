"""The byte GPT example: its data, its model, a fit under stock precisions, and the configuration files."""

import doctest
import math
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

import lightning_mp
from examples.byte_gpt import ByteGPT, ByteText, data, model, text
from examples.byte_gpt.data import Windows, WindowStream

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {"n_layer": 2, "n_head": 2, "width": 16, "context": 8}


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """A file of 6,000 bytes in which every byte depends on its position."""
    file = tmp_path / "prose.txt"
    file.write_bytes(bytes((i * i // 7 + i) % 256 for i in range(6000)))
    return file


def tiny_data(path: Path | None, **kwargs: Any) -> ByteText:
    return ByteText(**{"path": path, "context": 8, "batch_size": 4, "val_fraction": 0.1, "test_fraction": 0.1, **kwargs})


def tiny_trainer(tmp_path: Path, **kwargs: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, **quiet, **kwargs})


def training_batches(datamodule: ByteText) -> list[Tensor]:
    datamodule.setup("fit")
    return [x for x, _ in datamodule.train_dataloader()]


class RecordsBatches(ByteGPT):
    """Remembers the inputs of its training steps."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Tensor] = []

    def training_step(self, batch: model.Batch, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


# ---- the text ----


def test_a_file_is_read_as_its_bytes(prose: Path) -> None:
    assert bytes(text.read_text(prose, "*.py", None)) == prose.read_bytes()
    assert bytes(text.read_text(str(prose), "*.py", 10)) == prose.read_bytes()[:10]


def test_a_folder_is_read_whatever_the_order_of_its_creation(tmp_path: Path) -> None:
    contents = {"a.txt": b"one", "b/c.txt": b"two", "b/d/e.txt": b"three"}
    texts = []
    for name, order in {"first": list(contents), "second": list(contents)[::-1]}.items():
        for file in order:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_bytes(contents[file])
        (tmp_path / name / "left_out.py").write_bytes(b"no")
        (tmp_path / name / ".hidden").mkdir()
        (tmp_path / name / ".hidden" / "f.txt").write_bytes(b"no")
        texts.append(bytes(text.read_text(tmp_path / name, "*.txt", None)))
    assert texts[0] == texts[1]
    assert sorted(texts[0]) == sorted(b"onetwothree")


def test_the_default_text_is_the_standard_library_without_tests_and_packages() -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [file.relative_to(stdlib) for file in text.find_files(stdlib, "*.py", text.STDLIB_SKIPPED)]
    assert Path("argparse.py") in files
    assert not any({"site-packages", "test", "tests", "__pycache__"} & set(file.parts) for file in files)
    assert len(text.read_text(None, "*.txt", 10_000)) == 10_000  # `pattern` is for folders that a user names


# ---- windows, regions, order ----


def test_regions_are_contiguous_and_do_not_overlap(prose: Path) -> None:
    datamodule = tiny_data(prose)
    datamodule.setup("fit")
    regions = datamodule.regions
    assert {name: len(region) for name, region in regions.items()} == {"train": 4800, "val": 600, "test": 600}
    assert b"".join(bytes(region) for region in regions.values()) == prose.read_bytes()


def test_windows_cover_a_region_once_and_stay_in_it(prose: Path) -> None:
    region = text.read_text(prose, "", 41)
    windows = Windows(region, context=8)
    assert len(windows) == 5
    assert torch.equal(torch.cat([x for x, _ in windows]), region[:40].long())  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([y for _, y in windows]), region[1:41].long())  # type: ignore[attr-defined]
    assert len(Windows(region[:40], context=8)) == 4  # a fifth would lack its last y


def test_batches_are_int64_pairs_shifted_by_one_byte(prose: Path) -> None:
    datamodule = tiny_data(prose)
    datamodule.setup("fit")
    loaders = [datamodule.train_dataloader(), datamodule.val_dataloader(), datamodule.test_dataloader()]
    for loader in loaders:
        x, y = next(iter(loader))
        assert x.shape == y.shape == (4, 8)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_seed_decides_the_order_and_nothing_else_does(prose: Path) -> None:
    torch.manual_seed(1)
    first = training_batches(tiny_data(prose, seed=3))
    torch.manual_seed(2)
    ByteGPT(**TINY)
    again = training_batches(tiny_data(prose, seed=3))
    with_workers = training_batches(tiny_data(prose, seed=3, num_workers=1))
    other = training_batches(tiny_data(prose, seed=4))
    assert len(first) == 599 // 4
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert torch.equal(torch.stack(first), torch.stack(with_workers))
    assert not torch.equal(torch.stack(first), torch.stack(other))


def test_loading_data_leaves_the_global_random_state_alone(prose: Path) -> None:
    datamodule = tiny_data(prose)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    torch.manual_seed(0)
    stream = list(iter(loader.sampler))
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert len(stream) == 599
    assert torch.equal(drawn, torch.rand(()))


def test_each_pass_has_every_window_once_in_another_order() -> None:
    windows = Windows(torch.zeros(81, dtype=torch.uint8), context=8)
    stream = WindowStream(windows, seed=0)
    first = list(stream)
    stream.start = len(first)
    second = list(stream)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_processes_together_see_what_one_process_with_their_joint_batch_sees() -> None:
    windows = Windows(torch.zeros(8 * 24 + 1, dtype=torch.uint8), context=8)
    alone = list(WindowStream(windows, seed=5))
    shares = [list(WindowStream(windows, seed=5, num_replicas=2, rank=rank)) for rank in range(2)]
    for step in range(3):  # of 4 windows in each process
        together = [share[4 * step : 4 * step + 4] for share in shares]
        assert sorted(together[0] + together[1]) == sorted(alone[8 * step : 8 * step + 8])


def test_a_loader_goes_on_from_a_saved_position(prose: Path) -> None:
    datamodule = tiny_data(prose)
    datamodule.setup("fit")
    whole = datamodule.train_dataloader()
    batches = [x for _ in range(2) for x, _ in whole]  # two passes

    part = datamodule.train_dataloader()
    iterator = iter(part)
    for _ in range(100):
        next(iterator)
    state = part.state_dict()
    assert state == {"windows_seen": 400}
    resumed = datamodule.train_dataloader()
    resumed.load_state_dict(state)
    rest = [x for x, _ in resumed]
    assert torch.equal(torch.stack(rest), torch.stack(batches[100 : 100 + len(rest)]))


def test_val_batches_spreads_over_the_region(prose: Path) -> None:
    datamodule = tiny_data(prose, val_batches=2)
    datamodule.setup("fit")
    loader = datamodule.val_dataloader()
    assert len(loader) == 2
    assert Windows(datamodule.regions["val"], 8, at_most=8).starts == [i * 74 // 8 * 8 for i in range(8)]
    every = Windows(datamodule.regions["val"], 8)
    assert Windows(datamodule.regions["val"], 8, at_most=1000).starts == every.starts


# ---- bad input ----


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"context": 0}, r"context=0.*1 or more"),
        ({"batch_size": 0}, r"batch_size=0.*1 or more"),
        ({"max_bytes": 0}, r"max_bytes=0.*1 or more"),
        ({"val_batches": 0}, r"val_batches=0.*1 or more"),
        ({"seed": -1}, r"seed=-1.*0 or more"),
        ({"num_workers": -1}, r"num_workers=-1.*0 or more"),
        ({"val_fraction": 0.0}, r"val_fraction=0\.0.*above 0"),
        ({"test_fraction": -0.1}, r"test_fraction=-0\.1.*above 0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, r"sum below 1"),
        ({"val_fraction": math.nan}, r"val_fraction=nan"),
    ],
)
def test_numbers_out_of_range_are_refused_on_construction(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ByteText(**bad)


def test_a_missing_path_is_refused_with_the_alternatives(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.*no such file.*leave `path` out"):
        tiny_data(tmp_path / "nowhere").setup("fit")


def test_a_folder_without_a_matching_file_is_refused_with_the_pattern(prose: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"matches '\*\.py'.*Set `pattern`"):
        tiny_data(prose.parent).setup("fit")


@pytest.mark.parametrize("size", [0, 8, 60])
def test_a_text_shorter_than_one_window_per_region_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * size)
    for path in [tmp_path / "short.txt", tmp_path]:
        with pytest.raises(ValueError, match=rf"of {size} bytes the \w+ region gets.*context \+ 1 = 9.*longer text"):
            tiny_data(path, pattern="*.txt").setup("fit")


def test_training_windows_that_fill_no_batch_are_refused_before_training(prose: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"599 windows of 8 bytes.*batch_size=600.*smaller batch_size"):
        tiny_trainer(tmp_path, max_steps=1).fit(ByteGPT(**TINY), tiny_data(prose, batch_size=600))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"n_layer": 0}, r"n_layer=0.*at least 1"),
        ({"context": -1}, r"context=-1.*at least 1"),
        ({"width": 10, "n_head": 4}, r"n_head must divide width\. Use n_head=2, or width=12"),
        ({"warmup_steps": -1}, r"warmup_steps=-1"),
    ],
)
def test_sizes_that_make_no_model_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ByteGPT(**bad)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 bytes.*context is 8"):
        ByteGPT(**TINY)(torch.zeros(1, 9, dtype=torch.int64))


# ---- the model ----


def test_a_position_sees_nothing_that_follows_it() -> None:
    torch.manual_seed(0)
    gpt = ByteGPT(**TINY)
    x = torch.randint(256, (1, 8))
    changed = x.clone()
    changed[0, 5:] = (x[0, 5:] + 1) % 256
    assert torch.equal(gpt(x)[0, :5], gpt(changed)[0, :5])
    assert not torch.equal(gpt(x)[0, 5:], gpt(changed)[0, 5:])


def test_initial_weights_guess() -> None:
    torch.manual_seed(0)
    batch = (torch.randint(256, (8, 8)), torch.randint(256, (8, 8)))
    assert ByteGPT(**TINY).loss(batch).item() == pytest.approx(math.log(256), rel=0.02)


def test_tied_weights_are_one_parameter_in_one_group() -> None:
    torch.manual_seed(0)
    tied, untied = ByteGPT(**TINY, tie_weights=True), ByteGPT(**TINY)
    assert tied.lm_head.weight is tied.token_embedding.weight
    count = [sum(p.numel() for p in m.parameters()) for m in (tied, untied)]
    assert count[1] - count[0] == 256 * 16

    configured: Any = tied.configure_optimizers()
    held = [p for group in configured["optimizer"].param_groups for p in group["params"]]
    assert sum(p is tied.lm_head.weight for p in held) == 1
    tied.loss((torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))).backward()
    assert tied.lm_head.weight.grad is not None
    assert tied.lm_head.weight.grad[1].any()  # a byte that is no input: this came through the head


def test_only_matrices_decay_and_the_rate_warms_up() -> None:
    gpt = ByteGPT(**TINY, lr=1.0, warmup_steps=4)
    configured: Any = gpt.configure_optimizers()
    decayed, rest = configured["optimizer"].param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in rest["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(list(gpt.parameters()))
    assert configured["lr_scheduler"]["interval"] == "step"
    assert [gpt._warmup_factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    gpt.warmup_steps = 0
    assert gpt._warmup_factor(0) == 1.0


def test_bits_per_byte_keeps_a_nan_and_its_dtypes() -> None:
    holder = nn.Module()
    holder.metric = model.BitsPerByte()
    holder.to(torch.bfloat16)  # as Lightning's bf16-true does
    for _ in range(1000):
        holder.metric.update(torch.tensor(math.log(2.0)), 2048)
    assert holder.metric.bytes.dtype == torch.int64
    assert holder.metric.nats.dtype == torch.float32
    assert holder.metric.compute().item() == pytest.approx(1.0, rel=1e-5)
    holder.metric.update(torch.tensor(math.nan), 1)
    assert holder.metric.compute().isnan()


def test_hyperparameters_are_plain_values_and_rebuild_the_model(prose: Path, tmp_path: Path) -> None:
    class Decorated(ByteGPT):
        def __init__(self, plugin: object = None, label: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)

    gpt = Decorated(plugin=ModelCheckpoint(tmp_path), label="a", **TINY)
    assert gpt.hparams["label"] == "a"
    assert "plugin" not in gpt.hparams

    trainer = tiny_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(ByteGPT(**TINY, betas=(0.8, 0.9)), tiny_data(prose))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["hyper_parameters"]
    assert all(isinstance(value, bool | int | float | tuple) for value in saved.values())
    rebuilt = ByteGPT.load_from_checkpoint(tmp_path / "one.ckpt")
    assert rebuilt.betas == (0.8, 0.9)
    assert len(rebuilt.blocks) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_train_under_autocast_with_fp32_norms(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gpt = ByteGPT(**TINY)
    batch = (torch.randint(256, (4, 8)), torch.randint(256, (4, 8)))
    exact = gpt.loss(batch)
    for module in gpt.modules():
        if not isinstance(module, nn.LayerNorm):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    with torch.autocast("cpu", dtype=dtype):
        loss = gpt.loss(batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), abs=0.02)  # logits of size 1 carry 2^-8 in bf16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


# ---- under a Trainer ----


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_three_steps_run_under_stock_precisions_with_clipping(prose: Path, tmp_path: Path, precision: str) -> None:
    torch.manual_seed(0)
    gpt = ByteGPT(**TINY)
    before = gpt.lm_head.weight.detach().clone()
    trainer = tiny_trainer(tmp_path, precision=precision, max_steps=3, gradient_clip_val=1.0, limit_val_batches=2)
    trainer.fit(gpt, tiny_data(prose))
    assert trainer.global_step == 3
    assert gpt.lm_head.weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert not torch.equal(gpt.lm_head.weight.float(), before)
    assert trainer.callback_metrics["train_loss"].dtype == torch.float32
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(math.log(256), rel=0.05)

    (scores,) = trainer.test(gpt, tiny_data(prose), verbose=False)
    assert 7 < scores["test_bits_per_byte"] < 9
    predicted: Any = trainer.predict(gpt, tiny_data(prose))
    assert predicted[0].shape == (4, 8)
    assert predicted[0].dtype == torch.int64


def test_validation_bits_per_byte_equal_an_independent_computation(prose: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gpt, datamodule = ByteGPT(**TINY), tiny_data(prose, batch_size=5)  # 74 windows: the last batch is short
    (scores,) = tiny_trainer(tmp_path).validate(gpt, datamodule, verbose=False)

    region = prose.read_bytes()[4800:5400]
    bits = []
    for start in range(0, 592, 8):
        logits = gpt(torch.tensor([list(region[start : start + 8])]))[0].double()
        for position in range(8):
            p = logits[position].softmax(0)[region[start + position + 1]]
            bits.append(-math.log2(p.item()))
    assert scores["val_bits_per_byte"] == pytest.approx(sum(bits) / len(bits), rel=1e-6)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_resumed_in_mid_epoch_sees_the_batches_it_would_have_seen(prose: Path, tmp_path: Path, num_workers: int) -> None:
    def fit(max_steps: int, **kwargs: Any) -> RecordsBatches:
        torch.manual_seed(0)
        gpt = RecordsBatches(**TINY)
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
        options = {"limit_train_batches": 5, "limit_val_batches": 0, "enable_checkpointing": True}
        trainer = tiny_trainer(tmp_path, max_steps=max_steps, callbacks=[saver], **options)
        trainer.fit(gpt, tiny_data(prose, num_workers=num_workers), **kwargs)
        return gpt

    whole = fit(17)  # epochs of 5: the checkpoint of step 8 lies inside the second
    resumed = fit(17, ckpt_path=tmp_path / "step=8.ckpt")
    assert len(resumed.seen) == 9
    assert torch.equal(torch.stack(resumed.seen), torch.stack(whole.seen[8:]))
    assert torch.equal(resumed.lm_head.weight, whole.lm_head.weight)


def test_overfitting_one_batch_repeats_it(prose: Path, tmp_path: Path) -> None:
    gpt = RecordsBatches(**TINY)
    tiny_trainer(tmp_path, max_steps=3, overfit_batches=1, limit_val_batches=0).fit(gpt, tiny_data(prose))
    assert len(gpt.seen) == 3
    assert torch.equal(gpt.seen[0], gpt.seen[2])


@pytest.mark.slow
def test_two_processes_train_on_what_one_process_would(prose: Path, tmp_path: Path) -> None:
    def fit(batch_size: int, **kwargs: Any) -> Tensor:
        torch.manual_seed(0)
        gpt = ByteGPT(**TINY)
        trainer = tiny_trainer(tmp_path, max_steps=5, limit_val_batches=2, **kwargs)
        trainer.fit(gpt, tiny_data(prose, batch_size=batch_size))
        return gpt.lm_head.weight.detach()

    alone = fit(8)
    together = fit(4, strategy="ddp_spawn", devices=2)
    # Averaging over two processes sums in another order; Adam's first steps turn small differences into at most this.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


# ---- configuration and documentation ----

SHAPES = {
    "base": (4, 256, 128, 150),
    "tiny": (2, 64, 64, 20),
    "small": (6, 384, 256, 2000),
    "gpt2": (12, 768, 1024, 1000),
}


@pytest.mark.parametrize("overlay", SHAPES)
def test_configuration_files_build_what_they_say(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = ["configs/byte_gpt.yaml"] + ([] if overlay == "base" else [f"configs/byte_gpt_{overlay}.yaml"])
    monkeypatch.setattr("sys.argv", ["lightning-mp"])
    with torch.device("meta"):  # no need for the weights
        cli = LightningCLI(
            trainer_class=lightning_mp.Trainer, run=False, args=[arg for file in files for arg in ("--config", file)]
        )
    n_layer, width, context, max_steps = SHAPES[overlay]
    assert isinstance(cli.model, ByteGPT)
    assert isinstance(cli.datamodule, ByteText)
    assert (len(cli.model.blocks), cli.model.norm.normalized_shape) == (n_layer, (width,))
    assert cli.model.context == cli.datamodule.context == context
    assert cli.trainer.max_steps == cli.trainer.val_check_interval == max_steps
    assert cli.trainer.gradient_clip_val == 1.0
    assert type(cli.trainer.precision_plugin).__name__ == "MasterWeightPrecision"
    assert cli.model.weight_decay == 0.1  # from the base file, whichever the overlay


def test_the_fp16_overlay_goes_over_any_base_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["lightning-mp"])
    files = ("configs/byte_gpt.yaml", "configs/byte_gpt_tiny.yaml", "configs/fp16.yaml")
    with torch.device("meta"):
        args = [arg for file in files for arg in ("--config", file)]
        cli = LightningCLI(trainer_class=lightning_mp.Trainer, run=False, args=args)
    assert cli.trainer.precision == "16-master"
    assert cli.trainer.precision_plugin.loss_scale == lightning_mp.AdaptiveLossScale()
    assert cli.trainer.max_steps == 20
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"LossScaleMonitor", "GradientRangeMonitor"} <= set(names)


def test_the_baseline_overlay_records_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["lightning-mp"])
    with torch.device("meta"):
        args = ["--config", "configs/byte_gpt.yaml", "--config", "configs/baseline.yaml"]
        cli = LightningCLI(trainer_class=lightning_mp.Trainer, run=False, args=args)
    assert cli.trainer.precision == "32-true"
    (recorder,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, lightning_mp.BaselineRecorder)]
    assert str(recorder.path) == "baselines/byte_gpt.json"


@pytest.mark.parametrize("module", [data, model, text])
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
