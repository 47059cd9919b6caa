"""A video clip: the answer as it is written, and what the clip cost.

Usage: python examples/clip.py demo/samples/move.mp4 "What happens?"
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

FRAMES_PER_SECOND = 2


def main() -> None:
    clip, question = Path(sys.argv[1]), sys.argv[2]
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    kind = mimetypes.guess_type(clip)[0]
    url = f"data:{kind};base64,{base64.b64encode(clip.read_bytes()).decode()}"
    # OpenAI's API has no videos. This part of a message is vLLM's.
    video = {"type": "video_url", "video_url": {"url": url, "fps": FRAMES_PER_SECOND}}
    messages: list[Any] = [{"role": "user", "content": [video, {"type": "text", "text": question}]}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        temperature=0,
        max_tokens=300,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if usage := chunk.usage:
            print(f"\n{usage.prompt_tokens} tokens of prompt, {usage.completion_tokens} of answer")


if __name__ == "__main__":
    main()
