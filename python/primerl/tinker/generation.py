"""Samples by engines: a request for many becomes requests that an engine takes, and texts end them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from primerl.tinker.engines import Pool, Weights
from primerl.tinker.sampling import SampleRequest


class Generation:
    def __init__(self, pool: Pool, tokenizer: Any, most_samples: int) -> None:
        """`most_samples`: of one request to an engine."""
        self._pool, self._tokenizer, self._most_samples = pool, tokenizer, most_samples

    async def sampled(
        self, weights: Weights, request: SampleRequest, name: str
    ) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """Samples, and scores of the prompt where they were asked for, as engines give them. `name`: of the request,
        for its engines."""
        generate = partial(self._pool.generate, weights)
        body = {"token_ids": request.prompt, "sampling_params": request.sampling, "request_id": name}
        if not request.stop_texts:
            parts = []
            for first in range(0, request.samples, self._most_samples):
                count = min(self._most_samples, request.samples - first)
                seed = {} if request.seed is None else {"seed": request.seed + first}
                params = request.sampling | {"n": count} | seed
                parts.append(generate(body | {"sampling_params": params, "request_id": f"{name}-{first}"}))
            answers = await asyncio.gather(*parts)
            choices = [choice for answer in answers for choice in answer["choices"]]
            return choices, answers[0].get("prompt_logprobs")
        # Engines know ids of tokens only; a text that ends a sample is looked for here.
        until = partial(self._ended_by, request.stop_texts)
        scores, ended = None, []
        plain = {key: value for key, value in request.sampling.items() if key != "prompt_logprobs"}
        for index in range(request.samples):
            seed = {} if request.seed is None else {"seed": request.seed + index}
            one = body | {"sampling_params": plain | seed, "request_id": f"{name}-{index}"}
            ended.append(generate(one, until))
        done = await asyncio.gather(*ended)
        if request.prompt_logprobs:
            params = request.sampling | {"max_tokens": 1}
            scores = (await generate(body | {"sampling_params": params}))["prompt_logprobs"]
        return [answer["choices"][0] for answer in done], scores

    def _ended_by(self, texts: list[str], token_ids: list[int]) -> int | None:
        """How many tokens there are up to the one that completes a text; None where none is complete."""
        longest = max(map(len, texts))
        # A token is at least a byte, and a character at most four of them.
        window = 4 * longest + 64
        tail = token_ids[-window:]
        if not any(text in self._tokenizer.decode(tail, skip_special_tokens=False) for text in texts):
            return None
        for end in range(len(token_ids) - len(tail) + 1, len(token_ids) + 1):
            begin = max(0, end - window)
            decoded = self._tokenizer.decode(token_ids[begin:end], skip_special_tokens=False)
            if any(text in decoded for text in texts):
                return end
        return None
