"""Local tokenizers of models that mark reasoning and tool calls, made from the starter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Tokens of the starter that become other ones.
RENAMED = {"<repo_name>": "<think>", "<reponame>": "</think>"}

#: Much as Qwen's.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}

<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool in OpenAI's shape, with properties of these types."""
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def marked_model(
    starter: Path,
    folder: Path,
    *,
    thinking: bool = False,
    template: str = TEMPLATE,
    parser: str | None = None,
) -> Path:
    """The tokenizer files of such a model.

    Args:
        thinking: whether its vocabulary has `<think>` and `</think>`.
        parser: the name of a parser of mlx-lm; None = as inferred from the template.
    """
    renamed = RENAMED if thinking else {}
    content = json.loads((starter / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {renamed.get(word, word): i for word, i in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((starter / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    if parser is not None:
        config["tool_parser_type"] = parser
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text((starter / "config.json").read_text())
    return folder
