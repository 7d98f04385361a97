"""ByteText: windows of a text as ``(x, y)`` batches, in an order that only the seed decides.

The text is cut into three regions, and each region into windows of ``context`` bytes:

    |<------------- train ------------->|<-- val -->|<-- test -->|
    |<- window 0 ->|<- window 1 ->| ...
     x = b[0] .. b[T-1]    y = b[1] .. b[T]     (y ends one byte into the next window, never into the next region)

Two runs are compared sharply when they see the same batches in the same order, so the order must not depend on
anything that may differ between them. Training reads an endless stream of windows: one permutation of all of them,
then another, and so on, where permutation k is a function of ``(seed, k)`` alone. The global random state, the model,
the workers and the number of processes play no part: W processes with batches of B see at each step the windows that
one process with batches of W x B would see. The loader knows how far along the stream it is and puts that into the
checkpoint, so a run resumed in mid-epoch goes on with the batch that it would have seen.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from examples.byte_gpt.text import read_text

Sample = tuple[Tensor, Tensor]
"""``(x, y)``, both (T,) int64; in a batch both (B, T)."""


class Windows(Dataset[Sample]):
    """The windows of one region of a text.

    Args:
        text: The region's bytes, (N,) uint8.
        context: Bytes per window, T.
        at_most: Keep this many windows, evenly spaced over the region; None keeps all.
    """

    def __init__(self, text: Tensor, context: int, at_most: int | None = None) -> None:
        self.text = text
        self.context = context
        count = (len(text) - 1) // context  # the last y needs one byte more
        kept = count if at_most is None else min(count, at_most)
        self.starts = [i * count // kept * context for i in range(kept)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        start = self.starts[index]
        window = self.text[start : start + self.context + 1].long()  # (T + 1,)
        return window[:-1], window[1:]


class WindowStream(DistributedSampler[int]):
    """This process's share of the endless stream of shuffled windows.

    Position p of the stream holds entry ``p % n`` of permutation ``p // n`` of the n windows; process ``rank`` takes
    positions rank, rank + W, and so on. Being a ``DistributedSampler`` already, it is not replaced by Lightning's own.

    Args:
        dataset: The windows.
        seed: Which stream; 0 or more.
        num_replicas: Number of processes that share the stream, W.
        rank: Which of them this is.
    """

    def __init__(self, dataset: Windows, seed: int, num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed, drop_last=True)
        self.n_windows = len(dataset)
        self.start = 0  # position at which the next iteration begins

    def permutation(self, k: int) -> list[int]:
        """Permutation ``k`` of the windows."""
        # SeedSequence mixes the two numbers, so that neither seeds nor passes that are neighbours are related.
        (state,) = np.random.SeedSequence([self.seed, k]).generate_state(1)
        generator = torch.Generator().manual_seed(int(state))
        return torch.randperm(self.n_windows, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        """As many windows as one pass over the data has, beginning at ``start``."""
        current, order = -1, []
        first = self.start + self.rank
        for position in range(first, first + len(self) * self.num_replicas, self.num_replicas):
            k, entry = divmod(position, self.n_windows)
            if k != current:
                current, order = k, self.permutation(k)
            yield order[entry]


class StreamLoader(DataLoader[Sample]):
    """A loader over a :class:`WindowStream` that goes on where it stopped, also across a checkpoint.

    Lightning saves and restores any loader that has ``state_dict`` and ``load_state_dict``. The state has one key,
    ``windows_seen``: the number of windows handed out so far to all processes together.
    """

    windows_seen = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches from the current position on; each moves the position."""
        stream = self.sampler
        # `overfit_batches` puts another sampler in: then every iteration is the same, as it should be
        replicas = stream.num_replicas if isinstance(stream, WindowStream) else 1
        if isinstance(stream, WindowStream):
            stream.start = self.windows_seen
        for batch in super().__iter__():
            self.windows_seen += len(batch[0]) * replicas
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position in the stream: ``{"windows_seen": int}``."""
        return {"windows_seen": self.windows_seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Move to a saved position."""
        self.windows_seen = state_dict["windows_seen"]


