"""Make tests/data/smollm2_greedy.json: greedy continuations by Hugging Face transformers with torch, float32.

Run in an environment with torch and transformers:

    .venv-torch/bin/python tests/benchmarks/greedy.py

A prompt is kept only if on every step its best logit leads the second by `LEAST_LEAD`: elsewhere the last bits of
float32 could decide.
"""

from __future__ import annotations

import itertools
import json
import pathlib

TOPICS = ("rain", "a bicycle", "prime numbers", "bread", "the moon", "a violin", "salt", "maps", "glass", "bees",
          "a lighthouse", "rivers")
REQUESTS = ("Explain {} to a child.", "Write one sentence about {}.", "List three facts about {}.",
            "Why do people care about {}?", "Tell a short story about {}.", "What is the history of {}?",
            "Ask me a question about {}.", "Describe {} without using its name.")
PROMPTS, NEW, LEAST_LEAD = 50, 32, 0.01
REPO = pathlib.Path(__file__).resolve().parents[2]
MODEL, OUTPUT = REPO / "models" / "SmolLM2-135M-Instruct", REPO / "tests" / "data" / "smollm2_greedy.json"


def main() -> None:
    """The first so many prompts that stay clear, one at a time and so without padding."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    kept, tried = [], 0
    for topic, request in itertools.product(TOPICS, REQUESTS):
        if len(kept) == PROMPTS:
            break
        tried += 1
        text = tokenizer.apply_chat_template([{"role": "user", "content": request.format(topic)}], tokenize=False,
                                             add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, output_logits=True,
                                 return_dict_in_generate=True)
        leads = [float(best - second) for best, second in (logits[0].topk(2).values for logits in out.logits)]
        if min(leads) >= LEAST_LEAD:
            kept.append({"prompt": prompt, "greedy": out.sequences[0, len(prompt) :].tolist(),
                         "least_lead": round(min(leads), 4)})
    assert len(kept) == PROMPTS, f"only {len(kept)} of {tried} prompts stay clear"
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    print(f"{len(kept)} of {tried} prompts; torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
