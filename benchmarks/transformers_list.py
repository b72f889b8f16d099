"""Small configurations of transformers' classifiers of text, images and sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TOKENS = 60  # size of the vocabulary
Options = dict[str, Any]

BLOCKS: Options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENDS: Options = {"bos_token_id": 1, "eos_token_id": 2}
ENCODER: Options = {**BLOCKS, "vocab_size": TOKENS, "max_position_embeddings": 40, "pad_token_id": 0}
DECODER: Options = {**ENCODER, **ENDS, "num_key_value_heads": 2}
VISION: Options = {**BLOCKS, "image_size": 32, "patch_size": 8}
STAGES: Options = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
TWO_STAGES: Options = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]}
SPEECH: Options = {
    **ENCODER,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
DEBERTA: Options = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 32}
GPT2: Options = {"vocab_size": TOKENS, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0}
GPT_NEO: Options = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 64,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 40,
    "window_size": 8,
    "pad_token_id": 0,
}
T5: Options = {
    "vocab_size": TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
TWO_STACKS: Options = {
    "vocab_size": TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
BART: Options = {**TWO_STACKS, "max_position_embeddings": 40, "bos_token_id": 2, "eos_token_id": 1}
WHISPER: Options = {
    **TWO_STACKS,
    **ENDS,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "encoder_layerdrop": 0.1,
    "classifier_proj_size": 16,
}
SPECTROGRAM: Options = {
    **BLOCKS,
    "patch_size": 8,
    "max_length": 32,
    "num_mel_bins": 16,
    "frequency_stride": 4,
    "time_stride": 4,
}
SWIN: Options = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}

TEXT, IMAGE, SOUND = "ForSequenceClassification", "ForImageClassification", "ForAudioClassification"
# Prefix and suffix of the class, its configuration, the kind of input
TRANSFORMERS: list[tuple[str, str, Options, str]] = [
    ("Bert", TEXT, ENCODER, "ids"),
    (
        "DistilBert",
        TEXT,
        {"vocab_size": TOKENS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
        "ids",
    ),
    ("Roberta", TEXT, ENCODER | ENDS, "ids"),
    ("Albert", TEXT, {**ENCODER, **ENDS, "embedding_size": 16}, "ids"),
    ("Electra", TEXT, {**ENCODER, "embedding_size": 16}, "ids"),
    ("DebertaV2", TEXT, ENCODER | DEBERTA, "ids"),
    ("MPNet", TEXT, ENCODER | ENDS, "ids"),
    ("ConvBert", TEXT, {**ENCODER, "embedding_size": 16}, "ids"),
    ("MobileBert", TEXT, {**ENCODER, "embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}, "ids"),
    ("ModernBert", TEXT, {**ENCODER, **ENDS, "cls_token_id": 1, "sep_token_id": 2}, "ids"),
    ("XLNet", TEXT, {"vocab_size": TOKENS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, "ids"),
    ("FNet", TEXT, {name: ENCODER[name] for name in ENCODER if name != "num_attention_heads"}, "ids only"),
    ("GPT2", TEXT, GPT2 | ENDS, "ids"),
    ("GPTNeo", TEXT, GPT_NEO | ENDS, "ids"),
    ("GPTNeoX", TEXT, ENCODER | ENDS, "ids"),
    ("OPT", TEXT, {**ENCODER, **ENDS, "ffn_dim": 64, "word_embed_proj_dim": 32}, "ids"),
    ("Llama", TEXT, DECODER, "ids"),
    ("Mistral", TEXT, DECODER, "ids"),
    ("Qwen2", TEXT, DECODER, "ids"),
    ("Gemma", TEXT, {**DECODER, "head_dim": 8}, "ids"),
    ("Phi3", TEXT, DECODER, "ids"),
    ("T5", TEXT, T5, "ids with one end"),
    ("T5", "ForTokenClassification", T5, "ids"),
    ("Bart", TEXT, BART, "ids with one end"),
    ("ViT", IMAGE, VISION, "images"),
    ("DeiT", IMAGE, VISION, "images"),
    ("Beit", IMAGE, VISION, "images"),
    ("Dinov2", IMAGE, VISION, "images"),
    ("Swin", IMAGE, SWIN, "images"),
    ("ConvNext", IMAGE, STAGES, "images"),
    ("ConvNextV2", IMAGE, STAGES, "images"),
    ("ResNet", IMAGE, TWO_STAGES, "images"),
    ("RegNet", IMAGE, {**TWO_STAGES, "groups_width": 16}, "images"),
    ("Segformer", IMAGE, {**STAGES, "num_attention_heads": [1, 2, 3, 4]}, "images"),
    ("PoolFormer", IMAGE, STAGES, "images"),
    ("MobileNetV2", IMAGE, {}, "images"),
    ("Wav2Vec2", TEXT, SPEECH, "waves"),
    ("Hubert", TEXT, SPEECH, "waves"),
    ("WavLM", TEXT, SPEECH, "waves"),
    ("Whisper", SOUND, WHISPER, "mel"),
    ("AST", SOUND, SPECTROGRAM, "spectrogram"),
]


def make_model(prefix: str, suffix: str, options: Options) -> nn.Module:
    """Make a model of a configuration, with random weights."""
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**options)
    model: nn.Module = getattr(transformers, f"{prefix}{suffix}")(config)
    return model


def make_example(kind: str) -> Any:
    """Make a batch of two: token ids with a mask that pads the second, images, waves or spectra."""
    if kind.startswith("ids"):
        ids = torch.randint(3, TOKENS, (2, 24), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        if kind == "ids with one end":
            ids[:, -1] = 1
        elif kind == "ids":
            ids[1, 20:], mask[1, 20:] = 0, 0
        return {"input_ids": ids} if kind == "ids only" else {"input_ids": ids, "attention_mask": mask}
    shapes = {"images": (3, 32, 32), "waves": (800,), "mel": (16, 32), "spectrogram": (32, 16)}
    return torch.randn(2, *shapes[kind])
