"""Record the Hugging Face Trainer: a small BERT learns to classify generated reviews.

    python examples/huggingface_trainer.py

A fault to try: with `--learning-rate 1` the pooler's tanh saturates, and `saturated_activation` and `vanishing_gradient` fire.
"""

import argparse
import tempfile

import numpy as np
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from watchstep.integrations.transformers import WatchstepCallback
from watchstep_rules import DEFAULT_RULES, backtest_run

POSITIVE = ["good", "great", "fine", "lovely"]
NEGATIVE = ["bad", "awful", "dull", "poor"]
NEUTRAL = ["the", "film", "plot", "was", "and", "actors", "were", "music", "scene", "end"]
VOCABULARY = {word: number for number, word in enumerate(["[PAD]", *POSITIVE, *NEGATIVE, *NEUTRAL])}


def generate_reviews(number: int, rng: np.random.Generator) -> list[dict[str, object]]:
    """Reviews of 16 words, of which three express the opinion."""
    reviews: list[dict[str, object]] = []
    for _ in range(number):
        label = int(rng.integers(2))
        opinion = rng.choice([NEGATIVE, POSITIVE][label], size=3)
        words = rng.permutation([*rng.choice(NEUTRAL, size=13), *opinion])
        reviews.append({"input_ids": [VOCABULARY[word] for word in words], "labels": label})
    return reviews


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="watchstep-runs", help="folder or bucket URL for recorded runs")
parser.add_argument("--learning-rate", type=float, default=1e-3)
options = parser.parse_args()

set_seed(0)
rng = np.random.default_rng(0)
config = BertConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),  # no checkpoints are saved
    learning_rate=options.learning_rate,
    lr_scheduler_type="cosine",
    warmup_steps=15,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=64,
    max_steps=150,
    eval_strategy="steps",
    eval_steps=25,
    logging_steps=25,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=0,
)
callback = WatchstepCallback(options.store, on_stop="stop")
trainer = Trainer(
    BertForSequenceClassification(config),
    arguments,
    train_dataset=generate_reviews(2400, rng),
    eval_dataset=generate_reviews(256, rng),
    callbacks=[callback],
)
trainer.train()

assert callback.hook is not None
(attempt,) = backtest_run(callback.hook.run_url, DEFAULT_RULES).attempts
fired = {outcome.config.name: outcome.fired[0].step for outcome in attempt.outcomes if outcome.fired}
print("run:", callback.hook.run_url)
print("rules that fired, with their first step:", fired or "none")
