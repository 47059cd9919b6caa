"""haystack-ai, with its integrations of Jina and Cohere."""

from cells import IMAGE, IMAGE_URL, report
from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from haystack_integrations.components.embedders.jina import (
    JinaDocumentEmbedder,
    JinaDocumentImageEmbedder,
    JinaTextEmbedder,
)
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from search_cells import (
    DOCUMENTS,
    KEY,
    MODEL,
    QUERIES,
    RANK,
    TEXT,
    VISION,
    distance,
    ranked,
    vectors,
)

TOLERANCE = 1e-5
KEYED = {"api_key": Secret.from_token(KEY), "model": MODEL}
TEXTS, QUERY = list(DOCUMENTS.values()), QUERIES["star"]


def documents():
    return [Document(content=text) for text in TEXTS]


def vectors_of_texts():
    """A pipeline that embeds the query and asks the store of documents."""
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    embedder = OpenAIDocumentEmbedder(**KEYED, api_base_url=f"{TEXT}/v1")
    embedded = embedder.run(documents())["documents"]
    assert distance([each.embedding for each in embedded], vectors(TEXTS)) < TOLERANCE
    store.write_documents(embedded)
    pipeline = Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(**KEYED, api_base_url=f"{TEXT}/v1"))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    found = pipeline.run({"embedder": {"text": TEXTS[7]}})["retriever"]["documents"]
    assert found[0].content == TEXTS[7] and abs(found[0].score - 1) < TOLERANCE


def jina_vectors():
    own = {**KEYED, "base_url": f"{TEXT}/v1/embeddings"}
    found = JinaTextEmbedder(**own, dimensions=8).run(QUERY)["embedding"]
    assert distance([found], vectors([QUERY], dimensions=8)) < TOLERANCE
    embedded = JinaDocumentEmbedder(**own).run(documents())["documents"]
    assert distance([each.embedding for each in embedded], vectors(TEXTS)) < TOLERANCE


def jina_images():
    embedder = JinaDocumentImageEmbedder(**KEYED, base_url=f"{VISION}/v1/embeddings")
    found = embedder.run([Document(meta={"file_path": str(IMAGE)})])["documents"]
    expected = vectors([{"image": IMAGE_URL}], VISION)
    assert distance([each.embedding for each in found], expected) < TOLERANCE


def jina_tasks():
    """A task is refused: the model's tasks are instructions."""
    try:
        JinaTextEmbedder(**KEYED, base_url=f"{TEXT}/v1/embeddings", task="retrieval.query").run("a")
    except Exception:
        return
    raise AssertionError("a task has been ignored")


def check_order(found):
    expected = ranked(QUERY, TEXTS)[: len(found)]
    assert [each.content for each in found] == [TEXTS[index] for index, _ in expected]
    assert distance([[each.score for each in found]], [[s for _, s in expected]]) < TOLERANCE


def jina_ranking():
    ranker = JinaRanker(**KEYED, base_url=f"{RANK}/v1/rerank", top_k=5)
    check_order(ranker.run(QUERY, documents())["documents"])


def cohere_ranking():
    ranker = CohereRanker(**KEYED, api_base_url=RANK, top_k=5)
    check_order(ranker.run(QUERY, documents())["documents"])


report(
    vectors=vectors_of_texts, jina_vectors=jina_vectors, jina_images=jina_images,
    jina_tasks=jina_tasks, jina_ranking=jina_ranking, cohere_ranking=cohere_ranking,
)  # fmt: skip
