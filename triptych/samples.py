"""The sample images that the demonstration shows."""

import json
from dataclasses import dataclass
from pathlib import Path

SAMPLES = Path(__file__).resolve().parents[1] / "demo" / "samples"


@dataclass(frozen=True, slots=True)
class Sample:
    """Some images, shown together (or none), and what to ask about them."""

    images: tuple[Path, ...]
    questions: tuple[str, ...]


def load_samples(directory: Path = SAMPLES) -> list[Sample]:
    """The samples that `samples.json` lists.

    Raises:
        ValueError: the file does not say what it should, or an image is missing.
    """
    samples: list[Sample] = []
    try:
        for entry in json.loads((directory / "samples.json").read_text()):
            images = tuple(directory / name for name in entry["files"])
            if missing := [path.name for path in images if not path.is_file()]:
                raise ValueError(f"missing image {', '.join(missing)}")
            samples.append(Sample(images, tuple(entry["questions"])))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{directory / 'samples.json'}: {error}") from error
    return samples