class ByteText(L.LightningDataModule):
    """Batches of byte windows from the standard library's source, or from any text.

    A batch is ``(x, y)``, both (B, T) int64 with values 0..255; ``y`` is ``x`` moved on by one byte. Training batches
    are shuffled and complete; validation, test and prediction (the test region) go through their windows in order.

    Args:
        path: A file or a folder; None is the standard library's ``.py`` files, without tests and installed packages.
        pattern: Shell pattern of the file names to read when ``path`` is a folder. Hidden folders are left out.
        context: Bytes per window, T.
        batch_size: Windows per batch and process, B.
        seed: Decides the order of the training windows, together with nothing else. 0 or more.
        val_fraction: Share of the text for validation, above 0.
        test_fraction: Share of the text for testing, above 0; with ``val_fraction`` below 1.
        max_bytes: Use this much of the text, from its beginning; None uses all.
        val_batches: Validate on this many batches of windows, evenly spaced over the region, rather than on all of it.
            (The Trainer's ``limit_val_batches`` would take the first ones, which may all be from one file.)
        num_workers: Worker processes of each loader. Reading a window takes microseconds; 0 is rarely too few.

    Raises:
        ValueError: On construction, for a number out of range. In ``setup``, if the text gives some region not one
            window; in ``train_dataloader``, if it does not fill one batch.
        FileNotFoundError: In ``setup``, if ``path`` is missing or has no matching file.

    Example:
        >>> data = ByteText(context=32, batch_size=4, max_bytes=100_000)
        >>> data.setup("fit")
        >>> x, y = next(iter(data.train_dataloader()))
        >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
        (torch.Size([4, 32]), True)
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        pattern: str = "*.py",
        context: int = 128,
        batch_size: int = 16,
        seed: int = 0,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        max_bytes: int | None = 8 * 2**20,
        val_batches: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        counts = {"context": context, "batch_size": batch_size, "max_bytes": max_bytes, "val_batches": val_batches}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"ByteText({name}={value}): must be 1 or more.")
        for name, value in {"seed": seed, "num_workers": num_workers}.items():
            if value < 0:
                raise ValueError(f"ByteText({name}={value}): must be 0 or more.")
        if not (val_fraction > 0 and test_fraction > 0 and val_fraction + test_fraction < 1):
            raise ValueError(
                f"ByteText(val_fraction={val_fraction}, test_fraction={test_fraction}): both must be above 0, and their"
                " sum below 1, so that training keeps a share. The default is 0.05 each."
            )
        self.path = path
        self.pattern = pattern
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.max_bytes = max_bytes
        self.val_batches = val_batches
        self.num_workers = num_workers
        self.regions: dict[str, Tensor] = {}

    def setup(self, stage: str) -> None:
        """Read the text and cut it into ``regions``: ``train``, ``val`` and ``test``, each (N,) uint8."""
        if self.regions:  # a second stage of the same process
            return
        text = read_text(self.path, self.pattern, self.max_bytes)
        n_val, n_test = int(len(text) * self.val_fraction), int(len(text) * self.test_fraction)
        sizes = {"train": len(text) - n_val - n_test, "val": n_val, "test": n_test}
        source = "the standard library" if self.path is None else f"path={str(self.path)!r}"
        for name, size in sizes.items():
            if size < self.context + 1:
                raise ValueError(
                    f"ByteText({source}): of {len(text)} bytes the {name} region gets {size}, but one window needs"
                    f" context + 1 = {self.context + 1}. Use a longer text, a larger max_bytes (now {self.max_bytes}),"
                    " a larger share for the region, or a shorter context."
                )
        rank_zero_info(f"ByteText: {len(text):,} bytes from {source}; " + ", ".join(f"{k} {v:,}" for k, v in sizes.items()))
        self.regions = dict(zip(sizes, text.split(list(sizes.values())), strict=True))

    def train_dataloader(self) -> StreamLoader:
        """Shuffled training batches, this process's share."""
        windows = Windows(self.regions["train"], self.context)
        share = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
        per_step = self.batch_size * share["num_replicas"]
        if len(windows) < per_step:
            raise ValueError(
                f"ByteText: the training region has {len(windows)} windows of {self.context} bytes, but one step takes"
                f" batch_size={self.batch_size} in each of {share['num_replicas']} process(es), {per_step} in all."
                " Use a longer text, a larger max_bytes, a smaller batch_size, or a shorter context."
            )
        stream = WindowStream(windows, self.seed, **share)
        return StreamLoader(windows, sampler=stream, drop_last=True, **self._loader_options())

    def val_dataloader(self) -> DataLoader[Sample]:
        """Validation batches in order; at most ``val_batches`` of them."""
        at_most = None if self.val_batches is None else self.val_batches * self.batch_size
        return DataLoader(Windows(self.regions["val"], self.context, at_most), **self._loader_options())

    def test_dataloader(self) -> DataLoader[Sample]:
        """All test batches in order."""
        return DataLoader(Windows(self.regions["test"], self.context), **self._loader_options())

    def predict_dataloader(self) -> DataLoader[Sample]:
        """The test batches."""
        return self.test_dataloader()

    def _loader_options(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "pin_memory": torch.cuda.is_available(),  # copies to the GPU then overlap with its work
        }
