"""Names and shapes of the published VQ autoencoders, written down from their definitions (VQGAN,
Esser et al. 2021)."""

MULT = (1, 1, 2, 2, 4)


def _conv(name, outside, inside, side):
    return {f"{name}.weight": (outside, inside, side, side), f"{name}.bias": (outside,)}


def _norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _residual(name, inside, outside):
    found = _norm(f"{name}.norm1", inside) | _conv(f"{name}.conv1", outside, inside, 3)
    found |= _norm(f"{name}.norm2", outside) | _conv(f"{name}.conv2", outside, outside, 3)
    return found | (_conv(f"{name}.nin_shortcut", outside, inside, 1) if inside != outside else {})


def _attention(name, width, fused):
    parts = {"qkv": 3 * width} if fused else {"q": width, "k": width, "v": width}
    found = _norm(f"{name}.norm", width) | _conv(f"{name}.proj_out", width, width, 1)
    for part, outside in parts.items():
        found |= _conv(f"{name}.{part}", outside, width, 1)
    return found


def _level(name, block, inside, outside, depth, attention, fused):
    found = {}
    for j in range(depth):
        found |= _residual(f"{name}.{block}.{j}", outside if j else inside, outside)
        found |= _attention(f"{name}.attn.{j}", outside, fused) if attention else {}
    return found


def _ends(name, first, last):
    found = _conv(f"{name}.conv_in", *first, 3) | _norm(f"{name}.norm_out", last[1])
    return found | _conv(f"{name}.conv_out", *last, 3)


def _middle(names, width, fused):
    return (
        _residual(names[0], width, width)
        | _attention(names[1], width, fused)
        | _residual(names[2], width, width)
    )


def llamagen():
    """VQ-16: levels of encoder and decoder are numbered as they run, attention is of three
    convolutions."""
    widths = [128 * m for m in MULT]
    found = _ends("encoder", (128, 3), (256, 512)) | _ends("decoder", (512, 256), (3, 128))
    for part in ("encoder", "decoder"):
        found |= _middle([f"{part}.mid.{i}" for i in range(3)], 512, fused=False)
    for i, width in enumerate(widths):
        name = f"encoder.conv_blocks.{i}"
        found |= _level(name, "res", widths[max(i - 1, 0)], width, 2, i == 4, fused=False)
        found |= _conv(f"{name}.downsample.conv", width, width, 3) if i < 4 else {}
    for i, width in enumerate(reversed(widths)):
        name = f"decoder.conv_blocks.{i}"
        found |= _level(name, "res", widths[min(5 - i, 4)], width, 3, i == 0, fused=False)
        found |= _conv(f"{name}.upsample.conv", width, width, 3) if i < 4 else {}
    found |= _conv("quant_conv", 8, 256, 1) | _conv("post_quant_conv", 256, 8, 1)
    return found | {"quantize.embedding.weight": (16384, 8), "quantize.codebook_used": (65536,)}


def var():
    """Levels are numbered by resolution in encoder and decoder alike, attention is of one
    convolution."""
    widths = [160 * m for m in MULT]
    found = _ends("encoder", (160, 3), (32, 640)) | _ends("decoder", (640, 32), (3, 160))
    for part in ("encoder", "decoder"):
        found |= _middle(
            [f"{part}.mid.{name}" for name in ("block_1", "attn_1", "block_2")], 640, fused=True
        )
    for i, width in enumerate(widths):
        down = f"encoder.down.{i}"
        up = f"decoder.up.{i}"
        found |= _level(down, "block", widths[max(i - 1, 0)], width, 2, i == 4, fused=True)
        found |= _level(up, "block", widths[min(i + 1, 4)], width, 3, i == 4, fused=True)
        found |= _conv(f"{down}.downsample.conv", width, width, 3) if i < 4 else {}
        found |= _conv(f"{up}.upsample.conv", width, width, 3) if i > 0 else {}
    found |= _conv("quant_conv", 32, 32, 3) | _conv("post_quant_conv", 32, 32, 3)
    for k in range(4):
        found |= _conv(f"quantize.quant_resi.qresi_ls.{k}", 32, 32, 3)
    return found | {
        "quantize.embedding.weight": (4096, 32),
        "quantize.ema_vocab_hit_SV": (10, 4096),
    }
