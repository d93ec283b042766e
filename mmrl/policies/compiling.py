"""Checks the name of a backend of torch.compile before anything is compiled."""

from __future__ import annotations

import torch

from mmrl.core.errors import UserError


def check_backend(backend: str) -> None:
    """Raise UserError where torch has no such backend; it lists those for users, though debugging
    backends may be chosen too."""
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise UserError(
            f"policy option compile: no backend {backend!r}; there are "
            f"{', '.join(sorted(torch._dynamo.list_backends()))}"
        )
