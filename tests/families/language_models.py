"""Tiny decoder language models as text encoders, and tokenizers that spell letter by letter."""

import re
import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AddedToken,
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaConfig,
    GemmaModel,
    GemmaTokenizer,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Gemma2Encoder,
    T5Gemma2EncoderConfig,
    T5GemmaConfig,
    T5GemmaEncoderModel,
)

VOCAB_SIZE = 1024
"""Vocabulary size of every encoder: larger than the tokenizers', so that words can be added."""

PATCH_SIZE = 4
"""Patch size of the vision towers, in pixels; 2 x 2 patches make one token."""

QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": PATCH_SIZE,
    "initializer_range": 0.25,
}

QWEN2_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": PATCH_SIZE,
}

EYES: dict[str, Any] = {**VISION, "num_hidden_layers": 2, "patch_size": 8}
"""Image encoders without a language model: four tokens per image of 16 x 16 pixels."""

PIXELS: dict[str, Any] = {
    "patch_size": PATCH_SIZE,
    "size": {"shortest_edge": 64, "longest_edge": 256},
}
"""Images are shrunk to at most 16 x 16 pixels, four tokens."""

QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
]


def size(tokenizer: PreTrainedTokenizerBase, layers: int) -> dict[str, Any]:
    """Dimensions of a decoder, under the names that all configurations share."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.25,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def chat_template(opening: str, closing: str, image: str = "", reply: str = "") -> str:
    """A chat template; `opening` may print `m.role`, and `reply` opens the answer."""
    return (
        "{% for m in messages %}" + opening + "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}" + image + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}" + closing + "{% endfor %}"
        "{% if add_generation_prompt %}" + reply + "{% endif %}"
    )


def learn_words(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Makes each word of a pipeline's template one token, as in the released tokenizers.

    Pipelines drop a fixed number of template tokens; if each letter were a token, most of the
    template would remain.
    """
    words = [AddedToken(w, normalized=False) for w in ("\n", "\n\n")]
    for word in dict.fromkeys(re.findall(r"[A-Za-z]{2,}", re.sub(r"<[^>]*>", " ", text))):
        words.append(AddedToken(word, single_word=True, lstrip=True, normalized=False))
    tokenizer.add_tokens(words)
    assert len(tokenizer) <= VOCAB_SIZE


def qwen_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer of Qwen2, Qwen2.5-VL, Qwen3 and Qwen3-VL."""
    vocab = {token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        extra_special_tokens=QWEN_SPECIAL,
        model_max_length=1024,
        chat_template=chat_template(
            "<|im_start|>{{ m.role }}\n",
            "<|im_end|>\n",
            image="<|vision_start|><|image_pad|><|vision_end|>",
            reply="<|im_start|>assistant\n{% if enable_thinking is defined and not "
            "enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
        ),
    )


def vision_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{side}_token_id": f"vision_{side}" for side in ("start", "end")}
    return {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}


def qwen2_5_vl(
    tokenizer: Qwen2Tokenizer, cls: type = Qwen2_5_VLForConditionalGeneration, layers: int = 2
) -> Any:
    """`cls` may be Qwen2_5_VLTextModel, which has no vision tower."""
    text_config = Qwen2_5_VLTextConfig(**size(tokenizer, layers), rope_parameters=QWEN2_ROPE)
    if cls.config_class is Qwen2_5_VLTextConfig:
        return cls(text_config)
    vision = {**QWEN_VISION, "window_size": 4 * PATCH_SIZE, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config=text_config, vision_config=vision, **vision_ids(tokenizer)
    )
    return cls(config)


def qwen2_vl(tokenizer: Qwen2Tokenizer, layers: int = 2) -> Qwen2VLForConditionalGeneration:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    config = Qwen2VLConfig(
        text_config={**size(tokenizer, layers), "rope_parameters": QWEN2_ROPE},
        vision_config={**vision, "patch_size": PATCH_SIZE},
    )
    return Qwen2VLForConditionalGeneration(config)


def qwen3(tokenizer: Qwen2Tokenizer, cls: type = Qwen3ForCausalLM, layers: int = 2) -> Any:
    """`cls` may be Qwen3Model."""
    return cls(Qwen3Config(**size(tokenizer, layers)))


def qwen3_vl(
    tokenizer: Qwen2Tokenizer, cls: type = Qwen3VLForConditionalGeneration, layers: int = 2
) -> Any:
    """`cls` may be Qwen3VLModel."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 5e6}
    vision = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config={**size(tokenizer, layers), "rope_parameters": rope},
        vision_config=vision,
        **vision_ids(tokenizer),
    )
    return cls(config)


def qwen2_vl_processor(tokenizer: Qwen2Tokenizer, cls: type = Qwen2VLProcessor) -> Qwen2VLProcessor:
    """`cls` may be Qwen2_5_VLProcessor."""
    return cls(
        image_processor=Qwen2VLImageProcessor(**PIXELS),
        video_processor=Qwen2VLVideoProcessor(**PIXELS),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def qwen3_vl_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**PIXELS),
        video_processor=Qwen3VLVideoProcessor(**PIXELS),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def spelling_vocab(*special: str) -> dict[str, int]:
    """Special tokens first, then printable characters; "▁" stands for a space."""
    return {token: i for i, token in enumerate([*special, "▁", *string.printable[:-5], "\n"])}


