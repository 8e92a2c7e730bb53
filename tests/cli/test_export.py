"""An exported model, used as its metadata says, gives what `keel predict` gives."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from data_fixtures import random_images, save_image
from PIL import ExifTags, Image, ImageOps

pytestmark = pytest.mark.end_to_end  # they train whole runs

CLASSES = ("ant", "bee")
KEYS = {"num-rounds": 1, "lr": 0.05, "local-epochs": 2, "min-samples": 1, "data-fraction": 1.0}


def prepared(path, about):
    """Pixels [1, C, H, W] of an image file, by what the metadata states alone."""
    image = Image.open(path)
    if about["exif_orientation"] == "applied":
        image = ImageOps.exif_transpose(image)
    if about["window"]:
        low, high = about["window"]
        values = np.round(255 * (np.asarray(image).astype(float) - low) / (high - low))
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    image = image.convert(about["channels"])
    image = image.resize((about["width"], about["height"]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32)
    return pixels[None, None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)[None]


def odd_files(folder, depth):
    """Files of odd sizes, modes and orientations, or of 16 bits."""
    folder.mkdir()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    grey, colour = random_images(51, 37), random_images(29, 64, 3)
    if depth == 16:
        save_image(folder / "deep.png", grey.astype(np.uint16) * 20)
        save_image(folder / "deep.tif", random_images(28, 90).astype(np.uint16) * 257)
    else:
        save_image(folder / "grey.png", grey)
        save_image(folder / "colour.png", colour)
        save_image(folder / "tiny.bmp", random_images(7, 5, 3))
        Image.fromarray(colour).save(folder / "turned.jpg", exif=exif)
        Image.fromarray(colour).quantize(9).save(folder / "palette.gif")
        Image.fromarray(np.dstack([colour, grey[:29, :1].repeat(64, 1)])).save(folder / "alpha.png")
    return sorted(folder.iterdir())


@pytest.mark.skipif(not find_spec("onnxscript"), reason="needs the extra `export`")
@pytest.mark.parametrize(
    ("channels", "depth", "keys"),
    [
        (3, 8, {"model": "cnn-fedintr"}),
        (1, 16, {"model": "cnn-fedreco", "normalise": "half"}),
    ],
)
def test_an_exported_model_gives_what_predict_gives(run, tmp_path, printed, channels, depth, keys):
    import onnx

    for split in ("train", "test"):
        for i, pixels in enumerate(random_images(20, 40, 44, seed=len(split))):
            bright = pixels // 2 + 120 * (i % 2)
            deep = bright.astype(np.uint16) * 16 + 5
            place = tmp_path / "data" / split / CLASSES[i % 2] / f"{i}.png"
            save_image(place, deep if depth == 16 else bright)
    folder = run(KEYS | {"source": f"folder:{tmp_path / 'data'}", "image-size": 32} | keys, 2)
    exported = tmp_path / "model.onnx"
    printed("export", str(folder), "--to", "onnx", "-o", str(exported))
    stored = {p.key: json.loads(p.value) for p in onnx.load(str(exported)).metadata_props}
    assert stored["classes"] == list(CLASSES)
    onnxruntime = pytest.importorskip("onnxruntime")  # here: it reports to its makers once imported
    onnxruntime.disable_telemetry_events()
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    files = odd_files(tmp_path / "files", depth)
    rows = json.loads(printed("predict", str(folder), *map(str, files), "--json"))
    assert len(rows) == len(files)
    for row in rows:
        pixels = prepared(row["image"], stored["preprocessing"])
        assert pixels.shape == (1, channels, 32, 32)
        logits, probabilities = session.run(["logits", "probabilities"], {"pixels": pixels})
        best = int(probabilities[0].argmax())
        assert row["class"] == stored["classes"][best]
        assert row["probability"] == pytest.approx(float(probabilities[0, best]), abs=1e-5)
        odds = np.exp(logits[0].astype(float))
        assert probabilities[0] == pytest.approx(odds / odds.sum(), abs=1e-5)


def test_predict_refuses_an_image_of_another_depth_by_name(run, tmp_path, refusal):
    folder = run({"num-rounds": 1, "local-epochs": 0})
    [deep, *_] = odd_files(tmp_path / "files", 16)
    assert str(deep) in refusal("predict", str(folder), str(deep))
