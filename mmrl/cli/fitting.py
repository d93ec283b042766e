"""Does ``mmrl fit-head``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.core.errors import UserError
from mmrl.core.files import check_writable, on_disk, whole_folder

if TYPE_CHECKING:
    from rewards.heads.encoders import Features, Kind, Pool
    from rewards.heads.fit import Recipe

CLIP = "ViT-L-14/openai"  # as in LAION's aesthetic predictor


@dataclass(frozen=True)
class EncoderChoice:
    """Names what embeds the samples: the options of ``load_encoder``, as ``head.json`` keeps
    them."""

    kind: Kind = "clip"
    model: str = CLIP
    features: Features = "media"
    pool: Pool = "mean"


def choose_encoder(
    clip: str | None, vision: str | None, text: str | None, join_text: bool, pool: Pool
) -> EncoderChoice:
    """Choose one of the three models, by default CLIP ViT-L/14. UserError for more than one."""
    models: dict[Kind, str | None] = {"clip": clip, "vision": vision, "text": text}
    named = [(kind, model) for kind, model in models.items() if model]
    if len(named) > 1:
        raise UserError("--clip, --vision and --text-model: give one of them")
    kind, model = named[0] if named else ("clip", CLIP)
    return EncoderChoice(kind, model, "media_and_text" if join_text else "media", pool)


def fit_head(
    data: Path, folder: Path, choice: EncoderChoice, recipe: Recipe, device: str = "auto"
) -> str:
    """Fit heads and write them to ``folder``; returns the measured accuracy in a sentence.

    Raises UserError before a model is loaded if the folder or the data cannot be used.
    """
    from rewards.heads import fit as fitting
    from rewards.heads.encoders import load_encoder
    from rewards.heads.ratings import read_ratings

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} exists and is not empty; name a new folder")
    check_writable(folder)
    ratings = read_ratings(data, texts=choice.kind == "text")
    fitting.split(ratings.groups, recipe)
    named = asdict(choice)
    encoder = load_encoder(**named, device=device)
    with on_disk(folder), whole_folder(folder) as draft:
        measured = fitting.fit_head(ratings, draft, encoder, named, recipe)
    sentences = "\n".join(figure.sentence() for figure in measured)
    return f"{sentences}\nuse it as reward: {{fitted_head: {{path: {folder}}}}}"
