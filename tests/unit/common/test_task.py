"""The task of a checkpoint: read from its files, or named, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.families import read_spec
from services.common.model_spec import ModelSpecError, SearchSpec, UnsupportedOption
from tests.search_checkpoints import (
    EMBED_FILES,
    RERANKER_CARD,
    hybrid_late_config,
    late_config,
    make_reranker,
    write_files,
)
from tests.tiny_tokenizer import write_model_directory, write_text_model_directory

MODULES: list[dict[str, Any]] = EMBED_FILES["modules.json"]  # type: ignore[assignment]
SCORE = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"},
    {
        "idx": 1,
        "name": "1",
        "path": "1_LogitScore",
        "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    },
]


@pytest.fixture(params=[write_text_model_directory, write_model_directory])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param(tmp_path / "model")


def test_a_chat_model_generates(directory: Path) -> None:
    spec = read_spec(directory)
    assert (spec.task, spec.search) == ("generate", None)


def test_a_pooling_of_the_last_token_makes_vectors(directory: Path) -> None:
    spec = read_spec(write_files(directory, EMBED_FILES))
    assert (spec.task, spec.search) == ("embed", SearchSpec(task="embed"))


def test_a_pooling_without_modules_makes_vectors(directory: Path) -> None:
    file = "1_Pooling/config.json"
    assert read_spec(write_files(directory, {file: EMBED_FILES[file]})).task == "embed"


def test_a_pooling_may_be_named(directory: Path) -> None:
    files = EMBED_FILES | {"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}
    assert read_spec(write_files(directory, files)).task == "embed"


def test_a_logit_score_ranks_by_its_tokens(directory: Path) -> None:
    files = {
        "modules.json": SCORE,
        "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 5},
    }
    spec = read_spec(write_files(directory, files))
    assert spec.search == SearchSpec(task="rank", true_token_id=7, false_token_id=5)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_card_of_a_reranker_ranks_by_yes_and_no(directory: Path, newline: str) -> None:
    make_reranker(directory)
    (directory / "README.md").write_text(RERANKER_CARD, newline=newline)
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert read_spec(directory).search == SearchSpec(
        task="rank", true_token_id=vocab["yes"], false_token_id=vocab["no"]
    )


@pytest.mark.parametrize(
    "card",
    ["pipeline_tag: text-ranking\n", "---\nlicense: mit\n---\npipeline_tag: text-ranking\n"],
)
def test_a_card_without_the_tag_in_its_front_matter_says_nothing(
    directory: Path, card: str
) -> None:
    (directory / "README.md").write_text(card)
    assert read_spec(directory).task == "generate"


def test_a_named_task_counts_where_files_say_nothing(directory: Path) -> None:
    assert read_spec(directory, "embed").task == "embed"
    assert read_spec(directory, "auto").task == "generate"
    make_reranker(directory)
    assert read_spec(directory, "generate").task == "generate"  # a card is not a module
    (directory / "README.md").unlink()
    assert read_spec(directory, "rank").task == "rank"


@pytest.mark.parametrize("wanted", ["generate", "rank"])
def test_a_named_task_does_not_contradict_modules(directory: Path, wanted: str) -> None:
    write_files(directory, EMBED_FILES)
    with pytest.raises(UnsupportedOption, match=f"modules.json: the task '{wanted}'"):
        read_spec(directory, wanted)


def test_the_pixels_and_frames_of_a_vision_model_are_the_cards(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    make_reranker(directory)
    for task, most in (("embed", 1_843_200), ("rank", 1_310_720)):
        vision = read_spec(directory, task).vision
        assert vision is not None and vision.video is not None
        assert (vision.geometry.min_pixels, vision.geometry.max_pixels) == (4096, most)
        assert (vision.video.fps, vision.video.max_frames) == (1.0, 64)


def test_the_default_prompt_is_that_of_the_files(directory: Path) -> None:
    prompts = {"prompts": {"query": "q: ", "document": "d: "}, "default_prompt_name": "document"}
    files = EMBED_FILES | {"config_sentence_transformers.json": prompts}
    spec = read_spec(write_files(directory, files))
    assert spec.search == SearchSpec(task="embed", default_prompt="d: ")


def test_a_language_model_without_a_head_makes_vectors_alone(tmp_path: Path) -> None:
    directory = write_text_model_directory(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    assert read_spec(directory, "embed").task == "embed"
    with pytest.raises(UnsupportedOption, match="Qwen3Model has no head"):
        read_spec(directory)
    with pytest.raises(UnsupportedOption, match="the task 'rank' is not supported for Qwen3Model"):
        read_spec(directory, "rank")


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "mean pooling": (
        {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}},
        "1_Pooling/config.json: pooling mean is not supported; supported: lasttoken",
    ),
    "two poolings": (
        {
            "1_Pooling/config.json": {
                "pooling_mode_cls_token": True,
                "pooling_mode_lasttoken": True,
            }
        },
        "pooling cls and lasttoken is not supported",
    ),
    "no pooling": ({"1_Pooling/config.json": {}}, "pooling .none. is not supported"),
    "a dense module": (
        {"modules.json": [*MODULES, {"path": "3_Dense", "type": "x.Dense"}]},
        "modules.json: the module Dense is not supported",
    ),
    "no module behind the model": ({"modules.json": MODULES[:1]}, "without Pooling or LogitScore"),
    "lengths that matter": (
        {
            "modules.json": MODULES[:2],
            "config_sentence_transformers.json": {"similarity_fn_name": "dot"},
        },
        "similarity_fn_name 'dot' of vectors without Normalize",
    ),
    "a prompt that is not there": (
        {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
        "default_prompt_name 'query' is not among the prompts",
    ),
    "a score of one token": (
        {
            "modules.json": SCORE,
            "1_LogitScore/config.json": {"true_token_id": 3, "false_token_id": None},
        },
        "a score of true_token_id 3 and false_token_id None is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(directory: Path, name: str) -> None:
    files, message = REFUSED[name]
    write_files(directory, EMBED_FILES | files)
    with pytest.raises(UnsupportedOption, match=message):
        read_spec(directory)


def test_a_bidirectional_model_is_refused(tmp_path: Path) -> None:
    directory = write_text_model_directory(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(UnsupportedOption, match="is_causal False is not supported"):
        read_spec(write_files(directory, EMBED_FILES))


def test_another_family_is_refused(tmp_path: Path) -> None:
    directory = write_text_model_directory(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["Qwen2ForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedOption, match="'embed' is not supported for Qwen2ForCausalLM"):
        read_spec(write_files(directory, EMBED_FILES))


def test_a_reranker_needs_its_two_tokens(directory: Path) -> None:
    (directory / "README.md").write_text(RERANKER_CARD)
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 1}}}))
    with pytest.raises(ModelSpecError, match='needs the tokens "yes" and "no"'):
        read_spec(directory)


def test_modules_that_are_no_list_are_refused(directory: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"modules\.json is not an array"):
        read_spec(write_files(directory, {"modules.json": {"0": "Transformer"}}))


def late(directory: Path, **changes: object) -> Path:
    """A ColQwen3's directory, whose config.json has other options."""
    base = write_model_directory(directory)
    config = late_config(json.loads((base / "config.json").read_text()), 24) | changes
    (base / "config.json").write_text(json.dumps(config))
    return base


