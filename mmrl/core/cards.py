"""Holds published figures of GPUs, and parses ``8xH100``.

Sources: NVIDIA's data sheets: H100 SXM5 (2023), H200 SXM (2024), A100 80 GB SXM (2022), L40S
(2023), HGX B200 (2024), the Ada GPU architecture paper (RTX 4090, table 2) and the RTX Blackwell
GPU architecture paper (RTX 5090, table 3). Dense bf16 with sums in fp32, no sparsity: headline
figures are often twice that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmrl.core.errors import UserError

GIGA = 10**9
TERA = 10**12
PER_MACHINE = 8  # cards in one machine
NETWORK = 50 * GIGA  # bytes a second per card between machines: 400 Gbit/s InfiniBand each
# share of the published numbers that code reaches: matrix products of large models on H100 0.6 to
# 0.75 of the peak (nanoGPT, torchtitan's tables), copies 0.8 to 0.9, collective calls 0.7 to 0.9
MATMUL_SHARE = 0.65
MEMORY_SHARE = 0.85
LINK_SHARE = 0.75


@dataclass(frozen=True)
class Card:
    """Describes a card: bytes of memory, operations and bytes a second."""

    name: str
    memory: float  # bytes
    half: float  # bf16 operations a second, dense
    single: float  # fp32 (TF32 if the card has it: torch's default for convolutions only)
    bandwidth: float  # bytes a second of its memory
    link: float  # bytes a second that one card can send to the others of its machine


def _card(name: str, gib: int, half: float, single: float, bandwidth: float, link: float) -> Card:
    return Card(name, gib * 2**30, half * TERA, single * TERA, bandwidth * GIGA, link * GIGA)


# NVLink 4 sends 450 GB/s in each direction, NVLink 3 300, NVLink 5 900; PCIe 4 x16 32, PCIe 5 64
CARDS = {
    card.name: card
    for card in (
        _card("A100-80", 80, 312, 19.5, 2039, 300),
        _card("H100", 80, 989.4, 66.9, 3352, 450),
        _card("H200", 141, 989.4, 66.9, 4800, 450),
        _card("B200", 180, 2250, 75, 8000, 900),
        _card("L40S", 48, 362, 91.6, 864, 32),
        _card("RTX4090", 24, 165.2, 82.6, 1008, 32),
        _card("RTX5090", 32, 209.5, 104.8, 1792, 64),
    )
}
ALIASES = {"A100": "A100-80", "4090": "RTX4090", "5090": "RTX5090"}


@dataclass(frozen=True)
class Devices:
    """Describes ``count`` cards of one kind."""

    count: int
    card: Card

    @property
    def machines(self) -> int:
        return -(-self.count // PER_MACHINE)

    @property
    def link(self) -> float:
        """Return the bytes a second per card of a collective call over all: the slowest link."""
        whole = self.card.link if self.machines == 1 else min(self.card.link, NETWORK)
        return whole * LINK_SHARE

    def __str__(self) -> str:
        return f"{self.count}x{self.card.name}"


def card_of(name: str) -> Card | None:
    """Find the card that a driver calls ``NVIDIA H100 80GB HBM3``; None if it is not in the
    table."""
    plain = re.sub(r"[^A-Z0-9]", "", name.upper())
    for key, card in CARDS.items():
        if re.sub(r"[^A-Z0-9]", "", key).removesuffix("80") in plain:
            return card
    return None


def devices(text: str) -> Devices:
    """Parse ``8xH100``, ``8 x H100`` or ``H100``. UserError names the known cards."""
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(.+)", text.strip())
    count, name = (int(match[1] or 1), match[2]) if match else (0, "")
    plain = name.upper().replace(" ", "").replace("_", "-").removeprefix("NVIDIA-")
    plain = ALIASES.get(plain, plain)
    if plain not in CARDS or count < 1:
        raise UserError(
            f"--devices {text}: write a number and a card such as 8xH100; cards are "
            f"{', '.join(CARDS)}"
        )
    return Devices(count, CARDS[plain])
