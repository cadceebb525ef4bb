"""Train a small CNN on scikit-learn's handwritten digits, three ways:

CPU torch for reference, device "jax" op by op, and device "jax" with the whole
train step compiled by `torchax_tpu.jit`. The training code is the same for all
three and is plain PyTorch; only the device name and the decorator differ.

    python examples/digits.py [--epochs 12] [--batch-size 64] [--device jax] [--seed 0]

Exit status 1 if a run on the device stays below 97 % held-out accuracy.
"""

import argparse
import os
import statistics
import sys
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from tqdm.auto import tqdm

ACCURACY = 0.97


def load_data():
    """1,797 images of 8x8, standardised by the training part; a fixed stratified split."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(a, dtype=torch.float32).view(-1, 1, 8, 8) for a in split[:2])
    train_y, test_y = (torch.tensor(a, dtype=torch.int64) for a in split[2:])
    mean, std = train_x.mean(), train_x.std()
    return ((train_x - mean) / std, train_y), ((test_x - mean) / std, test_y)


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 4, 64),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(64, 10),
        )

    def forward(self, x):
        return self.classify(self.features(x))


def batches(x, y, size, generator):
    """Shuffled batches of one size: the rest of an epoch would be a second shape to compile."""
    order = torch.randperm(len(x), generator=generator)
    for i in range(0, len(x) - size + 1, size):
        index = order[i : i + size]
        yield x[index], y[index]


def train(data, device, *, epochs, batch_size, seed, jit=None, label=""):
    """Train a fresh net. Returns losses per epoch, held-out accuracy and timings."""
    (train_x, train_y), (test_x, test_y) = data
    torch.manual_seed(seed)
    shuffle = torch.Generator().manual_seed(seed)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    steps = len(train_x) // batch_size
    # A new learning rate at every step: a compiled step must see it, and not recompile.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * steps)
    ran = [0]  # a list: a jitted function compiles anew when a number it closes over changes

    def step(x, y):
        ran[0] += 1  # runs when Python does: at each call in eager, once under jit
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        return loss

    if jit is not None:
        step = jit(step)

    losses, seconds, first = [], [], None
    with tqdm(total=epochs * steps, desc=f"{label:>9}", unit="step", dynamic_ncols=True) as bar:
        for _ in range(epochs):
            model.train()
            started = time.perf_counter()
            total = torch.zeros((), device=device)
            for x, y in batches(train_x, train_y, batch_size, shuffle):
                loss = step(x.to(device), y.to(device))
                scheduler.step()
                if first is None:
                    loss.item()
                    first = time.perf_counter() - started
                total += loss.detach()
                bar.update()
            losses.append(total.item() / steps)  # waits for the device, so the time below is true
            seconds.append(time.perf_counter() - started)
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)

    model.eval()
    with torch.no_grad():
        predicted = model(test_x.to(device)).argmax(1)
        accuracy = (predicted == test_y.to(device)).float().mean().item()
    # The first epoch compiles.
    rate = steps / statistics.median(seconds[1:] or seconds)
    return {
        "losses": losses,
        "accuracy": accuracy,
        "steps_per_second": rate,
        "first_step": first,
        "python_ran": ran[0],
        "steps": epochs * steps,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default=os.environ.get("TORCHAX_TPU_DEVICE", "jax"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    runs = [("CPU torch", "cpu", None)]
    if args.device != "cpu":
        import jax

        import torchax_tpu

        device = jax.devices()[0]
        print(
            f"device {args.device!r}   platform {jax.default_backend()} ({device.device_kind}, {jax.device_count()})"
            f"   torch {torch.__version__}   jax {jax.__version__}"
        )
        runs += [("eager", args.device, None), ("jit", args.device, torchax_tpu.jit)]

    data = load_data()
    print(f"digits: {len(data[0][0])} images to train on, {len(data[1][0])} held out")
    results = {
        label: train(
            data, device, epochs=args.epochs, batch_size=args.batch_size, seed=args.seed, jit=jit, label=label
        )
        for label, device, jit in runs
    }

    print(f"\n{'':9}  {'loss':>7}  {'held-out':>8}  {'steps/s':>8}  {'first step':>10}  Python ran")
    for label, r in results.items():
        print(
            f"{label:>9}  {r['losses'][-1]:7.4f}  {r['accuracy']:8.2%}  {r['steps_per_second']:8.1f}"
            f"  {r['first_step']:9.2f}s  {r['python_ran']} of {r['steps']} steps"
        )
    low = [label for label, r in results.items() if r["accuracy"] < ACCURACY]
    if low:
        print(f"held-out accuracy below {ACCURACY:.0%}: {', '.join(low)}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
