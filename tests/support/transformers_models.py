"""Tiny classifiers of transformers, as they come: BERT, GPT-2, Llama, ViT, the encoder of Whisper."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLASSES, TOKENS, LENGTH = 3, 20, 8


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=LENGTH, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, n_inner=12, num_labels=CLASSES,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, num_labels=CLASSES,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4,
        num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


def whisper() -> nn.Module:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=TOKENS, d_model=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=12,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=4,
        classifier_proj_size=6, encoder_layerdrop=0.5, num_labels=CLASSES,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForAudioClassification(config)  # type: ignore[no-any-return]


def token_ids(count: int) -> dict[str, torch.Tensor]:
    """Make token ids and their mask; every second text is shorter by two."""
    ids = torch.randint(3, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[::2, -2:], mask[::2, -2:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def spectra(count: int) -> torch.Tensor:
    return torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "bert": (bert, token_ids),
    "gpt2": (gpt2, token_ids),
    "llama": (llama, token_ids),
    "vit": (vit, images),
    "whisper": (whisper, spectra),
}
