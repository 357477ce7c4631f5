"""``python -m syncline.run script.py``: what ``syncline run`` does, for launchers of modules."""

import sys

from syncline.cli import main

if __name__ == "__main__":
    sys.argv[0] = "syncline.run"
    main(["run", *sys.argv[1:]])
