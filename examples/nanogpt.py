"""Record a nanoGPT-style loop: a character-level GPT with accumulation, clipping, warm-up, cosine decay and evaluation.

    python examples/nanogpt.py

A fault to try: with `--learning-rate 30` the weights become NaN, and `nan_or_inf` fires.
"""

import argparse
import math

import numpy as np
import torch
from torch import Tensor, nn

import watchstep
from watchstep_rules import DEFAULT_RULES, backtest_run

CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
UPDATES, WARMUP, MICRO_BATCHES, BATCH = 200, 20, 2, 16


def generate_text(sentences: int) -> str:
    rng = np.random.default_rng(0)
    words = [["the", "a", "every"], ["small", "red", "old"], ["cat", "robot", "sailor"], ["sees", "follows"]]
    order = [0, 1, 2, 3, 0, 2]
    return "".join(" ".join(rng.choice(words[i]) for i in order) + ".\n" for _ in range(sentences))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        residual: Tensor = x + self.mlp(self.norm2(x))
        return residual


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sample_batch(data: Tensor) -> tuple[Tensor, Tensor]:
    windows = data.unfold(0, CONTEXT + 1, 1)[torch.randint(len(data) - CONTEXT, (BATCH,))]
    return windows[:, :-1], windows[:, 1:]


def schedule(update: int) -> float:
    progress = max(0.0, (update - WARMUP) / (UPDATES - WARMUP))
    return min((update + 1) / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="watchstep-runs", help="folder or bucket URL for recorded runs")
parser.add_argument("--learning-rate", type=float, default=3e-3)
options = parser.parse_args()

torch.manual_seed(0)
text = generate_text(2000)
characters = sorted(set(text))
data = torch.tensor([characters.index(character) for character in text])
training, validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

model = GPT(len(characters))
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1, "name": "decay"},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "name": "no_decay"},
]
optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

with watchstep.Hook(options.store, on_stop="raise") as hook:
    hook.watch(model, optimizer)
    for update in range(UPDATES):
        for _ in range(MICRO_BATCHES):
            loss = model(*sample_batch(training))
            (loss / MICRO_BATCHES).backward()  # the undivided loss is recorded
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if update % 20 == 19:
            model.eval()
            with torch.no_grad():
                losses = [float(model(*sample_batch(validation))) for _ in range(4)]
            model.train()
            hook.log(loss=sum(losses) / len(losses), mode="eval")
            print(f"update {update + 1}: loss {loss.item():.3f}, evaluation {sum(losses) / len(losses):.3f}")

(attempt,) = backtest_run(hook.run_url, DEFAULT_RULES).attempts
fired = {outcome.config.name: outcome.fired[0].step for outcome in attempt.outcomes if outcome.fired}
print("run:", hook.run_url)
print("rules that fired, with their first step:", fired or "none")
