"""Clips: the same everywhere, truthful, and trained on exactly as HF's processor shows them."""

import hashlib
import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the import of transformers and torchvision
    from demo.hf import AutoProcessor, VideoMetadata, decoded

from demo.batches import (
    IGNORED,
    BatchShape,
    Packer,
    Row,
    Vocabulary,
    build_batch,
    clip_patches,
    timestamps,
    training_clip,
)
from demo.clip_questions import CLIP_TASKS, clip_turn
from demo.clips import DIRECTIONS, draw_clip, frames, mp4_bytes, sampled_indices, scene_at
from demo.dice import Dice
from demo.forward import PaddedForward
from demo.heldout import held_out_clips, is_right
from demo.train import MODEL_DIR, build_model


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(MODEL_DIR / "tokenizer.json")


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(MODEL_DIR)


def clips(count, seed="test"):
    dice = Dice(seed)
    return [draw_clip(dice) for _ in range(count)]


def named(scene):
    return {f"{thing.colour} {thing.shape}": (thing.row, thing.col) for thing in scene.things}


def test_events_are_what_the_frames_show():
    for clip in clips(300):
        assert 2.0 <= clip.seconds < 6.2
        before, after = named(scene_at(clip, 0.0)), named(scene_at(clip, clip.seconds))
        assert before
        assert after
        seconds = [event.second for event in clip.events]
        assert seconds == sorted(set(seconds))
        for event in clip.events:
            thing = clip.things[event.thing]
            noun = f"{thing.colour} {thing.shape}"
            assert abs(event.start - event.second) <= 0.15
            assert event.start + event.length < clip.seconds - 1 / clip.rate
            if event.kind == "move":
                down, right = (event.cells * step for step in DIRECTIONS[event.direction])
                assert after[noun] == (before[noun][0] + down, before[noun][1] + right)
            elif event.kind == "turn":
                assert after[f"{event.colour} {thing.shape}"] == before[noun]
            else:
                assert (noun in before, noun in after) == (
                    (False, True) if event.kind == "appear" else (True, False)
                )
        changed = {event.thing for event in clip.events}
        for index, thing in enumerate(clip.things):
            if index not in changed:
                cell = before[f"{thing.colour} {thing.shape}"]
                assert cell == after[f"{thing.colour} {thing.shape}"] == (thing.row, thing.col)
        for moment in np.linspace(0, clip.seconds, 12):
            cells = [(thing.row, thing.col) for thing in scene_at(clip, moment).things]
            assert len(cells) == len(set(cells))


def test_equal_seeds_draw_equal_clips():
    for first, second in zip(clips(3, "same"), clips(3, "same"), strict=True):
        assert first == second
        assert np.array_equal(frames(first), frames(second))
    clip = clips(1)[0]
    assert np.array_equal(frames(clip, [0, 9]), frames(clip)[[0, 9]])
    assert frames(clip).shape == (clip.num_frames, clip.height, clip.width, 3)


def test_an_mp4_file_shows_the_clip():
    clip = clips(1)[0]
    file = mp4_bytes(clip)
    assert len(file) <= 50_000
    shown, drawn = decoded(file), frames(clip)
    assert shown.shape == drawn.shape
    assert np.abs(shown.astype(int) - drawn).mean() < 6


def test_held_out_clips_and_questions_never_change():
    digest = hashlib.sha256()
    for item in held_out_clips(60):
        digest.update(f"{item.item_id} {item.task} {item.images} {item.question}\n".encode())
    assert digest.hexdigest() == (
        "e90d349a2d8de4248c398f0c6480a3d9c81d3ee6fb5a0d699f6323c3a34fa8f5"
    )
    items = list(held_out_clips())
    assert len(items) == 1000
    assert len({item.images for item in items}) == 500
    assert {item.task for item in items} == set(CLIP_TASKS)
    assert all(is_right(item, item.answer) for item in items)
    others = [item.answer for item in items[18:] + items[:18]]  # of the same task mostly
    passed = sum(is_right(item, other) for item, other in zip(items, others, strict=True))
    assert passed < 0.3 * len(items)