def gemma_tokenizer(padding_side: str = "right") -> GemmaTokenizer:
    """The tokenizer of Gemma 1 to 3; pads on the right, as in the released pipelines."""
    return GemmaTokenizer(
        vocab=spelling_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
        merges=[],
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        add_bos_token=True,
        padding_side=padding_side,
        model_max_length=1024,
        chat_template=chat_template(
            "<start_of_turn>{{ m.role }}\n",
            "<end_of_turn>\n",
            image="<start_of_image>",
            reply="<start_of_turn>model\n",
        ),
    )


def gemma(tokenizer: GemmaTokenizer, cls: type = GemmaModel, layers: int = 2) -> Any:
    return cls(GemmaConfig(**size(tokenizer, layers)))


def gemma2(tokenizer: GemmaTokenizer, cls: type = Gemma2Model, layers: int = 2) -> Any:
    """`cls` may be Gemma2ForCausalLM."""
    return cls(Gemma2Config(**size(tokenizer, layers), query_pre_attn_scalar=8))


def gemma3(
    tokenizer: GemmaTokenizer, cls: type = Gemma3ForConditionalGeneration, layers: int = 2
) -> Any:
    """An image is 16 x 16 pixels and four tokens."""
    config = Gemma3Config(
        text_config={**size(tokenizer, layers), "query_pre_attn_scalar": 8},
        vision_config=VISION,
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    return cls(config)


def t5gemma_encoder(tokenizer: GemmaTokenizer, layers: int = 2) -> Any:
    part = {**size(tokenizer, layers), "query_pre_attn_scalar": 8}
    config = T5GemmaConfig(
        encoder=part, decoder=part, vocab_size=VOCAB_SIZE, is_encoder_decoder=False
    )
    return T5GemmaEncoderModel(config).encoder


def t5gemma2_encoder(tokenizer: GemmaTokenizer, layers: int = 2) -> T5Gemma2Encoder:
    config = T5Gemma2EncoderConfig(
        text_config={**size(tokenizer, layers), "dropout_rate": 0.0},
        vision_config=EYES,
        mm_tokens_per_image=4,
    )
    return T5Gemma2Encoder(config)


def llama_tokenizer() -> LlamaTokenizer:
    """Pads on the right with its end-of-text token, as pipelines do with Llama 3."""
    return LlamaTokenizer(
        vocab=spelling_vocab("<unk>", "<s>", "</s>"),
        merges=[],
        pad_token="</s>",
        extra_special_tokens=["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"],
        add_bos_token=True,
        padding_side="right",
        model_max_length=1024,
        chat_template=chat_template(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
            "<|eot_id|>",
            image="<image>",
            reply="<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    )


def llama(tokenizer: LlamaTokenizer, cls: type = LlamaForCausalLM, layers: int = 2) -> Any:
    """`cls` may be LlamaModel."""
    return cls(LlamaConfig(**size(tokenizer, layers)))


def llava(tokenizer: LlamaTokenizer, layers: int = 2) -> LlavaForConditionalGeneration:
    config = LlavaConfig(
        text_config=LlamaConfig(**size(tokenizer, layers)),
        vision_config=CLIPVisionConfig(**EYES),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaForConditionalGeneration(config)


def plain_tokenizer(padding_side: str = "left") -> PreTrainedTokenizerFast:
    """The tokenizer of models without a tokenizer class of their own: GLM, Mistral 3, SmolLM3."""
    letters = LlamaTokenizer(
        vocab=spelling_vocab("<unk>", "<s>", "</s>", "<pad>"), merges=[], add_bos_token=True
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=letters.backend_tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        add_bos_token=True,
        padding_side=padding_side,
        model_max_length=1024,
        chat_template=chat_template(
            "{% if m.role == 'user' %}[INST]{% endif %}",
            "{% if m.role == 'user' %}[/INST]{% endif %}",
            image="[IMG]",
        ),
    )


def glm(tokenizer: PreTrainedTokenizerFast, layers: int = 2) -> GlmModel:
    return GlmModel(GlmConfig(**size(tokenizer, layers)))


def smollm3(tokenizer: PreTrainedTokenizerFast, layers: int = 2) -> SmolLM3ForCausalLM:
    return SmolLM3ForCausalLM(SmolLM3Config(**size(tokenizer, layers)))


def mistral3(
    tokenizer: PreTrainedTokenizerFast,
    cls: type = Mistral3ForConditionalGeneration,
    layers: int = 2,
    text_type: str = "mistral",
) -> Any:
    """`cls` may be Mistral3Model, `text_type` may be ministral3."""
    config = Mistral3Config(
        text_config={"model_type": text_type, **size(tokenizer, layers)},
        vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    return cls(config)


def pixtral_processor(tokenizer: PreTrainedTokenizerFast) -> PixtralProcessor:
    """The processor of Mistral 3."""
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(patch_size=2 * PATCH_SIZE, size={"longest_edge": 16}),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )


def bert_tokenizer() -> BertTokenizer:
    letters = [*string.ascii_lowercase, *string.digits, ",", "."]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    return BertTokenizer(vocab={token: i for i, token in enumerate(tokens)})


def bert(tokenizer: BertTokenizer, layers: int = 2) -> BertModel:
    """The text encoder of HunyuanDiT: not a decoder, but of the same size."""
    return BertModel(BertConfig(**size(tokenizer, layers)))
