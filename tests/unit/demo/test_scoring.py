"""The judge: right facts count, wording does not; and the HTTP way of asking."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from demo.evaluate import HTTPAnswerer, compare, evaluate, mistakes
from demo.heldout import TASKS, Item, held_out, is_right


def judge(task, answer, reply):
    return is_right(Item("x", task, (), "?", answer), reply)


@pytest.mark.parametrize(
    ("task", "answer", "reply"),
    [
        ("colour", "The circle is red.", "It is red"),
        ("colour", "The object is orange.", "Orange."),
        ("shape", "The red object is a star.", "a star"),
        ("shape", "The red object is a cross.", "It shows crosses."),
        ("count", "There are three stars.", "3"),
        ("count", "There are no stars.", "There are 0 stars."),
        ("exists", "Yes, there is a star.", "yes"),
        ("word", "The word is HOUSE.", 'It says "HOUSE".'),
        ("place", "The star is in the centre.", "in the center"),
        ("position", "No, the star is left of the ring.", "No, the star is left of it."),
        ("check", "No, the star is red.", "No, the star is red."),
        ("multi", "The second picture has a star.", "The second picture has a star."),
    ],
)
def test_right_replies_are_right(task, answer, reply):
    assert judge(task, answer, reply)


@pytest.mark.parametrize(
    ("task", "answer", "reply"),
    [
        ("colour", "The circle is red.", "The circle is red and blue."),
        ("colour", "The circle is red.", "There is no circle."),
        ("shape", "The red object is a star.", "The red object is a heart."),
        ("count", "There are three stars.", "There are two stars."),
        ("exists", "Yes, there is a star.", "No, there is no star."),
        ("word", "The word is HOUSE.", "The word is HORSE."),
        ("word", "The word is HOUSE.", "The word is house."),
        ("place", "The star is at the top left.", "The star is at the top right."),
        ("place", "The star is at the top left.", "The star is at the top."),
        ("position", "Yes, the star is above the ring.", "No, the star is above the ring."),
        ("position", "The red star is higher.", "The red ring is higher."),
        ("position", "The star is above and left of the ring.", "The star is above the ring."),
        ("describe", "There is one object: a red star on the left.",
         "There is one object: a red star on the right."),
        ("multi", "The second picture has a red star.", "The first picture has a red star."),
        ("multi", "Yes, both pictures have a star.", "No, only the first picture has a star."),
        ("colour", "The circle is red.", ""),
    ],
)  # fmt: skip
def test_wrong_replies_are_wrong(task, answer, reply):
    assert not judge(task, answer, reply)


def test_the_set_covers_every_task_and_accepts_its_own_answers():
    items = list(held_out(90))
    assert {item.task for item in items} == set(TASKS)
    assert len({item.item_id for item in items}) == len(items)
    assert all(is_right(item, item.answer) for item in items)
    assert {len(item.images) for item in items} == {1, 2, 3}
    report = evaluate(lambda asked: [item.answer for item in items], items, show=False)
    assert set(report["accuracy"].values()) == {1.0}
    assert mistakes(report, items) == []


def test_answers_of_one_item_do_not_pass_for_another():
    items = [item for item in held_out(200) if item.task != "exists"]
    shifted = [item.answer for item in items[4:] + items[:4]]  # of another scene
    report = evaluate(lambda asked: shifted, items, show=False)
    assert max(report["accuracy"].values()) < 0.4


def test_comparison_counts_identical_answers():
    items = list(held_out(12))
    first = evaluate(lambda asked: [item.answer for item in items], items, show=False)
    replies = [items[0].answer + " ", *(item.answer for item in items[1:])]
    second = evaluate(lambda asked: replies, items, show=False)
    assert compare(first, second).startswith(f"{len(items) - 1} of {len(items)} answers")


class EchoServer(BaseHTTPRequestHandler):
    """Answers with what it was asked: the number of images and the question."""

    def do_GET(self):
        self.reply({"data": [{"id": "echo"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "echo"
        assert body["temperature"] == 0
        *images, text = body["messages"][0]["content"]
        assert all(
            part["image_url"]["url"].startswith("data:image/png;base64,iVBOR") for part in images
        )
        content = f"{len(images)} {text['text']}"
        self.reply({"choices": [{"message": {"content": content}}]})

    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_http_answers_come_back_in_order():
    server = ThreadingHTTPServer(("127.0.0.1", 0), EchoServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        items = list(held_out(12))
        answerer = HTTPAnswerer(f"http://127.0.0.1:{server.server_port}/", None, 4, 10.0)
        replies = list(answerer([(item.images, item.question) for item in items]))
    finally:
        server.shutdown()
        server.server_close()
    assert replies == [f"{len(item.images)} {item.question}" for item in items]
