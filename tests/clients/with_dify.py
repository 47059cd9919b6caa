"""Dify's classes for models of OpenAI's API, of which its plugins are made."""

from cells import report
from dify_plugin.interfaces.model.openai_compatible.rerank import OAICompatRerankModel
from dify_plugin.interfaces.model.openai_compatible.text_embedding import OAICompatEmbeddingModel
from search_cells import DOCUMENTS, KEY, MODEL, QUERIES, RANK, TEXT, distance, ranked, vectors

TOLERANCE = 1e-5
TEXTS, QUERY = list(DOCUMENTS.values()), QUERIES["star"]
OF_TEXT = {"endpoint_url": f"{TEXT}/v1", "api_key": KEY, "context_size": "4096"}
OF_RANK = {"endpoint_url": f"{RANK}/v1", "api_key": KEY, "context_size": "4096"}


class Embedder(OAICompatEmbeddingModel):
    def _get_num_tokens_by_gpt2(self, text):
        return len(text)  # GPT-2's vocabulary would be downloaded


def embedding():
    model = Embedder([])
    model.validate_credentials(MODEL, OF_TEXT)
    found = model.invoke(MODEL, OF_TEXT, TEXTS[:6], user="somebody")
    assert distance(found.embeddings, vectors(TEXTS[:6])) < TOLERANCE
    assert found.usage.total_tokens > 0


def ranking():
    model = OAICompatRerankModel([])
    model.validate_credentials(MODEL, OF_RANK)
    found = model.invoke(MODEL, OF_RANK, QUERY, TEXTS, top_n=5).docs
    expected = ranked(QUERY, TEXTS)[:5]
    assert [(each.index, each.text) for each in found] == [(i, TEXTS[i]) for i, _ in expected]
    scores = [score for _, score in expected]  # Dify stretches them over 0 to 1
    stretched = [(score - scores[-1]) / (scores[0] - scores[-1]) for score in scores]
    assert distance([[each.score for each in found]], [stretched]) < 1e-3


report(vectors=embedding, ranking=ranking)
