"""Stands for LTX-2, which ``policy: pipeline`` replays, where it is looked at without weights: the
networks and the sizes of diffusers' LTX2Pipeline, a pass of both states, no text and no sound."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.policies.diffusion.models.ltx import LTX


class LTX2(LTX):
    """Makes the passes of LTX2Pipeline. The numbers of the sound, a few in a hundred, go through
    the network beside the video's, and are not counted in what a rollout stores."""

    pipeline = "LTX2Pipeline"
    network = "LTX2VideoTransformer3DModel"
    autoencoder = "AutoencoderKLLTX2Video"

    def __init__(self, path: str, fps: float = 24.0, text_length: int = 1024, **options: Any):
        super().__init__(path, fps=fps, text_length=text_length, **options)

    def sound_tokens(self) -> int:
        """Count the latents of the sound, one token each, as the pipeline does."""
        config = self.config
        per_second = config.audio_sampling_rate / config.audio_hop_length
        seconds = self.frames / self.fps
        tokens: int = round(seconds * per_second / config.audio_scale_factor)
        return tokens

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        frames, height, width = x.shape[2:]
        sound = x.new_zeros(len(x), self.sound_tokens(), self.config.audio_in_channels)
        text = self.cast(cond["text"])
        video: Tensor = self.active()(
            hidden_states=self.cast(x.flatten(2).transpose(1, 2)),
            audio_hidden_states=self.cast(sound),
            encoder_hidden_states=text,
            audio_encoder_hidden_states=text,
            timestep=1000 * t,
            sigma=1000 * t,
            encoder_attention_mask=cond["mask"],
            audio_encoder_attention_mask=cond["mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=self.fps,
            audio_num_frames=self.sound_tokens(),
            return_dict=False,
        )[0]
        output: Tensor = video.transpose(1, 2).unflatten(2, (frames, height, width))
        return output
