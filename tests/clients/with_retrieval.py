"""Evaluations of retrieval by sentence-transformers and mteb: with vectors of our server they find
what they find with those of sentence-transformers itself, for the same checkpoint.
"""

import mteb
import numpy as np
import torch
from cells import report
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from search_cells import DOCUMENTS, FILES, INSTRUCTION, QUERIES, RELEVANT, vectors
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

TOLERANCE = 1e-5
LOCAL = SentenceTransformer(FILES, device="cpu", model_kwargs={"dtype": torch.float32})


class Served(SentenceTransformer):
    """The model with the vectors of the server."""

    def encode(self, inputs, prompt_name=None, prompt=None, truncate_dim=None, **kwargs):
        prompt = prompt or self.prompts.get(prompt_name or "", "")
        assert prompt in ("", f"Instruct: {INSTRUCTION}\nQuery:"), prompt
        fields = {"instruction": INSTRUCTION} if prompt else {}
        if truncate_dim is not None:
            fields["dimensions"] = truncate_dim
        return torch.tensor(vectors(list(inputs), **fields))


SERVED = Served(FILES, device="cpu", model_kwargs={"dtype": torch.float32})


class Shapes(AbsTaskRetrieval):
    """The small set as a task of mteb."""

    metadata = TaskMetadata(
        name="Shapes", description="Which sentence names the thing?", type="Retrieval",
        dataset={"path": "triptych/shapes", "revision": "1"}, category="t2t", modalities=["text"],
        eval_splits=["test"], eval_langs=["eng-Latn"], main_score="ndcg_at_10",
    )  # fmt: skip

    def load_data(self, *args, **kwargs):
        self.queries = {"test": dict(QUERIES)}
        self.corpus = {"test": {name: {"text": text} for name, text in DOCUMENTS.items()}}
        self.relevant_docs = {"test": {q: dict.fromkeys(found, 1) for q, found in RELEVANT.items()}}
        self.data_loaded = True


def encoded():
    """The vectors themselves."""
    for method, texts in (("encode_query", QUERIES), ("encode_document", DOCUMENTS)):
        here = getattr(LOCAL, method)(list(texts.values()))
        there = getattr(SERVED, method)(list(texts.values())).numpy()
        assert here.shape == there.shape
        assert np.abs(here - there).max() < TOLERANCE


def evaluated():
    found = []
    for model in (LOCAL, SERVED):
        for truncate_dim in (None, 8):
            evaluator = InformationRetrievalEvaluator(
                QUERIES, DOCUMENTS, RELEVANT, truncate_dim=truncate_dim, write_csv=False
            )
            found.append(evaluator(model))
    here, here_cut, there, there_cut = found
    for expected, served in ((here, there), (here_cut, there_cut)):
        assert expected.keys() == served.keys()
        assert all(abs(expected[name] - served[name]) < TOLERANCE for name in expected)
    assert here != here_cut and 0 < here["cosine_ndcg@10"] < 1


def by_mteb():
    found = []
    for model in (LOCAL, SERVED):
        result = mteb.evaluate(
            model, Shapes(), cache=None, show_progress_bar=False, co2_tracker=False
        )
        (scores,) = result.task_results[0].scores["test"]
        found.append({name: value for name, value in scores.items() if isinstance(value, float)})
    here, there = found
    assert here.keys() == there.keys() and 0 < here["ndcg_at_10"] < 1
    for name in here:  # some are undefined for so few documents
        assert np.isclose(here[name], there[name], rtol=0, atol=TOLERANCE, equal_nan=True), name


report(vectors=encoded, evaluator=evaluated, mteb=by_mteb)
