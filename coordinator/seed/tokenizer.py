"""The seed model's tokenizer: bytes, three special tokens, and one token for each phrase of the prompts.

Nothing is trained: any text is its bytes, and a prompt of spell_backward is short because the sentence around the
word is a single token (7 tokens and one per letter).
"""

from pathlib import Path
from typing import Any

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
PAD_ID, EOS_ID = 0, 2

PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    "Calculate ",
    "system\n",
    "user\n",
    "assistant\n",
    " + ",
    " - ",
    " * ",
    " / ",
    " =",
)

# ChatML.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{ '<|im_start|>assistant\\n' }}\n"
    "{%- endif -%}\n"
)


def build_tokenizer(context: int) -> Any:
    """A `PreTrainedTokenizerFast` of 270 tokens whose specials have ids 0 (padding), 1 and 2 (end of turn)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(directory: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    build_tokenizer(context).save_pretrained(directory)
