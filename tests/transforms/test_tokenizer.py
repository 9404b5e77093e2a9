"""PaliGemma's tokenizer from either of its files, and where it is looked for. Small files made here stand in."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.local_hub import COMMIT, LocalHub, served
from vla_accel.errors import CheckpointError, DependencyError
from vla_accel.transforms.tokenizer import PaliGemmaTokenizer, SmallTokenizer, load_tokenizer, tokenize_prompt

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "pick", "up", "the", "bowl", "\n"]


def write_json(path: Path, words: list[str] = WORDS) -> None:
    """A Hugging Face tokenizer with a post-processor, padding and truncation, all of which are to be ignored."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    newline = pre_tokenizers.Split(Regex("\n"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newline, pre_tokenizers.Split(Regex(" "), "removed")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))


def write_model(path: Path, bos: int = 2) -> None:
    import sentencepiece

    corpus = path.with_suffix(".txt")
    corpus.write_text("\n".join(["pick up the bowl", "put it on the plate 0123456789"] * 30))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(path.with_suffix("")),
        vocab_size=60,
        model_type="bpe",
        add_dummy_prefix=False,
        user_defined_symbols=["\n"],
        pad_id=0,
        eos_id=1,
        bos_id=bos,
        unk_id=3 if bos >= 0 else 2,
        minloglevel=2,
    )


def test_hugging_faces_file(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, PaliGemmaTokenizer)
    assert tokenizer.encode("pick up the bowl", add_bos=True) == [2, 4, 5, 6, 7]
    assert tokenizer.encode("\n", add_bos=False) == [8]
    assert tokenize_prompt(tokenizer, "pick_up the bowl", None, 48).tolist() == [2, 4, 5, 6, 7, 8]
    assert tokenizer.finish([4]) == [4]


def test_sentencepieces_file(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    write_model(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(tmp_path)
    processor = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "pick up the bowl"
    assert tokenizer.encode(text, add_bos=True) == processor.encode(text, add_bos=True)
    assert tokenizer.encode(text, add_bos=True)[0] == 2 and len(tokenizer.encode(text, add_bos=True)) > 3
    assert tokenize_prompt(tokenizer, text, None, 48).tolist() == processor.encode(
        text, add_bos=True
    ) + processor.encode("\n")


def test_a_source_comes_first(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder, words in ((inside, WORDS), (outside, [*WORDS[:4], *WORDS[4:][::-1]])):
        folder.mkdir()
        write_json(folder / "tokenizer.json", words)
    for source in (str(outside), str(outside / "tokenizer.json")):
        assert load_tokenizer(inside, source).encode("pick", add_bos=False) == [8]
    assert load_tokenizer(inside, None).encode("pick", add_bos=False) == [4]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json or tokenizer\.model, found neither"):
        load_tokenizer(inside, str(empty))


def test_elsewhere_is_openpis_folder_then_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vla_accel.transforms.tokenizer._OPENPI_CACHE", tmp_path / "cache" / "paligemma_tokenizer.model"
    )
    asked: list[str] = []

    def from_hub(name: str) -> Path:
        asked.append(name)
        write_json(tmp_path / "hub.json")
        return tmp_path / "hub.json"

    monkeypatch.setattr("vla_accel.transforms.tokenizer._from_hub", from_hub)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    load_tokenizer(folder, elsewhere=True)
    load_tokenizer(folder, "org/name")
    assert asked == ["google/paligemma-3b-pt-224", "org/name"]
    (tmp_path / "cache").mkdir()
    write_model(tmp_path / "cache" / "paligemma_tokenizer.model")
    load_tokenizer(folder, elsewhere=True)
    assert len(asked) == 2
    with pytest.raises(CheckpointError, match="found neither"):
        load_tokenizer(folder)


def test_a_tokenizer_comes_from_the_hub_and_then_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "repository"
    repository.mkdir()
    SmallTokenizer(("pick",), state_dim=2, fill_to=0).save(repository / "tokenizer.json")
    with served(LocalHub({("org/name", COMMIT): repository}), tmp_path / "cache", monkeypatch):
        assert isinstance(load_tokenizer(tmp_path, "org/name"), SmallTokenizer)
        with pytest.raises(CheckpointError, match="Not Found"):
            load_tokenizer(tmp_path, "org/none")
    # The hub cannot be reached any more. One request is made, without a wait for another.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("another request"))
    assert isinstance(load_tokenizer(tmp_path, "org/name"), SmallTokenizer)
    with pytest.raises(CheckpointError) as refused:
        load_tokenizer(tmp_path, "org/other")
    where = rf"'org/other' in the hub's cache {tmp_path / 'cache'} or at http://127\.0\.0\.1:9, got: .*refused"
    what = r"type hf download org/other tokenizer\.json \(.*licence[^()]*\), or put .*checkpoint\.tokenizer [^()]*"
    assert re.fullmatch(f"tokenizer: expected {where}; .*, {what}", str(refused.value)), refused.value


def test_what_the_hub_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        DependencyError,
        match=r"pip install 'vla_accel\[checkpoints\]' \(.*licence[^()]*\), or put .*checkpoint\.tokenizer",
    ):
        load_tokenizer(tmp_path, "org/name")


@pytest.mark.parametrize(("name", "package"), [("tokenizer.json", "tokenizers"), ("tokenizer.model", "sentencepiece")])
def test_a_missing_package_is_named(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text('{"model": {}}')
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyError, match=rf"{name} needs {package}: pip install 'vla_accel\[checkpoints\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "expected a Hugging Face tokenizer, got"),
        ("tokenizer.json", "{", "expected JSON, got"),
        *(
            ("tokenizer.json", content, "expected Hugging Face's JSON or a small")
            for content in ("[]", '{"type": "other"}', '{"type": "small", "words": ["a"]}', "3", "null")
        ),
        ("tokenizer.model", "nonsense", "expected a SentencePiece model, got"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name}: {message}"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_beginning_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", [w for w in WORDS if w != "<bos>"])
    with pytest.raises(CheckpointError, match="expected a token <bos>, found none"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    write_model(tmp_path / "tokenizer.model", bos=-1)
    with pytest.raises(CheckpointError, match="expected a token <bos>, found none"):
        load_tokenizer(tmp_path)


def test_the_small_one_is_told_by_its_file(tmp_path: Path) -> None:
    SmallTokenizer(("pick",), state_dim=2, fill_to=0).save(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer(tmp_path, elsewhere=True), SmallTokenizer)
