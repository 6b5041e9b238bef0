"""Which keys of a config.json nothing asked for: what a decoder cannot have heeded.

Owns `Asked`, and the keys that change no number wherever they stand. Keys that are known to change one, and are not
computed with, are refused elsewhere (demands). Imports nothing of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

# Of the architecture's name and its software, of training, of other inputs, of how text is made, of what shapes of
# tensors tell, and of which layers there are, which the tensors tell too.
_HARMLESS: Final = re.compile(
    r"architectures|model_type|auto_map|_name_or_path|name_or_path|transformers_version|(?:torch_)?dtype|moe_dtype|_.*"
    r"|use_cache|return_dict\w*|output_\w+|is_encoder_decoder|is_decoder|add_cross_attention|tie_encoder_decoder"
    r"|id2label|label2id|num_labels|problem_type|task_specific_params|tokenizer_class|prefix|torchscript|ep_size"
    r"|chunk_size_feed_forward|pretraining_tp|pruned_heads|gradient_checkpointing|finetuning_task|tp_size"
    r"|\w*dropout\w*|\w*_pdrop|\w*_jitter_noise|initializer\w*|\w*init_std|\w*_loss\w*|aux_loss_alpha|seq_aux"
    r"|\w*_token_ids?|\w*_token_index|\w*_token|(?:vision|audio|visual|image|video|speech)\w*|mm_\w+"
    r"|do_sample|temperature|top_k|top_p|typical_p|num_beams|num_beam_groups|diversity_penalty|repetition_penalty"
    r"|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|num_return_sequences"
    r"|early_stopping|max_length|min_length|max_new_tokens|remove_invalid_values|suppress_tokens|begin_suppress_tokens"
    r"|exponential_decay_length_penalty|forced_\w+|cross_attention_hidden_size"
    r"|vocab_size|intermediate_size|moe_intermediate_size|shared_\w*intermediate_size|max_position_embeddings"
    r"|(?:original_)?max_\w*positions?\w*|max_seq_len\w*|model_max_length|seq_length"
    r"|max_window_layers|initial_context_length|experts_per_token|qk_head_dim|num_key_value_heads|head_dim|init_method"
    r"|num_(?:local_|routed_|shared_)?experts|n_(?:routed|shared)_experts|moe_num_\w*experts|num_experts_per_tok(?:en)?"
    r"|moe_topk|moe_k|moe_top_k|quantization_config|compression_config|text_config"
    r"|decoder_sparse_step|mlp_only_layers|moe_layer_freq|first_k_dense_replace|num_nextn_predict_layers"
)
_USUAL: Final[Mapping[str, tuple[str, ...]]] = {  # what a row computes that does not ask
    "hidden_act": ("silu", "swish"),
    "normalization_function": ("rmsnorm",),
}


class Asked(Mapping[str, Any]):
    """A config that remembers what anyone asked it for. So do the mappings in it, which are the parts of a config.

    Reading all of it, as `dict(config)` does, is asking for all of it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {key: Asked(value) if isinstance(value, Mapping) else value for key, value in config.items()}
        self._asked = set[str]()

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def __repr__(self) -> str:
        return repr(self._config)

    def left(self) -> dict[str, Any]:
        """Return what nobody asked for, by key ("text_config.key" of a part), that may ask for something.

        Null, false, 0 and what is empty ask for nothing, and neither do keys that change no number.
        """
        found: dict[str, Any] = {}
        for key, value in self._config.items():
            if isinstance(value, Asked) and (key == "text_config" or not _HARMLESS.fullmatch(key)) and value:
                found |= {f"{key}.{inner}": each for inner, each in value.left().items()}
            elif key not in self._asked and value and not _HARMLESS.fullmatch(key) and value not in _USUAL.get(key, ()):
                found[key] = value
        return found
