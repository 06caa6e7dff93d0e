"""Tiny random models of every family, written as Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "qwen2", "qwen3")
VOCAB = 151
CONTEXT = 256


def make_model(
    root: Path,
    family: str,
    tied: bool,
    seed: int = 0,
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    **changes,
) -> Path:
    """A random model of `family` with a character tokenizer; returns its directory.

    `changes` go into its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    options = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=2,
        use_cache=True,
    )
    options["head_dim"] = 32
    if family == "qwen2":
        options.pop("head_dim")
        options["num_attention_heads"], options["num_key_value_heads"] = 2, 2
        options["hidden_size"] = 64
    if family == "llama":
        options["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if family == "qwen3_moe":
        options |= {
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.0,
        }
    options |= changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 0.08 if p.dim() > 1 else 0.1
            p.copy_(torch.randn_like(p) * spread + (1.0 if "norm" in name else 0.0))
    model.generation_config.eos_token_id = 2
    model.to(dtype).save_pretrained(root)
    make_tokenizer(root)
    return root


def make_tokenizer(root: Path) -> None:
    """One token per printable character; ids 0–2 are special, the rest of VOCAB is unused."""
    special = ["<unk>", "<user>", "<end>"]
    vocab = {t: i for i, t in enumerate(special)}
    for code in range(32, 127):
        vocab[chr(code)] = len(vocab)
    vocab["\n"] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(root / "tokenizer.json"))
    template = (
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<end>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