@pytest.mark.parametrize("task", ["", "auto"])
def test_colqwen3_makes_a_vector_of_each_token(tmp_path: Path, task: str) -> None:
    spec = read_spec(late(tmp_path / "model"), task)
    assert spec.search == SearchSpec(
        task="token_embed", dimensions=24, projection="embedding_proj_layer."
    )
    assert spec.checkpoint.text_prefix == "vlm.model.language_model."
    assert spec.checkpoint.ignores("vlm.lm_head.weight")
    assert spec.vision is not None and spec.vision.video is None
    # 1,280 visual tokens at most, and the least of the processor's file.
    geometry = spec.vision.geometry
    assert (geometry.min_pixels, geometry.max_pixels) == (65_536, 1280 * 32 * 32)


def test_the_vectors_of_tokens_have_320_dimensions_by_default_and_512_at_most(
    tmp_path: Path,
) -> None:
    base = late(tmp_path / "model", embed_dim=None)
    config = json.loads((base / "config.json").read_text())
    del config["embed_dim"]
    config["text_config"]["hidden_size"] = 1024
    config["vision_config"]["out_hidden_size"] = 1024
    for given, dimensions in ((None, 320), (512, 512)):
        wanted = {} if given is None else {"embed_dim": given}
        (base / "config.json").write_text(json.dumps(config | wanted))
        search = read_spec(base).search
        assert search is not None and search.dimensions == dimensions
    (base / "config.json").write_text(json.dumps(config | {"embed_dim": 513}))
    with pytest.raises(ModelSpecError, match="embed_dim 513 is not supported, but 1 to 512"):
        read_spec(base)


