"""Faces: which one is compared, how it is cropped, and the message if there is none."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as nnf
from torchvision.transforms.v2 import functional as vision

from mmrl.core.errors import UserError
from rewards.images.detector import Detection, Detector
from rewards.images.face_identity import FACES, FaceIdentity
from tests.fixtures.tiny_image_rewards import TINY_OPTIONS, save_owl, save_yolos
from tests.rewards.test_image_rewards import pictures


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return TINY_OPTIONS["face_identity"](tmp_path_factory.mktemp("faces"))


@pytest.fixture(scope="module")
def reward(options):
    return FaceIdentity(**options, margin=0.0)


def largest(found):
    """By a loop: the face of the most area, of equal ones the most certain."""
    best, most = None, 0.0
    for detection in found:
        left, top, right, bottom = detection.box.tolist()
        if detection.name == "human face" and (right - left) * (bottom - top) > most:
            best, most = detection.box, (right - left) * (bottom - top)
    return best


def test_the_largest_faces_are_compared_by_the_models_own_embeddings(reward, options):
    """Cut out and resized by torchvision, embedded by timm."""
    media, references = pictures(4, 40, 48), pictures(4, 44, 44, seed=7)
    model = timm.create_model(f"local-dir:{options['model']}", pretrained=True).eval()

    def embedded(picture, box):
        left, top, right, bottom = box.tolist()
        side = max(right - left, bottom - top)
        edges = [(left + right - side) / 2, (top + bottom - side) / 2]
        first = [int(torch.tensor(edge).floor()) for edge in edges]
        last = [int(torch.tensor(edge + side).ceil()) for edge in edges]
        padded = vision.pad(picture, 99, padding_mode="edge")
        size = [last[1] - first[1], last[0] - first[0]]
        square = vision.crop(padded, first[1] + 99, first[0] + 99, *size)
        face = vision.resize(square, [32, 32], antialias=True)
        with torch.no_grad():
            return model(vision.normalize(face, [0.5] * 3, [0.5] * 3)[None])[0]

    expected = []
    for row, reference in zip(media, references, strict=True):
        boxes = [largest(reward.detector(picture[None])[0]) for picture in (row, reference)]
        pair = [embedded(p, box) for p, box in zip((row, reference), boxes, strict=True)]
        expected.append(nnf.cosine_similarity(*pair, dim=0))
    scores = reward(media, [{"reference": picture} for picture in references])
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert scores.std() > 0


def test_which_face_counts(options):
    reward = FaceIdentity(**(options | {"threshold": 0.5}))
    box = torch.tensor([0.0, 0.0, 4.0, 4.0])
    small, hat = Detection("human face", 0.9, box), Detection("hat", 0.9, box * 5)
    unsure = Detection("human face", 0.4, box * 4)
    flat = Detection("human face", 0.9, torch.tensor([3.0, 0.0, 3.0, 9.0]))
    assert torch.equal(reward.face([hat, unsure, flat, small]), box)
    large = Detection("human face", 0.6, box * 2)
    assert torch.equal(reward.face([small, large]), box * 2)
    assert reward.face([hat, unsure, flat]) is None


def test_a_picture_without_a_face_and_a_reference_without_one(options):
    reward = FaceIdentity(**(options | {"threshold": 1.0}), missing=-0.5)
    conditions = torch.eye(2, 16)
    assert reward.score(pictures(2), conditions).tolist() == [-0.5, -0.5]
    with pytest.raises(
        UserError, match="no face was found in a picture of 32 x 32 pixels in the f"
    ):
        reward(pictures(1), [{"reference": pictures(1)[0]}])


def test_detectors_that_know_no_faces_and_models_that_are_none(options, tmp_path):
    cats = save_yolos(tmp_path / "cats")
    with pytest.raises(UserError, match="knows no faces, but cat, computer mouse; take one"):
        FaceIdentity(**(options | {"detector": cats}))
    with pytest.raises(UserError, match="cannot load .* as a model of timm"):
        FaceIdentity(**(options | {"model": cats}))


def test_an_open_detector_is_asked_for_faces(tmp_path):
    detector = Detector(save_owl(tmp_path / "owl"), "cpu", names=FACES)
    found = detector(pictures(2, 40, 48))
    assert {detection.name for row in found for detection in row} == {"human face"}
    boxes = torch.stack([detection.box for row in found for detection in row])
    assert (boxes >= 0).all() and (boxes[:, 2] <= 48).all() and (boxes[:, 3] <= 40).all()
