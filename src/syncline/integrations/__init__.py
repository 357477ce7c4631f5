"""Adapters for training frameworks; each module imports its framework, so import it by name."""

from syncline.torch_entry import load

load("syncline.train.ddp", __name__)  # an adapter needs it, and this says why there is none
