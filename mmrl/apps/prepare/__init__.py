"""Holds programs to run before training, each ``python -m mmrl.apps.prepare.NAME``.

What prompts earn, what states they have, thoughts from answers, the shares of a mixture.
"""
