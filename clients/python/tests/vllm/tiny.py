"""A tiny Llama with weights of a sensible size.

vLLM's own dummy weights are about 1e-3: attention then hardly matters, and wrong KV passes unnoticed.
"""

import json
import pathlib

import torch
from safetensors.torch import save_file


def write(folder: pathlib.Path, *, layers: int = 2, width: int = 128, heads: int = 2, vocabulary: int = 1024) -> str:
    """Writes config and weights, the same on every call, and returns the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    head, inner = 64, 2 * width
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    spread = 0.25 * (128 / width) ** 0.5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * spread

    rows, cached = heads * head, config["num_key_value_heads"] * head
    weights = {
        "model.embed_tokens.weight": random(vocabulary, width),
        "lm_head.weight": random(vocabulary, width),
        "model.norm.weight": torch.ones(width),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": random(rows, width),
            at + "self_attn.k_proj.weight": random(cached, width),
            at + "self_attn.v_proj.weight": random(cached, width),
            at + "self_attn.o_proj.weight": random(width, rows),
            at + "mlp.gate_proj.weight": random(inner, width),
            at + "mlp.up_proj.weight": random(inner, width),
            at + "mlp.down_proj.weight": random(width, inner),
            at + "input_layernorm.weight": torch.ones(width),
            at + "post_attention_layernorm.weight": torch.ones(width),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def write_tokenizer(folder: pathlib.Path, vocabulary: int = 1024) -> None:
    """A tokenizer beside the weights, for servers: the word `w7` is the token 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    # A name that begins like a special token's would be read as that one.
    special = {1: "<s>", 2: "</s>"}
    known = {special.get(token, f"w{token}"): token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }} w5 {% endfor %}w6"
    written = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[1],
        "eos_token": special[2],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(written))


def write_hybrid(folder: pathlib.Path) -> str:
    """A tiny Gemma 3: two layers see a window of 64 tokens, two see everything."""
    folder.mkdir(parents=True, exist_ok=True)
    width, inner, vocabulary, head, layers = 128, 256, 1024, 64, 4
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": head,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    # Gemma's norms add one to their weights.
    weights = {"model.embed_tokens.weight": random(vocabulary, width), "model.norm.weight": torch.zeros(width)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": random(2 * head, width),
            at + "self_attn.k_proj.weight": random(head, width),
            at + "self_attn.v_proj.weight": random(head, width),
            at + "self_attn.o_proj.weight": random(width, 2 * head),
            at + "self_attn.q_norm.weight": torch.zeros(head),
            at + "self_attn.k_norm.weight": torch.zeros(head),
            at + "mlp.gate_proj.weight": random(inner, width),
            at + "mlp.up_proj.weight": random(inner, width),
            at + "mlp.down_proj.weight": random(width, inner),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{at}{norm}_layernorm.weight"] = torch.zeros(width)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
