"""Holds programs to run before training, each ``python -m mmrl.apps.prepare.NAME``.

Rewards of prompts, their hidden states, thoughts from answers, the weights of a mixture.
"""
