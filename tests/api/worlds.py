"""What the tests of the Python API train: the smallest shipped Stable Diffusion 3, for seconds."""

SIZES = {"size": 32, "steps": 3, "noise_window": "all_but_last", "lora": 2}
POLICY = {"sd3": {"path": "world:digits/sd3-test", **SIZES}}
TEXTS = [f"a {colour} {digit}" for colour in ("red", "blue") for digit in ("one", "two", "six")]
SETTINGS = {
    "policy": POLICY,
    "data": {"prompts": {"path": "prompts.txt", "held_out": 0.3}},
    "reward": {"jpeg_compressibility": 1.0},
    "objective": {"policy_gradient": {"clip_range": 1e-3}},
    "train": {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 2},
    "evaluate": {"prompts": 2, "num_samples": 2},
    "log": {"tensorboard": False},
}
QUIET = {"log.tensorboard": False, "evaluate.prompts": 2, "evaluate.num_samples": 2}
SMALL = {"iterations": 2, "prompts_per_iteration": 2, "group_size": 2, "overrides": QUIET}


def redness(image):
    """How much more red than green and blue a picture is, by its mean colour."""
    red, green, blue = image.resize((1, 1)).getpixel((0, 0))
    return (red - green - blue) / 255
