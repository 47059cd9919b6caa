"""lm-eval: local-chat-completions; local-completions also with log-probabilities of prompts."""

import json
import os
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="no-key")

import lm_eval
from cells import MODEL, URL, report
from lm_eval.tasks import TaskManager

# What the demonstration model answers to small talk.
DOCUMENTS = (
    ("What is your name?", "I have no name of my own. I am Triptych's small demonstration model."),
    ("Thank you!", "You are welcome."),
    ("Hi!", "Hello! Send me a picture and ask me about it."),
)
directory = Path(tempfile.mkdtemp())
data = directory / "test.jsonl"
data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in DOCUMENTS))
COMMON = {
    "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
    "test_split": "test", "doc_to_text": "{{question}}",
}  # fmt: skip
GENERATE = COMMON | {
    "task": "generate", "output_type": "generate_until", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 60, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip
CHOOSE = COMMON | {
    "task": "choose", "output_type": "multiple_choice", "doc_to_target": 0,
    "doc_to_choice": "{{[answer, 'zzz']}}", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
for task in (GENERATE, CHOOSE):
    (directory / f"{task['task']}.yaml").write_text(json.dumps(task))  # JSON is YAML


def evaluate(model, endpoint, task, tokenizer_backend=None, **options):
    model_args = {
        "model": MODEL, "base_url": f"{URL}{endpoint}", "num_concurrent": 2, "max_retries": 1,
        "tokenized_requests": False, "tokenizer_backend": tokenizer_backend,
    }  # fmt: skip
    results = lm_eval.simple_evaluate(
        model=model, model_args=model_args, tasks=[task],
        task_manager=TaskManager(include_path=str(directory)), **options,
    )  # fmt: skip
    return results["results"][task]


def text():
    result = evaluate(
        "local-chat-completions", "/v1/chat/completions", "generate", apply_chat_template=True
    )
    assert result["exact_match,none"] == 1, result


def completions():
    result = evaluate("local-completions", "/v1/completions", "generate")
    assert 0 <= result["exact_match,none"] < 1, result  # the prompt has no chat template


def logprobs():
    """Of prompts; its remote tokenizer asks /tokenizer_info, /tokenize and /detokenize."""
    result = evaluate("local-completions", "/v1/completions", "choose", "remote")
    assert result["acc,none"] > 0.5, result  # by chance 0: the other choice is shorter


report(text=text, completions=completions, logprobs=logprobs)
