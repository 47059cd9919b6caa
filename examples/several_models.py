"""Several models behind one address: the same question to each of them.

Usage: python examples/several_models.py "Who are you?"

The header names the model for routers that do not read bodies, such as the Gateway API's.
"""

import os
import sys

from openai import OpenAI


def main() -> None:
    question = sys.argv[1]
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    for model in client.models.list():
        answer = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": question}],
            extra_headers={"X-Gateway-Model-Name": model.id},
            max_tokens=300,
        )
        print(f"{model.id}: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
