"""Networks for the policy ``module``: a file as a user would write it."""

import torch
from torch import nn

from samplers.processes import Diffusion

SCHEDULE = {"clip_sample": False, "set_alpha_to_one": True, "timestep_spacing": "trailing"}


class Tiny(nn.Module):
    """A velocity of 3 x 4 x 4 pixels, given a label below 5."""

    def __init__(self):
        super().__init__()
        self.label = nn.Embedding(6, 8)
        self.body = nn.Sequential(nn.Linear(48 + 9, 32), nn.SiLU(), nn.Linear(32, 48))

    def forward(self, x, t, label):
        return self.body(torch.cat([x.flatten(1), t[:, None], self.label(label)], 1)).view_as(x)


class Embedded(nn.Module):
    """The same, given an embedding of two numbers, or nothing."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(48 + 3, 48)

    def forward(self, x, t, cond=None):
        cond = x.new_zeros(len(x), 2) if cond is None else cond
        return self.body(torch.cat([x.flatten(1), t[:, None], cond], 1)).view_as(x)


class DiT(nn.Module):
    """A class-conditional DiT of diffusers, which predicts noise and a variance."""

    def __init__(self, net, process):
        super().__init__()
        self.net = net
        self.process = process

    def forward(self, x, t, label):
        return self.net(x, timestep=self.process.timestep(t), class_labels=label).sample[
            :, : x.shape[1]
        ]


def dit():
    from diffusers import DDIMScheduler, DiTTransformer2DModel

    torch.manual_seed(0)
    net = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=4,
        norm_num_groups=4,
    )
    for parameter in net.parameters():
        if parameter.std() == 0:
            nn.init.normal_(parameter, std=0.2)
    alphas = DDIMScheduler(**SCHEDULE).alphas_cumprod.double()
    return DiT(net, Diffusion(alphas=alphas))
