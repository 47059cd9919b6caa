"""A folder of images: one question about each, eight at a time, and a table of the answers.

Usage: python examples/folder.py demo/samples "What do you see?" > answers.tsv

An image that cannot be read does not stop the others. The server keeps the embeddings of images, so
a second question about the same folder needs no encoding.
"""

import base64
import mimetypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import APIError, OpenAI

AT_A_TIME = 8
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}


def ask(client: OpenAI, model: str, image: Path, question: str) -> str:
    """Returns the answer about one image, or the reason why there is none."""
    kind = mimetypes.guess_type(image)[0]
    url = f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode()}"
    try:
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
            temperature=0,
            max_tokens=300,
        )
    except APIError as error:
        return f"ERROR: {error.message}"
    return answer.choices[0].message.content or ""


def main() -> None:
    folder, question = Path(sys.argv[1]), sys.argv[2]
    images = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        answers = threads.map(lambda image: ask(client, model, image, question), images)
        for image, answer in zip(images, answers, strict=True):
            print(image.name, " ".join(answer.split()), sep="\t", flush=True)


if __name__ == "__main__":
    main()
