"""Adapters for training frameworks; each module imports its framework, so import it by name."""

from syncline.torch_entry import load

load("syncline.train.ddp", __name__)  # adapters need it; the error says why it does not load
