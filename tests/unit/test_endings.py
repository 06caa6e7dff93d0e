"""Where a response ends: tokenizer, config, generation config and chat template, alone and
together."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from megatron_cgrpo.config import parse_config
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.safetensors_io import write_hf
from megatron_cgrpo.data.endings import end_token_ids

SPECIAL = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|eot_id|>{% endfor %}"
GEMMA = "{% for m in messages %}{{ m.content }}<end_of_turn>\n{% endfor %}"
PROMPTS_ONLY = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}:"
STRICT = "{{ raise_exception('one message') if messages | length > 1 }}"


def make(root, template, tokenizer_eos, config_eos, generation_eos):
    vocab = {t: i for i, t in enumerate(SPECIAL)}
    for code in [10, *range(32, 127)]:
        vocab[chr(code)] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(root / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    if template:
        settings["chat_template"] = template
    if tokenizer_eos:
        settings["eos_token"] = tokenizer_eos
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    # A model_type for AutoTokenizer; what is asked for here is not in it.
    config = {"model_type": "qwen3", "vocab_size": len(vocab), "eos_token_id": config_eos}
    (root / "config.json").write_text(json.dumps(config))
    if generation_eos is not ...:
        (root / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return root


def ends(root, **sections):
    raw = {"model": {"path": str(root)}, "data": {"path": "x"}} | sections
    return end_token_ids(parse_config(raw))


@pytest.mark.parametrize(
    ("template", "tokenizer", "config", "generation", "expected"),
    [
        # One source alone.
        (None, "<|endoftext|>", None, ..., (1,)),
        (None, None, 1, ..., (1,)),
        (None, None, [1, 4], None, (1, 4)),
        (None, None, None, 3, (3,)),
        (None, None, None, [3, 1], (1, 3)),
        (QWEN, None, None, ..., (3,)),
        (LLAMA, None, None, ..., (4,)),
        (GEMMA, None, None, ..., (5,)),
        # Together: a base model sampled with a chat template, and one whose files disagree.
        (QWEN, "<|endoftext|>", 1, 1, (1, 3)),
        (LLAMA, "<|endoftext|>", 1, [1, 4], (1, 4)),
        (GEMMA, "<|im_end|>", 1, [4], (1, 3, 4, 5)),
        # Templates that write nothing behind a response, or know prompts alone.
        (PROMPTS_ONLY, "<|endoftext|>", None, ..., (1,)),
        (STRICT, "<|endoftext|>", None, ..., (1,)),
    ],
)
def test_the_union_of_all_that_is_named(
    tmp_path, template, tokenizer, config, generation, expected
):
    root = make(tmp_path, template, tokenizer, config, generation)
    assert ends(root) == expected
    assert ends(root, rollout={"stop_token_ids": [4, 2]}) == (2, 4)


def test_plain_prompts_have_no_turns(tmp_path):
    root = make(tmp_path, QWEN, "<|endoftext|>", None, ...)
    assert ends(root, data={"path": "x", "template": "plain"}) == (1,)


@pytest.mark.parametrize(
    ("config", "generation", "said"),
    [
        (None, ..., "names an end-of-sequence token: set rollout.stop_token_ids"),
        ("1", ..., "config.json: eos_token_id is '1', not a token id"),
        (None, [1, None], "generation_config.json: eos_token_id is .1, None., not a token id"),
        (999, ..., "config.json names the end token 999, which is none of the model's"),
    ],
)
def test_what_names_no_token_is_refused(tmp_path, config, generation, said):
    with pytest.raises(ConfigError, match=said):
        ends(make(tmp_path, None, None, config, generation))
    (tmp_path / "generation_config.json").write_text("{")
    if config is None:
        with pytest.raises(ConfigError, match="cannot be read as JSON"):
            ends(tmp_path)


@pytest.mark.parametrize(
    ("before", "ids", "after"),
    [
        (None, (3,), {"eos_token_id": 3}),
        ({"eos_token_id": 1, "top_p": 0.9}, (1, 3), {"eos_token_id": [1, 3], "top_p": 0.9}),
        ({"eos_token_id": [1, 3]}, (1, 3), {"eos_token_id": [1, 3]}),
        ({"eos_token_id": 1}, (), {"eos_token_id": 1}),
    ],
)
def test_exports_name_the_end_tokens(tmp_path, before, ids, after):
    source = tmp_path / "source"
    source.mkdir()
    if before is not None:
        (source / "generation_config.json").write_text(json.dumps(before))
    tensors = [("x", torch.ones(2))]
    out = write_hf(tmp_path / "out", tensors, [source], end_token_ids=ids)
    assert json.loads((out / "generation_config.json").read_text()) == after
