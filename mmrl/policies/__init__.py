"""Policies: generative models behind one contract. Those of single families are in
``mmrl.zoo.models``."""

MODULES = ("vlm.policy",)
