"""Builds the other parts of the tiny Wan: tokenizer, UMT5 text encoder, and an autoencoder in
closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.worlds.moving import MOTIONS, WORDS, film, trained_on
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import WanPartsRecipe, WanTextRecipe, WanVaeRecipe
from mmrl.worlds.scenes import COLORS, DIGITS
from samplers.noise import Rng

LENGTH = 8  # tokens; a caption has 5 words and the end


def build_wan_parts(folder: Path, recipe: WanPartsRecipe, progress: Progress) -> None:
    """Train and save tokenizer, text encoder and autoencoder, each in the pipeline's subfolder."""
    tokenizer = umt5_tokenizer()
    encoder = new_umt5(recipe.text)
    teach_umt5(encoder, tokenizer, recipe.text, progress)
    vae = closed_form_vae(recipe.vae)
    with quiet_libraries():
        for name, part in {"tokenizer": tokenizer, "text_encoder": encoder, "vae": vae}.items():
            part.save_pretrained(folder / name)


def umt5_tokenizer() -> Any:
    """Make a T5Tokenizer (unigram) with one piece for every word, and single ASCII characters for
    all others."""
    from transformers import T5Tokenizer

    words = dict.fromkeys(
        ["a", *DIGITS, *COLORS, *MOTIONS, "moving", *" ".join(WORDS.values()).split()]
    )
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((f"▁{word}", -1.0) for word in words),
    ]
    pieces += [(letter, -10.0) for letter in ["▁", *map(chr, range(33, 127))]]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)


def new_umt5(recipe: WanTextRecipe) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(umt5_tokenizer()),
        d_model=recipe.width,
        d_kv=recipe.width // recipe.heads,
        d_ff=2 * recipe.width,
        num_layers=recipe.layers,
        num_heads=recipe.heads,
        dropout_rate=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return UMT5EncoderModel(config)


