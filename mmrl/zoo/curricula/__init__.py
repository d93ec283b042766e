"""Data sources that choose, change or weigh prompts by how they were rewarded."""

MODULES = (
    "augmentation",
    "budget",
    "curriculum",
    "selection",
    "self_instruct",
    "subsets",
    "suggestions",
    "tracked",
)
