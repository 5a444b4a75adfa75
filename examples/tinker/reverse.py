"""Reinforcement learning by the Tinker SDK on the demo's task: the reward rises within a minute on a laptop's CPU.

TINKER_BASE_URL=http://127.0.0.1:8080 TINKER_API_KEY=tml-local python examples/tinker/reverse.py
"""

import argparse
import itertools

import tinker
from reverse_text.strings import Alphabet, answer_of, prompt, similarity, strings
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--base-model", default="reverse-text")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--letters", default="a-z", help="range of letters of the strings")
parser.add_argument("--min-length", type=int, default=4)
parser.add_argument("--max-length", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=5e-3)
given = parser.parse_args()
GROUPS, GROUP_SIZE = 8, 8


def reward(text: str, reply: str) -> float:
    answer = answer_of(reply)
    return 0.0 if answer is None else similarity(answer, text[::-1])


with tinker.ServiceClient() as service:
    trainer = service.create_lora_training_client(base_model=given.base_model, rank=8, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    texts = strings(Alphabet(given.letters, given.min_length, given.max_length), "train", 0)
    sampling = types.SamplingParams(max_tokens=28, temperature=1.0)
    for step in range(1, given.steps + 1):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        asked = []
        for text in itertools.islice(texts, GROUPS):
            messages = [{"role": "user", "content": prompt(text)}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            asked.append((text, ids, sampler.sample(types.ModelInput.from_ints(ids), GROUP_SIZE, sampling)))
        data, rewards = [], []
        for text, ids, promise in asked:
            sequences = promise.result().sequences
            replies = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
            group = [reward(text, reply) for reply in replies]
            rewards += group
            mean = sum(group) / len(group)
            for one, own in zip(sequences, group, strict=True):
                whole, before = [*ids, *one.tokens], len(ids) - 1
                columns = {
                    "target_tokens": whole[1:],
                    "logprobs": [0.0] * before + one.logprobs,
                    "advantages": [0.0] * before + [own - mean] * len(one.tokens),
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=columns))
        # Losses are sums: the learning rate is for a mean over the tokens.
        tokens = sum(len(one.tokens) for _, _, promise in asked for one in promise.result().sequences)
        backward = trainer.forward_backward(data, "importance_sampling")
        update = trainer.optim_step(types.AdamParams(learning_rate=given.learning_rate, grad_clip_norm=float(tokens)))
        loss = backward.result().metrics["loss:sum"] / tokens
        norm = (update.result().metrics or {})["grad_norm:mean"] / tokens
        print(f"step {step}  reward {sum(rewards) / len(rewards):.3f}  loss {loss:.4f}  norm {norm:.3f}", flush=True)
    print("saved", trainer.save_state("last").result().path)