@pytest.mark.parametrize(
    ("changes", "task", "named"),
    [
        ({}, "embed", "the task 'embed' is not supported for ColQwen3"),
        ({"embed_dim": 0}, "", "embed_dim 0"),
        ({"embed_dim": "wide"}, "", "embed_dim 'wide'"),
        ({"is_causal": False}, "", "is_causal False"),
        ({"architectures": ["OpsColQwen3Model"]}, "", "OpsColQwen3Model is not supported"),
    ],
)
def test_other_late_interaction_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], task: str, named: str
) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_spec(late(tmp_path / "model", **changes), task)


def test_other_prompts_of_colqwen3_are_refused_by_name(tmp_path: Path) -> None:
    base = late(tmp_path / "model")
    write_files(base, {"processor_config.json": {"query_prefix": "", "processor_class": "x"}})
    assert read_spec(base).task == "token_embed"
    write_files(base, {"processor_config.json": {"query_prefix": "Query: "}})
    with pytest.raises(UnsupportedOption, match="query_prefix 'Query: '"):
        read_spec(base)


def hybrid_late(directory: Path, *absent: str, **changes: object) -> Path:
    """A ColQwen3.5's directory in the form of the published ones, whose config.json has other
    options.
    """
    base = write_model_directory(directory)
    config = json.loads((base / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = []
    config["text_config"] |= {"full_attention_interval": 2, "layer_types": None}
    config = hybrid_late_config(config, 24) | {"model_type": "qwen3_5"} | changes
    kept = {name: value for name, value in config.items() if name not in absent}
    (base / "config.json").write_text(json.dumps(kept))
    return base


def test_colqwen3_5_makes_a_vector_of_each_token(tmp_path: Path) -> None:
    spec = read_spec(hybrid_late(tmp_path / "model"))
    assert spec.search == SearchSpec(
        task="token_embed", dimensions=24, projection="custom_text_proj."
    )
    names = spec.checkpoint
    assert (names.text_prefix, names.vision_prefix) == ("language_model.", "visual.")
    assert names.ignores("mtp.fc.weight")
    assert spec.text.linear_attention is not None
    assert spec.vision is not None and spec.vision.video is None
    # 1,792 visual tokens at most, by the model card, and the least of the processor's file.
    geometry = spec.vision.geometry
    assert (geometry.min_pixels, geometry.max_pixels) == (65_536, 1792 * 32 * 32)


def test_colqwen3_5_names_the_length_of_a_vector_in_either_way(tmp_path: Path) -> None:
    search = read_spec(hybrid_late(tmp_path / "a", "dim", embed_dim=12)).search
    assert search is not None and search.dimensions == 12
    with pytest.raises(UnsupportedOption, match="dim 128 is not supported, but 1 to 32"):
        read_spec(hybrid_late(tmp_path / "b", "dim", "embed_dim"))


@pytest.mark.parametrize(
    ("absent", "changes", "named"),
    [
        ((), {"retrieval_attention_contract": "bidirectional"},
         "retrieval_attention_contract 'bidirectional' is not supported; supported: 'causal'"),
        (("retrieval_attention_contract",), {},
         r"retrieval_attention_contract \(none\) is not supported"),
        ((), {"head_dims": [64, 128]}, r"head_dims \[64, 128\] is not supported"),
        ((), {"is_causal": False}, "is_causal False"),
        (("text_config",), {}, "the config lacks 'text_config'"),
    ],
)  # fmt: skip
def test_other_forms_of_colqwen3_5_are_refused_by_name(
    tmp_path: Path, absent: tuple[str, ...], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_spec(hybrid_late(tmp_path / "model", *absent, **changes))


def test_sections_of_colqwen3_5_that_disagree_are_refused(tmp_path: Path) -> None:
    base = hybrid_late(tmp_path / "model")
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["retrieval_attention_contract"] = "bidirectional"
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedOption, match="'bidirectional', 'causal' is not supported"):
        read_spec(base)
