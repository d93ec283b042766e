"""Does ``mmrl fit-head``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.files import check_writable, on_disk, whole_folder

CLIP = "ViT-L-14/openai"


@dataclass(frozen=True)
class FeatureChoice:
    """Names the model of picture features, from open_clip or transformers; by default CLIP
    ViT-L/14, as in LAION's aesthetic predictor."""

    clip: str | None
    vision: str | None
    device: str = "auto"


def fit_head(
    data: Path,
    folder: Path,
    choice: FeatureChoice,
    hidden: tuple[int, ...],
    held_out: float,
    seed: int,
) -> str:
    """Fit a head and write it to ``folder``; returns the measured accuracy in a sentence.

    Raises UserError before a model is loaded if the folder or the data cannot be used.
    """
    from rewards.heads import fit_head as fitting
    from rewards.heads.fitted_head import PictureFeatures
    from rewards.heads.ratings import read_ratings

    if choice.clip and choice.vision:
        raise UserError("--clip and --vision: give one of the two")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} exists and is not empty; name a new folder")
    check_writable(folder)
    recipe = fitting.HeadRecipe(hidden, held_out=held_out, seed=seed)
    ratings = read_ratings(data)
    fitting.split(ratings.groups, recipe)
    if choice.vision:
        features = PictureFeatures("vision", choice.vision, device=choice.device)
    else:
        features = PictureFeatures("clip", choice.clip or CLIP, device=choice.device)
    with on_disk(folder), whole_folder(folder) as draft:
        measured = fitting.fit_head(ratings, draft, features, recipe)
    return f"{measured.sentence()}\nuse it as reward: {{fitted_head: {{path: {folder}}}}}"
