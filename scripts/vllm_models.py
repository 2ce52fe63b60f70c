"""Make tiny models for vLLM: real tokenizer, real chat template, no trained weights.

    $FIRSTTOKEN_VLLM_VENV/bin/python scripts/vllm_models.py

Runs inside vLLM's environment, which has `tokenizers` and `transformers`. Writes `.cache/vllm-models/small` and
`.../large` (or under FIRSTTOKEN_VLLM_MODELS), of different size and so time to first token, and `.../rehearsed`, which
can think and call tools (tests/programs/clients). vLLM loads them with `--load-format dummy`, seeded random weights:
the text is noise, while tokens, cache, queue and times are real.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
MODELS = Path(os.environ.get("FIRSTTOKEN_VLLM_MODELS") or ROOT / ".cache" / "vllm-models")
SIZES = {"small": (256, 4), "large": (512, 8), "rehearsed": (64, 1)}  # hidden size, layers
CONTEXT = {"rehearsed": 131_072}  # tokens; a coding agent asks for 32,000 after a prompt of 20,000
VOCABULARY = 8192
HEAD = 64
CORPUS_BYTES = 6_000_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINKING = ["<think>", "</think>"]  # tokens of the rehearsed model

# ChatML, with the tools in the first system message, as in Qwen and Hermes.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if enable_thinking is true %}{{ '<|im_start|>system\\nThink first.<|im_end|>\\n' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""


def corpus() -> Iterator[str]:
    """The standard library's sources, in a fixed order, up to CORPUS_BYTES."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        left -= len(text)
        if left <= 0:
            return


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    if name == "rehearsed":
        wrapped.add_tokens([AddedToken(token, normalized=False) for token in THINKING])
    return wrapped


def config(vocabulary: int, context: int, hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=2,
        dtype="float32",
    )


def main() -> int:
    wanted = {name: size for name, size in SIZES.items() if not (MODELS / name / "config.json").exists()}
    for name, (hidden, layers) in wanted.items():
        made = tokenizer(name)
        made.save_pretrained(MODELS / name)
        described = config(len(made), CONTEXT.get(name, 32_768), hidden, layers)
        described.save_pretrained(MODELS / name)  # last: marks the model as complete
    print(f"models are ready in {MODELS}: {', '.join(SIZES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