@pytest.mark.parametrize(("task", "share"), [("direction", 0.7), ("story", 0.8)])
def test_questions_have_various_answers(task, share):
    dice, answers = Dice("answers"), []
    while len(answers) < 100:
        turn = clip_turn(dice, draw_clip(dice))
        if turn is not None and turn.task == task:
            answers.append(turn.answer)
    assert len(set(answers)) > share * len(answers)


def test_patches_and_frames_are_those_of_the_video_processor(processor):
    for clip in clips(6, "patches"):
        video = frames(clip)
        theirs = processor.video_processor(
            videos=[video],
            video_metadata=[VideoMetadata(total_num_frames=len(video), fps=float(clip.rate))],
            return_metadata=True,
            return_tensors="pt",
        )
        indices = sampled_indices(clip)
        assert theirs["video_metadata"][0].frames_indices.tolist() == indices
        rows, grid = clip_patches(video[indices])
        assert theirs["video_grid_thw"].tolist() == [[len(rows), *grid]]
        ours = (torch.from_numpy(rows).float() - 127.5) / 127.5
        assert (ours.flatten(0, 1) - theirs["pixel_values_videos"]).abs().max() < 1e-6


def test_padded_forward_equals_the_plain_model(vocabulary, processor):
    model = build_model(MODEL_DIR, MODEL_DIR, seed=0).eval()
    dice = Dice("forward")
    clip, indices = training_clip(dice, 3)
    shown = frames(clip, indices)
    rows, grid = clip_patches(shown)
    row = Packer(vocabulary, 1).pack_clip(  # too short for any answer: the prefix alone
        Dice("prefix"), clip, timestamps(indices, clip.rate), grid, 0
    )
    start, asked = row.cursor, ("What happens?", "Which way does the red star move?")
    assert set(row.segments) == {0}
    for segment, question in enumerate(asked, start=1):
        row.cursor = start
        row.add_text(vocabulary(f"{question}<|im_end|>\n<|im_start|>assistant\n"), segment)
    pixels = torch.zeros(len(rows), 144, 1536, dtype=torch.uint8)
    pixels[:, : rows.shape[1]] = torch.from_numpy(rows)
    batch = {
        "ids": torch.tensor([row.ids]),
        "segments": torch.tensor([row.segments]),
        "slots": torch.tensor([row.slots]),
        "positions": torch.tensor([row.positions]).permute(2, 0, 1),
        "clip_pixels": pixels,
        "clip_grids": torch.tensor([grid] * len(rows)),
    }
    with torch.no_grad():
        ours = PaddedForward(model, torch.device("cpu")).eval().logits(batch)[0]
    for segment, question in enumerate(asked, start=1):
        content = [{"type": "video"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        metadata = VideoMetadata(
            total_num_frames=clip.num_frames, fps=float(clip.rate), frames_indices=indices
        )
        inputs = processor(
            text=[text],
            videos=[shown],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
        mine = [i for i, s in enumerate(row.segments) if s in (0, segment)]
        assert [row.ids[i] for i in mine] == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            theirs = model(**inputs).logits[0]
        assert (ours[mine] - theirs).abs().max() < 1e-4


def test_batches_hold_clips_and_images(vocabulary):
    shape = BatchShape(rows=(1, 1, 1, 0), clips=5)
    batch = build_batch(Dice("batch"), Packer(vocabulary, shape.length), shape)
    assert len(batch["clip_pixels"]) == len(batch["clip_grids"]) == 20
    for row in range(shape.num_rows):
        ids, used = batch["ids"][row], batch["segments"][row] >= 0
        assert (batch["labels"][row] != IGNORED).any()
        pads = (ids == vocabulary.image_pad) | (ids == vocabulary.video_pad)
        assert (batch["slots"][row] >= 0).sum() == pads[used].sum()
    assert batch["slots"].max() < (shape.num_images + 20) * 64


def test_rows_start_with_the_time_of_each_pair_of_frames(vocabulary):
    row = Row()
    assert timestamps([0, 5, 10], 10) == [0.25, 1.0]
    row.add_text(vocabulary("<0.2 seconds>"), 0)
    assert len(row.ids) == 7
