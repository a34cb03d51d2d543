"""What mlx-lm does for the daemon: finding a model's tokenizer.

The only file of the daemon that imports mlx-lm, inside functions that run in
`MLX_THREAD`: nothing of it is loaded before the listener is bound, and MLX is told
to keep to the CPU first, so that the daemon never opens a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlxd.text.detokenize import BytePieces, byte_level_piece, spm_piece
from mlxd.text.mlxthread import MlxThread

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

#: One for the process, so that tokenizers load one at a time: the first load imports
#: transformers, whose lazy modules are not safe to import from two threads at once.
MLX_THREAD = MlxThread()


class TokenizerError(Exception):
    """A model folder whose tokenizer cannot be used, and why."""


def load_wrapper(path: Path, *, trust_remote_code: bool) -> TokenizerWrapper:
    """mlx-lm's tokenizer of a model folder, with the end-of-sequence ids of its configs.

    Raises:
        TokenizerError: see `Tokenizer.load`.
    """
    import mlx.core as mx  # noqa: PLC0415 - see above

    mx.set_default_device(mx.cpu)
    from mlx_lm.utils import load_config, load_tokenizer  # noqa: PLC0415 - see above
    from transformers.utils.logging import set_verbosity_error  # noqa: PLC0415 - see above

    set_verbosity_error()  # type: ignore[no-untyped-call]  # its advice is for people who call it
    try:
        config = load_config(path)
        if "model_file" in config and not trust_remote_code:
            raise TokenizerError(
                f"{path} wants its own code to be run ({config['model_file']}); "
                "set trust_remote_code = true for this model if you trust it"
            )
        wrapper: TokenizerWrapper = load_tokenizer(  # type: ignore[no-untyped-call]
            path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TokenizerError(f"cannot load the tokenizer of {path}: {error}") from error
    return wrapper


def byte_pieces(wrapper: TokenizerWrapper) -> BytePieces | None:
    """The bytes of every token, where mlx-lm found the tokenizer to be of such a kind."""
    from mlx_lm.tokenizer_utils import (  # noqa: PLC0415 - see above
        BPEStreamingDetokenizer,
        SPMStreamingDetokenizer,
    )

    kind = wrapper.detokenizer
    if isinstance(kind, BPEStreamingDetokenizer):
        return BytePieces(kind.tokenmap, byte_level_piece)
    if isinstance(kind, SPMStreamingDetokenizer):
        return BytePieces(kind.tokenmap, spm_piece)
    return None
