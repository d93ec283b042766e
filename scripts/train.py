"""Runs `mmrl train` as a file, for launchers that need one: accelerate launch scripts/train.py
CONFIG [key=value ...]"""

import sys

from mmrl.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
