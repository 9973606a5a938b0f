"""lm-eval's client of chats, in a module of its own: lm-eval takes seconds to import."""

from __future__ import annotations

from typing import Any

from lm_eval.models.openai_completions import LocalChatCompletion


class WholeAnswers(LocalChatCompletion):  # type: ignore[misc]
    """Reads thoughts that no answer follows as the answer, as if the server had not parted them from it."""

    def parse_generations(self, outputs: Any, **options: Any) -> list[str]:
        for output in outputs if isinstance(outputs, list) else [outputs]:
            for choice in output.get("choices", ()):
                message = choice.get("message", {})
                if not message.get("content") and message.get("reasoning"):
                    message["content"] = message["reasoning"]
        texts: list[str] = super().parse_generations(outputs, **options)
        return texts
