"""What the clients of search are asked. The models have random weights, so results are compared
with those of other ways to the same numbers.
"""

import json
import os
import urllib.request

TEXT, VISION, RANK = (
    os.environ[f"TRIPTYCH_{kind}"] for kind in ("TEXT_EMBEDDER", "VISION_EMBEDDER", "TEXT_RERANKER")
)
FILES = os.environ["TRIPTYCH_TEXT_EMBEDDER_FILES"]
MODEL = "tiny"
KEY = "no-key"
THINGS = ("circle", "square", "star", "heart", "moon", "cross")
COLOURS = ("red", "green", "blue", "white")
DOCUMENTS = {
    f"{colour}-{thing}": f"A {colour} {thing} lies on the table, and nothing else."
    for colour in COLOURS
    for thing in THINGS
}
QUERIES = {thing: f"Where is the {thing}?" for thing in THINGS}
RELEVANT = {thing: {f"{colour}-{thing}" for colour in COLOURS} for thing in THINGS}
INSTRUCTION = "find"  # that of the checkpoint's prompt "query"


def post(server, path, **fields):
    """Asks without a client."""
    request = urllib.request.Request(
        server + path,
        json.dumps({"model": MODEL, **fields}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def vectors(inputs, server=TEXT, **fields):
    return [
        each["embedding"] for each in post(server, "/v1/embeddings", input=inputs, **fields)["data"]
    ]


def ranked(query, documents):
    """Pairs of an index and a score, the best first."""
    results = post(RANK, "/v1/rerank", query=query, documents=documents)["results"]
    return [(each["index"], each["relevance_score"]) for each in results]


def distance(left, right):
    """The largest difference of two lists of vectors."""
    return max(
        abs(a - b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )
