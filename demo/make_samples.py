"""Write the sample images and clips, from seeds that neither training nor evaluation uses.

Run as `python -m demo.make_samples`; the clips need PyAV.
"""

from __future__ import annotations

import json
from pathlib import Path

from demo.clips import draw_clip, mp4_bytes
from demo.dice import Dice
from demo.scenes import draw_scene, png_bytes

FOLDER = Path(__file__).parent / "samples"
PICTURES = {  # name: seed, most things, chance of a word
    "shapes.png": ("sample-shapes-11", 6, 0.0),
    "count.png": ("sample-count-11", 6, 0.0),
    "word.png": ("sample-word-3", 4, 1.0),
    "night.png": ("sample-night-1", 5, 1.0),
    "first.png": ("sample-first-1", 3, 0.0),
    "second.png": ("sample-second-10", 3, 1.0),
}
CLIPS = {  # name: seed, seconds
    "move.mp4": ("sample-clip-14", 5.0),
    "changes.mp4": ("sample-clip-53", 5.0),
}
QUESTIONS = (
    (
        ("shapes.png",),
        (
            "What do you see?",
            "Where is the blue heart?",
            "Is the orange star left of the pink triangle?",
            "What colour is the circle?",
        ),
    ),
    (
        ("count.png",),
        ("How many stars are there?", "What is at the top left?", "Is there a red star?"),
    ),
    (
        ("word.png",),
        (
            "What word is printed on it?",
            "What shape is the orange thing?",
            "What letter does the word start with?",
        ),
    ),
    (
        ("night.png",),
        ("Describe the picture.", "How many rings are there?", "What is the leftmost object?"),
    ),
    (
        ("first.png", "second.png"),
        (
            "Which picture has a red cross?",
            "What is the word in the second picture?",
            "How many objects are there in total?",
            "What is the difference between the two pictures?",
        ),
    ),
    (
        ("move.mp4",),
        (
            "What happens?",
            "Which way does the green ring move?",
            "When does the blue ring appear?",
            "Where is the green ring at the end?",
        ),
    ),
    (
        ("changes.mp4",),
        (
            "What happens first?",
            "What colour does the purple ring turn?",
            "How many things happen?",
            "Does the brown heart move?",
        ),
    ),
    ((), ("Who are you?", "What can you do?")),
)


def main() -> None:
    """Command line: write the images, the clips and samples.json."""
    FOLDER.mkdir(exist_ok=True)
    for name, (seed, most, chance) in PICTURES.items():
        (FOLDER / name).write_bytes(png_bytes(draw_scene(Dice(seed), most, chance)))
    for name, (seed, seconds) in CLIPS.items():
        (FOLDER / name).write_bytes(mp4_bytes(draw_clip(Dice(seed), seconds)))
    samples = [{"files": list(files), "questions": list(asked)} for files, asked in QUESTIONS]
    path = FOLDER / "samples.json"
    path.write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
