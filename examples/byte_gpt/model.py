"""ByteGPT: a GPT-2-shaped transformer over bytes, written with no thought for precision.

That is its use here. The module creates fp32 parameters, runs plain torch operations, and asks for AdamW; which dtype
the parameters have, and what holds their fp32 masters, is the Trainer's business. Only one line cares about dtypes: the
logits go to fp32 before the cross-entropy, as they would in any careful model.

    bytes (B, T) -> token + position embedding -> n_layer x Block -> LayerNorm -> lm_head -> logits (B, T, 256)

    Block:  x = x + attention(LayerNorm(x));  x = x + mlp(LayerNorm(x))

A loss in nats per byte, divided by ln 2, is bits per byte: the size to which a compressor built on the model would
bring one byte. 8 is guessing, and initial weights give just over 8.
"""

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

VOCABULARY = 256

Batch = tuple[Tensor, Tensor]
"""``(x, y)``: bytes and the bytes that follow them, both (B, T) int64."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and the positions before it. (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each row of ``x`` (B, T, C)."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return out


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside. (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` (B, T, C) on its own."""
        out: Tensor = self.out(F.gelu(self.inner(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One pre-norm transformer block. (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, n_head)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the attention's and the MLP's contributions to the residual stream ``x`` (B, T, C)."""
        x = x + self.attention(self.norm_attention(x))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class BitsPerByte(Metric):
    """Mean loss over bytes, in bits.

    ``torchmetrics.MeanMetric`` would drop NaN losses and report the mean of the rest; here a NaN stays in the result.

    Example:
        >>> metric = BitsPerByte()
        >>> metric.update(torch.tensor(math.log(256.0)), 10)  # as bad as guessing
        >>> metric.compute()
        tensor(8.)
    """

    full_state_update = False
    higher_is_better = False
    nats: Tensor  # () fp32
    bytes: Tensor  # () int64

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("bytes", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nats_per_byte: Tensor, n_bytes: int) -> None:
        """Add ``n_bytes`` bytes whose mean loss is ``nats_per_byte``, a 0-dim tensor."""
        # Module.to(bf16) casts metric states too, and a bf16 sum soon stops growing: promote it while it is still zero.
        self.nats = self.nats.float() + nats_per_byte.detach().float() * n_bytes
        self.bytes += n_bytes

    def compute(self) -> Tensor:
        """Bits per byte over everything added since the last reset; 0-dim fp32."""
        return self.nats / self.bytes / math.log(2.0)


class ByteGPT(L.LightningModule):
    """Byte-level GPT with AdamW and a linear warm-up.

    Logged keys:

    =====================  =======================================  ==============
    key                    value                                    when
    =====================  =======================================  ==============
    ``train_loss``         cross-entropy in nats per byte, fp32     each step
    ``val_bits_per_byte``  mean over the validation bytes, in bits  each epoch end
    ``test_bits_per_byte`` mean over the test bytes, in bits        each epoch end
    =====================  =======================================  ==============

    A monitor that wants tokens rather than samples calls :meth:`count_tokens` with a batch.

    Args:
        n_layer: Number of blocks.
        n_head: Attention heads per block; must divide ``width``.
        width: Size of the residual stream.
        context: Longest sequence in bytes, T; sequences of a batch may be shorter.
        lr: Learning rate after warm-up.
        weight_decay: Decoupled weight decay of matrices (embeddings included). Biases and norms have none.
        betas: AdamW's decay rates of the first and second moment.
        warmup_steps: Optimizer steps over which the learning rate rises linearly to ``lr``, where it then stays; 0 for
            none.
        tie_weights: Let ``lm_head`` and the token embedding be one parameter, as in GPT-2.

    Raises:
        ValueError: A size below 1, a negative ``warmup_steps``, or a ``width`` that ``n_head`` does not divide.

    Example:
        >>> model = ByteGPT(n_layer=1, n_head=2, width=16, context=8)
        >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 256])
    """

    def __init__(
        self,
        *,
        n_layer: int = 4,
        n_head: int = 4,
        width: int = 256,
        context: int = 128,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 10,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {"n_layer": n_layer, "n_head": n_head, "width": width, "context": context}.items():
            if value < 1:
                raise ValueError(f"ByteGPT({name}={value}): must be at least 1.")
        if width % n_head:
            raise ValueError(
                f"ByteGPT(width={width}, n_head={n_head}): n_head must divide width."
                f" Use n_head={math.gcd(width, n_head)}, or width={n_head * math.ceil(width / n_head)}."
            )
        if warmup_steps < 0:
            raise ValueError(f"ByteGPT(warmup_steps={warmup_steps}): must be 0 (no warm-up) or more.")

        self.save_hyperparameters()
        # A subclass's own arguments are captured too; an object among them would poison the checkpoint.
        objects = [
            name for name, value in self.hparams.items() if not isinstance(value, bool | int | float | str | tuple | list)
        ]
        self.save_hyperparameters(ignore=objects)
        self.context = context
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])
        self.warmup_steps = warmup_steps

        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        if tie_weights:
            self.lm_head.weight = self.token_embedding.weight
        self._init_weights(n_layer)

        self.val_bits_per_byte = BitsPerByte()
        self.test_bits_per_byte = BitsPerByte()

    def _init_weights(self, n_layer: int) -> None:
        """GPT-2's initialisation (Radford et al. 2019, section 2.3).

        Matrices are normal with deviation 0.02, biases zero. The two projections that each block adds to the residual
        stream are divided by sqrt(2 n_layer), so that the stream's variance does not grow with depth.
        """
        nn.init.normal_(self.position_embedding, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / math.sqrt(2 * n_layer) if name.endswith(".out") else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Score the byte that follows each position.

        Args:
            x: Bytes, (B, T) int64 in 0..255, T at most ``context``.

        Returns:
            Logits, (B, T, 256), in the dtype the precision plugin computes in.

        Raises:
            ValueError: ``T`` is longer than ``context``.
        """
        time = x.shape[1]
        if time > self.context:
            raise ValueError(
                f"ByteGPT got sequences of {time} bytes, but its context is {self.context}."
                " Give the model and the data the same `context`."
            )
        # Added as a (T, C) slice, the table's gradient is one sum over the batch. A look-up of (B, T) positions would add B
        # rows one after the other, on a CPU in the table's own dtype.
        h = self.token_embedding(x) + self.position_embedding[:time]  # (B, T, C)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.lm_head(self.norm(h))
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats per byte; 0-dim, always fp32."""
        x, y = batch
        logits = self(x).float()  # a bf16 loss near 2 would have a resolution of 2^-6
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    @staticmethod
    def count_tokens(batch: Batch) -> int:
        """Tokens (here: bytes) in a batch of this process, B times T. There is no padding. Does not sync."""
        return batch[0].numel()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The training loss, fp32 nats per byte; logged as ``train_loss``."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one batch to ``val_bits_per_byte``."""
        self.val_bits_per_byte.update(self.loss(batch), self.count_tokens(batch))
        self.log("val_bits_per_byte", self.val_bits_per_byte, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one batch to ``test_bits_per_byte``."""
        self.test_bits_per_byte.update(self.loss(batch), self.count_tokens(batch))
        self.log("test_bits_per_byte", self.test_bits_per_byte)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest next byte at each position of a batch, (B, T) int64."""
        logits: Tensor = self(batch[0])
        return logits.argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Fused AdamW in two parameter groups, matrices (decayed) and the rest, with a per-step warm-up."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)
        # torch marks fused optimizers as able to unscale gradients inside step(). Stock Lightning then refuses gradient
        # clipping under "16-mixed" and "bf16-mixed". Unmarked, they are unscaled first and clipped like any other.
        optimizer._step_supports_amp_scaling = False
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, self._warmup_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _warmup_factor(self, applied_steps: int) -> float:
        """Share of ``lr`` for the step that follows ``applied_steps`` steps: 1/w, 2/w, ..., 1, 1, ..."""
        return min(1.0, (applied_steps + 1) / max(1, self.warmup_steps))
