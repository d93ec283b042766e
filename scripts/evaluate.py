"""Runs `mmrl evaluate` as a file: accelerate launch scripts/evaluate.py CONFIG [key=value ...]"""

import sys

from mmrl.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "evaluate")
    main()
