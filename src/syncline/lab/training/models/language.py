"""Models of text: a two-layer LSTM and a small decoder-only transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LstmState = tuple[Tensor, Tensor]  # hidden and cell state, each of shape (layers, N, hidden)

WORD_VOCABULARY = 1000  # from this many tokens on they are words, and the larger sizes are used


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM layers with dropout between them, and a linear layer to the vocabulary.

    For words, the "medium" size of Zaremba et al. (650 units, dropout 0.5); the 1,500 units of the
    papers that gTop-k follows want a GPU. For characters, 200 units and dropout 0.2. The embedding
    and the output share their matrix (Press and Wolf), as those papers do.

    Source: gTop-k, section IV-A (LSTM-PTB).
    """

    def __init__(
        self, vocabulary: int, *, hidden: int | None = None, dropout: float | None = None
    ) -> None:
        """Build the size that suits the vocabulary, or with other units per layer and dropout."""
        super().__init__()
        words = vocabulary >= WORD_VOCABULARY
        hidden = (650 if words else 200) if hidden is None else hidden
        dropout = (0.5 if words else 0.2) if dropout is None else dropout
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, state: LstmState | None = None) -> tuple[Tensor, LstmState]:
        """Return the next tokens' logits, (N, T) -> (N, T, vocabulary), and the new state."""
        x, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.head(self.dropout(x)), state


WINDOW = 64


class TransformerLanguageModel(nn.Module):
    """Decoder-only, pre-norm, learnt positions; 4 blocks of 128 channels, or 256 for words."""

    mask: Tensor

    def __init__(
        self, vocabulary: int, *, width: int | None = None, layers: int = 4, dropout: float = 0.1
    ) -> None:
        """Build the size that suits the vocabulary, or another ``width``, a multiple of 4."""
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
