"""Videos that carry their sound: mmrl/core/media/sound.py, and what writes and remembers them."""

from __future__ import annotations

import hashlib
import pickle

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.media.sound import SoundVideos, sound_of, with_sound
from mmrl.scoring.cache import feed

ROWS = torch.tensor([2, 0])


def videos(rows=3):
    generator = torch.Generator().manual_seed(0)
    frames = torch.rand(rows, 2, 3, 4, 4, generator=generator)
    return with_sound(frames, torch.rand(rows, 2, 7, generator=generator) - 0.5, 16000)


def test_rows_keep_their_own_sound(subtests):
    for change, rows in [
        (lambda x: x[ROWS], ROWS),
        (lambda x: x[1:], slice(1, None)),
        (lambda x: x[2], 2),
        (lambda x: list(x)[1], 1),
        (lambda x: torch.cat([x[:1], x[1:]]), slice(None)),
        (lambda x: x.detach().cpu().clone(), slice(None)),
        (lambda x: x.to(torch.float64).float().clamp(0, 1), slice(None)),
        (lambda x: pickle.loads(pickle.dumps(x)), slice(None)),
    ]:
        with subtests.test(change=change, rows=rows):
            media = videos()
            result = change(media)
            assert isinstance(result, SoundVideos) and result.sampling_rate == 16000
            assert torch.equal(result.sound, media.sound[rows])
            plain = media.as_subclass(torch.Tensor)[rows]
            assert torch.equal(result.as_subclass(torch.Tensor), plain)


def test_what_is_no_video_of_them_has_no_sound(subtests):
    for change in [
        lambda x: x * 2,
        lambda x: x[:, 0],
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x, with_sound(x, x.sound, 8000)]),
    ]:
        with subtests.test(change=change):
            result = change(videos())
            assert type(result) is torch.Tensor
            with pytest.raises(UserError, match="reward 'clap' wants videos with their sound"):
                sound_of(result, "clap")


def test_equal_videos_of_other_sounds_are_others_to_a_cache():
    digests = set()
    for sound in (videos().sound, videos().sound + 0.1):
        digest = hashlib.sha256()
        feed(digest, with_sound(videos().as_subclass(torch.Tensor), sound, 16000)[0])
        digests.add(digest.hexdigest())
    assert len(digests) == 2
