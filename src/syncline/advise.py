"""``python -m syncline.advise script.py``: what ``syncline advise`` does, for launchers."""

import sys

from syncline.cli import main

if __name__ == "__main__":
    sys.argv[0] = "syncline.advise"
    main(["advise", *sys.argv[1:]])
