"""Holds programs to run before training, each ``python -m mmrl.tools.NAME``.

What prompts earn, what states they have, thoughts from answers, the shares of a mixture.
"""