def teach_umt5(encoder: Any, tokenizer: Any, recipe: WanTextRecipe, progress: Progress) -> None:
    """Train until digit, colour and motion can be read linearly from the mean of the tokens; then
    freeze.

    Replaces the web-scale training of the real encoder. Held-out captions are left out.
    """
    prompts = trained_on()
    ids, mask = tokens(tokenizer, [p["text"] for p in prompts])
    sizes = (10, len(COLORS), len(MOTIONS))
    truth = torch.tensor(
        [
            [
                p["objects"][0]["digit"],
                list(COLORS).index(p["objects"][0]["color"]),
                list(MOTIONS).index(p["motion"]),
            ]
            for p in prompts
        ]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        head = nn.Linear(recipe.width, sum(sizes))
    weights = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, recipe.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    for step in progress.steps("text encoder", recipe.steps, optimizer, schedule):
        rows = (
            Rng.of(recipe.seed, "umt5").uniform(torch.arange(recipe.batch), (), step) * len(prompts)
        ).long()
        hidden = encoder(ids[rows], mask[rows]).last_hidden_state
        mean = (hidden * mask[rows, :, None]).sum(1) / mask[rows].sum(1, keepdim=True)
        parts = zip(head(mean).split(sizes, -1), truth[rows].T)
        losses = (F.cross_entropy(logits, target) for logits, target in parts)
        loss = sum(losses, start=torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    encoder.eval().requires_grad_(False)


def tokens(tokenizer: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, both [P, 8], as WanPipeline pads them."""
    batch = tokenizer(
        texts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt"
    )
    return batch.input_ids, batch.attention_mask


@torch.no_grad()
def embed_texts(encoder: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return [P, 8, width] as WanPipeline.encode_prompt does: zeros after the end."""
    ids, mask = tokens(tokenizer, texts)
    hidden: Tensor = encoder(ids, mask).last_hidden_state
    return hidden * mask[..., None]


def new_vae(recipe: WanVaeRecipe) -> Any:
    """Make the autoencoder with random weights."""
    from diffusers import AutoencoderKLWan

    channels = 3 * recipe.patch**2
    z = recipe.latent
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return AutoencoderKLWan(
            base_dim=z + 1,
            z_dim=z,
            dim_mult=[1],
            num_res_blocks=0,
            temperal_downsample=[],
            patch_size=recipe.patch,
            in_channels=channels,
            out_channels=channels,
            latents_mean=[0.0] * z,
            latents_std=[1.0] * z,
            scale_factor_temporal=1,
            scale_factor_spatial=recipe.patch,
        ).requires_grad_(False)


def closed_form_vae(recipe: WanVaeRecipe) -> Any:
    """Make an AutoencoderKLWan whose latents are the principal components of every square of a
    frame, deviation 1 on average.

    One level, no compression in time, every convolution with its middle tap alone. Residual blocks
    and attention add nothing. The components pass the last normalisation along with a constant so
    large that it scales them by a constant, and SiLU where it is the identity.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    z = recipe.latent
    vae = new_vae(recipe)
    known = trained_on()
    prompts = (known * (recipe.scenes // len(known) + 1))[: recipe.scenes]
    clips = film(prompts, Rng.of(recipe.seed, "wan vae")).frames.transpose(1, 2)
    # [N, channels]
    squares = (
        patchify(2 * clips - 1, patch_size=recipe.patch).movedim(1, -1).flatten(0, -2).double()
    )
    mean = squares.mean(0)
    variance, axes = torch.linalg.eigh((squares - mean).T @ (squares - mean) / len(squares))
    # [channels, z]
    axes = axes.flip(1)[:, :z]
    scale = variance.flip(0)[:z].mean().sqrt()
    _linear(
        vae.encoder,
        axes.T / scale,
        -(axes.T @ mean) / scale,
        torch.eye(2 * z, z).double(),
        _silence(z),
    )
    _linear(vae.decoder, torch.eye(z).double(), torch.zeros(z).double(), axes * scale, mean)
    for part in (vae.quant_conv, vae.post_quant_conv):
        part.weight.copy_(torch.eye(len(part.weight)).view(part.weight.shape))
        part.bias.zero_()
    return vae.eval()


# where SiLU is the identity, for latents up to 25; the constant beside them
OFFSET = 40.0
LARGE = 1e4


def _silence(z: int) -> Tensor:
    """Return the encoder's bias, [2z]: 0 for the means, a log-variance of nearly no variance."""
    return torch.cat([torch.zeros(z), torch.full((z,), -12.0)]).double()


def _linear(net: Any, enter: Tensor, start: Tensor, leave: Tensor, end: Tensor) -> None:
    """Turn a Wan encoder or decoder into the map x -> leave (enter x + start) + end, pointwise in
    space and time."""
    for name, weight in net.named_parameters():
        if name.endswith(("conv2.weight", "conv2.bias", "proj.weight", "proj.bias")):
            weight.zero_()  # the blocks are residual
    z = len(enter)
    net.conv_in.weight.zero_()
    net.conv_in.weight[:z, :, -1, 1, 1] = enter.float()  # the last tap in time is the present
    net.conv_in.bias.copy_(torch.cat([start.float() + OFFSET, torch.tensor([LARGE])]))
    length = (LARGE**2 + z * OFFSET**2) ** 0.5
    net.norm_out.gamma.fill_(length / (z + 1) ** 0.5)
    net.norm_out.gamma[z:] = 0
    net.conv_out.weight.zero_()
    net.conv_out.weight[:, :z, -1, 1, 1] = leave.float()
    net.conv_out.bias.copy_(end - OFFSET * leave.sum(1))


@torch.no_grad()
def encode_clips(vae: Any, clips: Tensor) -> Tensor:
    """Return the mean latents [B, C, f, h, w] of clips [B, 3, F, H, W] in 0..1, as the transformer
    sees them."""
    latents = torch.cat([vae.encode(2 * part - 1).latent_dist.mean for part in clips.split(64)])
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std
