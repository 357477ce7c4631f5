"""Small decoder-only transformer language model (pre-norm, learnt positions)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.training.models.spec import TextModel

__all__ = ["MODEL", "TransformerLanguageModel"]

WORD_VOCABULARY = 1000
"""From this many tokens on, tokens are taken for words and the larger sizes are used."""

WINDOW = 64
LAYERS = 4


class TransformerLanguageModel(nn.Module):
    """Four blocks of causal self-attention; 128 channels for characters, 256 for words."""

    mask: Tensor

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int | None = None,
        layers: int = LAYERS,
        dropout: float = 0.1,
    ) -> None:
        """Build a model of the size for the vocabulary, or of another one.

        Args:
            vocabulary: number of tokens.
            width: channels, a multiple of 4; None: as said above.
            layers: blocks.
            dropout: share of channels that is dropped.
        """
        super().__init__()
        if width is None:
            width = 256 if vocabulary >= WORD_VOCABULARY else 128
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(WINDOW, width)
        block = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=4 * width,
            dropout=dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens; (N, T) -> (N, T, vocabulary), T at most 64."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        x = x + self.position(torch.arange(length, device=tokens.device))
        x = self.blocks(x, mask=self.mask[:length, :length], is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


MODEL = TextModel(
    name="transformer",
    summary="decoder-only transformer language model; 5.7 M parameters for Penn Treebank",
    build=TransformerLanguageModel,
    carries_state=False,
    window=WINDOW,
)
