"""The training shortcuts equal HF's way, and the trained model sees."""

import json
import warnings
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the import of transformers and torchvision
    from demo.hf import AutoProcessor, HFAnswerer

from demo.batches import IGNORED, BatchShape, Packer, Row, Vocabulary, build_batch, patches
from demo.dice import Dice
from demo.forward import PaddedForward
from demo.heldout import held_out, is_right
from demo.scenes import draw_scene, render
from demo.train import MODEL_DIR, build_model

SAMPLES = Path(__file__).parents[3] / "demo" / "samples"


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(MODEL_DIR / "tokenizer.json")


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(MODEL_DIR)


def test_patches_are_those_of_the_image_processor(processor):
    dice = Dice("patches")
    for _ in range(8):
        scene = draw_scene(dice)
        rows, grid = patches(scene)
        theirs = processor.image_processor(images=[render(scene)], return_tensors="pt")
        assert theirs["image_grid_thw"].tolist() == [[1, *grid]]
        first_frame = theirs["pixel_values"].unflatten(1, (3, 2, 256))[:, :, 0].flatten(1)
        ours = (torch.from_numpy(rows).float() - 127.5) / 127.5
        assert (ours - first_frame).abs().max() < 1e-6


@pytest.mark.parametrize("count", [1, 3])
def test_padded_forward_equals_the_plain_model(vocabulary, processor, count):
    model = build_model(MODEL_DIR, None, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08, generator=generator)
    scenes = [draw_scene(dice) for dice in [Dice(f"forward-{count}")] for _ in range(count)]
    cut = [patches(scene) for scene in scenes]
    pixels = torch.zeros(count, 256, 768, dtype=torch.uint8)
    row = Row()
    row.add_text(vocabulary("<|im_start|>user\n"), 0)
    for i, (rows, grid) in enumerate(cut):
        pixels[i, : len(rows)] = torch.from_numpy(rows)
        row.add_text(vocabulary("<|vision_start|>"), 0)
        row.add_image(i, grid, vocabulary.image_pad, 0)
        row.add_text(vocabulary("<|vision_end|>"), 0)
    start, asked = row.cursor, ("What is the word?", "How many red stars are there?")
    for segment, question in enumerate(asked, start=1):
        row.cursor = start
        row.add_text(vocabulary(f"{question}<|im_end|>\n<|im_start|>assistant\n"), segment)
    batch = {
        "ids": torch.tensor([row.ids]),
        "segments": torch.tensor([row.segments]),
        "slots": torch.tensor([row.slots]),
        "positions": torch.tensor([row.positions]).permute(2, 0, 1),
        "pixels": pixels,
        "grids": torch.tensor([grid for _, grid in cut]),
    }
    with torch.no_grad():
        ours = PaddedForward(model, torch.device("cpu")).eval().logits(batch)[0]
    for segment, question in enumerate(asked, start=1):
        content = [{"type": "image"}] * count + [{"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        inputs = processor(
            text=[text], images=[render(scene) for scene in scenes], return_tensors="pt"
        )
        mine = [i for i, s in enumerate(row.segments) if s in (0, segment)]
        assert [row.ids[i] for i in mine] == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            theirs = model(**inputs).logits[0]
        assert (ours[mine] - theirs).abs().max() < 1e-4


def test_batches_learn_whole_answers_only(vocabulary):
    shape = BatchShape(rows=(1, 3, 1, 1), clips=0)
    batch = build_batch(Dice("batch"), Packer(vocabulary, shape.length), shape)
    end = vocabulary.id_of("<|im_end|>")
    for row in range(shape.num_rows):
        labels, ids = batch["labels"][row], batch["ids"][row]
        learned = (labels != IGNORED).nonzero().flatten()
        assert len(learned)
        assert torch.equal(labels[learned], ids[learned + 1])
        last = [i for i in learned.tolist() if i + 1 not in set(learned.tolist())]
        assert all(labels[i] == end for i in last), "every answer is learned to its end"
        used = batch["segments"][row] >= 0
        assert (batch["slots"][row] >= 0).sum() == (ids[used] == vocabulary.image_pad).sum()


def test_the_shipped_model_sees():
    items = list(held_out(9))
    answerer = HFAnswerer(MODEL_DIR, "float32")
    replies = list(answerer([(item.images, item.question) for item in items]))
    wrong = [
        (item.question, item.answer, reply)
        for item, reply in zip(items, replies, strict=True)
        if not is_right(item, reply)
    ]
    assert not wrong
    assert "small demonstration model" in next(iter(answerer([((), "who are you?")])))
    for entry in json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8")):
        assert all((SAMPLES / name).is_file() for name in entry["files"])
        assert entry["questions"]
