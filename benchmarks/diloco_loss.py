"""What DiLoCo loses: its arithmetic as a plain loop in one process, with many settings and seeds trained at a time.

    python benchmarks/diloco_loss.py [--steps 4480] [--pieces 8] [--seeds 1,2,3] [--device cpu] [--json FILE]
                                     [SETTING ...]

    python benchmarks/diloco_loss.py --device cuda --steps 17920 sync,rate=0.02 wire=int4,rate=0.006

The model, the text and what is read when are those of examples/diloco.py, without dropout. A SETTING is fields of
`Setting` with their values, by commas; what is not said is as it stands there. `sync` is synchronous training: the same
inner optimizer, whose gradients are averaged over the workers in each step. One row for each setting, the best first:
the loss of the held-out text, in the mean and by seed; beside that of the best synchronous one; and how many times
fewer bytes a rank of four sends than with float32 gradients in each step, without what messages have around them.

Nothing is sent, and no code of the library trains anything: it is an oracle, which a test holds against the library.
On a GPU the inner step is captured once, and replayed; some hundred models are trained in the time of one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from quicoll.numerics.codecs import codec_of
from quicoll.numerics.dtypes import FLOAT32
from quicoll.train.diloco_turns import FragmentTurn, cut_fragments, turns_of

HEADS, LAYERS, CHUNK = 4, 2, 4096


def _example() -> Any:
    path = Path(__file__).resolve().parent.parent / "examples" / "diloco.py"
    spec = importlib.util.spec_from_file_location("diloco_example", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = _example()
LENGTH, WORKERS, WIDTH = int(EXAMPLE.LENGTH), int(EXAMPLE.WORKERS), int(EXAMPLE.WIDTH)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is trained.

    Attributes:
        sync: Synchronous, and nothing of what follows `decay`.
        rate: The inner learning rate, which rises for 50 steps and falls along a cosine to nothing.
        beta2: Of AdamW, as is the next.
        decay: The weight decay.
        every: As in `quicoll.train.DiLoCo`, and so are the others.
    """

    sync: bool = False
    rate: float = 0.01
    beta2: float = 0.999
    decay: float = 0.01
    every: int = 56
    wire: str = ""
    outer_rate: float = 0.7
    momentum: float = 0.9
    feedback: float = 1.0
    keep_inner: bool = True
    fragments: int = 1
    delay: int = 0
    mix: float = 0.5

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Return the setting of a text, such as `wire=int4,rate=0.006`. Raises ValueError: it is none."""
        defaults = {each.name: each.default for each in fields(cls)}
        found: dict[str, Any] = {}
        for word in text.split(","):
            name, given, value = word.partition("=")
            if name not in defaults:
                raise ValueError(f"{name!r} is none of {', '.join(defaults)}")
            kind: Any = type(defaults[name])
            found[name] = (value.lower() == "true" if given else True) if kind is bool else kind(value)
        return cls(**found)

    def __str__(self) -> str:
        plain = asdict(Setting())
        words = [name if value is True else f"{name}={value}" for name, value in asdict(self).items()
                 if value != plain[name]]  # fmt: skip
        return ",".join(words) or f"rate={self.rate}"

    def rounds(self, steps: int) -> int:
        """Return the whole rounds in so many steps: it trains for no more."""
        return steps // self.every

    def length(self, steps: int) -> int:
        """Return for how many of the steps it trains."""
        return steps if self.sync else self.rounds(steps) * self.every

    def fewer(self, numbers: int, steps: int) -> float:
        """Return how many times fewer bytes a rank sends than with float32 gradients of all numbers in each step."""
        if self.sync:
            return 1.0
        ranks = WORKERS
        step = 2 * (ranks - 1) / ranks * 4 * numbers
        one = step
        if self.wire:
            codec = codec_of(self.wire)
            one = codec.wire_bytes(numbers, FLOAT32) * (ranks - 1) * (1.0 if codec.gathered else 2 / ranks)
        return self.length(steps) * step / (self.rounds(steps) * one)

    def alike(self) -> tuple[Any, ...]:
        """What settings have in common whose outer steps are computed together."""
        return (self.sync, self.every, self.wire, self.keep_inner, self.fragments, self.delay, self.mix)


# -- the model, many at a time -----------------------------------------------------------------------------------------


class _Looked(torch.autograd.Function):
    """Rows of many tables, by the same numbers; their gradient is a product with one-hot rows, and so repeatable."""

    @staticmethod
    def forward(ctx: Any, tables: torch.Tensor, letters: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
        """tables: [R, C, V, D]. letters: [R, P]. hot: [R, V, P]."""
        ctx.save_for_backward(hot)
        rows, many, _, width = tables.shape
        return tables.gather(2, letters[:, None, :, None].expand(rows, many, letters.shape[1], width))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        (hot,), (gradient,) = ctx.saved_tensors, gradients
        rows, many, count, width = gradient.shape
        flat = gradient.transpose(1, 2).reshape(rows, count, many * width)
        return torch.bmm(hot, flat).view(rows, hot.shape[1], many, width).transpose(1, 2), None, None


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters' names in `Reader`, and their shapes, in their order."""
    return {name: tuple(each.shape) for name, each in EXAMPLE.Reader(0.0).named_parameters()}


def first(seed: int) -> torch.Tensor:
    """Return the parameters that training begins with, flat."""
    torch.manual_seed(seed)
    return torch.cat([each.detach().reshape(-1) for each in EXAMPLE.Reader(0.0).parameters()])


def said(
    flat: torch.Tensor, letters: torch.Tensor, hot: torch.Tensor, given: dict[str, tuple[int, ...]]
) -> torch.Tensor:
    """Return what models say of each letter's next one, [R * C, B * L, V].

    Args:
        flat: Their parameters, [R, C, N]; the C of a row read the same.
        letters: What is read, [R, B, L].
        hot: One-hot rows of that, [R, V, B * L]; of any size where no gradient is asked for.
        given: The shapes of the parameters.
    """
    rows, many, _ = flat.shape
    pieces, length = letters.shape[1:]
    group, head = rows * many, WIDTH // HEADS
    parts = torch.split(flat, [math.prod(shape) for shape in given.values()], dim=-1)
    p = {name: part.reshape(group, *shape) for (name, shape), part in zip(given.items(), parts, strict=True)}

    def line(h: torch.Tensor, weight: str, bias: str) -> torch.Tensor:
        return torch.baddbmm(p[bias][:, None], h, p[weight].transpose(1, 2))

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        return torch.addcmul(
            p[f"{name}.bias"][:, None], functional.layer_norm(h, (WIDTH,)), p[f"{name}.weight"][:, None]
        )

    tables = p["letters.weight"].view(rows, many, -1, WIDTH)
    h: torch.Tensor = _Looked.apply(tables, letters.reshape(rows, -1), hot)  # type: ignore[no-untyped-call]  # torch has no type for it
    h = (h.view(group, pieces, length, WIDTH) + p["places"][:, None]).view(group, pieces * length, WIDTH)
    for layer in range(LAYERS):
        at = f"layers.layers.{layer}"
        mixed = line(norm(h, f"{at}.norm1"), f"{at}.self_attn.in_proj_weight", f"{at}.self_attn.in_proj_bias")
        q, k, v = mixed.view(group * pieces, length, 3, HEADS, head).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3)
        found = found.reshape(group, pieces * length, WIDTH)
        h = h + line(found, f"{at}.self_attn.out_proj.weight", f"{at}.self_attn.out_proj.bias")
        wide = torch.relu(line(norm(h, f"{at}.norm2"), f"{at}.linear1.weight", f"{at}.linear1.bias"))
        h = h + line(wide, f"{at}.linear2.weight", f"{at}.linear2.bias")
    return line(h, "next.weight", "next.bias")


def held_out(models: torch.Tensor, at_a_time: int = 1 << 17) -> torch.Tensor:
    """Return the mean loss of each model, [G, N], on all pieces of the held-out text."""
    text = EXAMPLE.HELD_OUT.to(models.device)
    rows = torch.stack([text[begin : begin + LENGTH + 1] for begin in range(0, len(text) - LENGTH, LENGTH)])
    total = torch.zeros(len(models), dtype=torch.float64, device=models.device)
    chunk = max(1, at_a_time // LENGTH // len(models))
    given = shapes()
    with torch.no_grad():
        for some in torch.split(rows, chunk):
            out = functional.log_softmax(said(models[None], some[None, :, :-1], torch.empty(0), given), -1)
            total -= out.gather(2, some[:, 1:].reshape(1, -1, 1).expand(len(models), -1, 1)).sum((1, 2)).double()
    return total / rows[:, 1:].numel()


# -- wire formats, as quicoll.numerics has them: the same bits ---------------------------------------------------------


def _cut(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, towards zero."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


def _int4(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    blocks = functional.pad(x, (0, -size % 64)).view(*x.shape[:-1], -1, 64)
    exact = blocks.abs().amax(-1, keepdim=True).double() / 7
    single = exact.float()
    single = torch.where(single.double() < exact, torch.nextafter(single, torch.full_like(single, math.inf)), single)
    scale = ((single.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scale = torch.where(scale == 0, 1.0, scale)
    found: torch.Tensor = ((blocks / scale).round() * scale).flatten(-2)[..., :size]
    return found


def _top_k(x: torch.Tensor, n: int, *, two_bit: bool) -> torch.Tensor:
    out = torch.zeros_like(x)
    for begin in range(0, x.shape[-1], CHUNK):
        part = x[..., begin : begin + CHUNK]
        kept = -(-part.shape[-1] // n)
        sizes, places = part.abs().topk(kept, dim=-1)
        values = part.gather(-1, places)
        if two_bit:
            high = kept // 4
            large, small = _cut(sizes[..., high // 2, None]), _cut(sizes[..., (high + kept) // 2, None])
            sign = torch.where(torch.signbit(values), -1.0, 1.0)
            values = sign * torch.where(sizes + sizes > large + small, large, small)
        else:
            values = values.bfloat16().float()
        out[..., begin : begin + CHUNK].scatter_(-1, places, values)
    return out


def encoded(x: torch.Tensor, wire: str) -> torch.Tensor:
    """Return what comes out of a wire format, of finite numbers."""
    if wire == "int4":
        return _int4(x)
    name, _, n = wire.partition(":1/")
    if name not in ("topk", "topk-2bit"):
        raise ValueError(f"{wire} is none of int4, topk:1/n and topk-2bit:1/n")
    return _top_k(x, int(n), two_bit=name == "topk-2bit")


# -- training ----------------------------------------------------------------------------------------------------------


class Trainer:
    """Models of some settings and seeds that are trained together. Tensors are [seeds, workers, settings, numbers]."""

    def __init__(
        self, settings: Sequence[Setting], seeds: Sequence[int], steps: int, pieces: int, device: str = "cpu"
    ) -> None:
        """Make them.

        Args:
            settings: The settings; `self.settings` has them in the order of the results.
            seeds: Of the models and of what is read.
            steps: How many inner steps.
            pieces: How many pieces of text a worker reads in each.
            device: Where.
        """
        self.settings = sorted(settings, key=lambda each: str(each.alike()))
        self.seeds, self.steps, self.pieces, self.device = seeds, steps, pieces, device
        self._given = shapes()
        self._text = EXAMPLE.TEXT.to(device)
        self._begins = torch.stack(
            [
                torch.stack([torch.stack([EXAMPLE.begins(s, t, w, pieces) for w in range(WORKERS)]) for s in seeds])
                for t in range(1, steps + 1)
            ]
        ).to(device)
        self._starts = torch.stack([first(seed) for seed in seeds]).to(device)
        self.numbers = self._starts.shape[1]
        shape = (len(seeds), WORKERS, len(settings), self.numbers)
        self._own = torch.empty(shape, device=device, requires_grad=True)
        self._m, self._v, self._residual = (torch.empty(shape, device=device) for _ in range(3))
        self._job, self._buffer = (torch.empty(shape[0], *shape[2:], device=device) for _ in range(2))
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._done = torch.zeros(len(settings), dtype=torch.float64, device=device)
        self._rates = torch.zeros(steps, len(settings), dtype=torch.float64)
        for place, each in enumerate(self.settings):
            length = each.length(steps)
            factors = [EXAMPLE.annealed(step, length) for step in range(1, length + 1)]
            self._rates[:length, place] = each.rate * torch.tensor(factors, dtype=torch.float64)
        self._rates = self._rates.to(device)
        self._sync = torch.tensor([each.sync for each in self.settings], device=device)[:, None]
        self._beta2 = torch.tensor([each.beta2 for each in self.settings], dtype=torch.float64, device=device)
        self._decay, self._outer_rate, self._momentum, self._feedback = (
            torch.tensor([getattr(each, name) for each in self.settings], device=device)
            for name in ("decay", "outer_rate", "momentum", "feedback")
        )
        self._turns: dict[int, list[tuple[slice, FragmentTurn]]] = {}
        self._under_way: dict[tuple[int, int], torch.Tensor] = {}
        kinds = [each.alike() for each in self.settings]
        for kind in dict.fromkeys(kinds):
            members = slice(kinds.index(kind), kinds.index(kind) + kinds.count(kind))
            each = self.settings[members.start]
            if not each.sync:
                for number in range(each.rounds(steps)):
                    for turn in turns_of(each.every, each.fragments, each.delay):
                        self._turns.setdefault(number * each.every + turn.at, []).append((members, turn))

    def _begin(self) -> None:
        with torch.no_grad():
            self._own.copy_(self._starts[:, None, None].expand_as(self._own))
            self._job.copy_(self._starts[:, None].expand_as(self._job))
            for each in (self._m, self._v, self._residual, self._buffer, self._number, self._done):
                each.zero_()

    def _inner(self) -> None:
        """An inner step of all: AdamW, as torch has it."""
        rows = len(self.seeds) * WORKERS
        reach = torch.arange(LENGTH + 1, device=self.device)
        begins = self._begins.index_select(0, self._number)[0]
        read = self._text[begins[..., None] + reach].view(rows, self.pieces, LENGTH + 1)
        x, y = read[..., :-1], read[..., 1:]
        letters = torch.arange(self._given["letters.weight"][0], device=self.device)
        hot = (x.reshape(rows, 1, -1) == letters[None, :, None]).float()
        out = said(self._own.view(rows, len(self.settings), -1), x, hot, self._given)
        aims = y.reshape(rows, 1, -1).expand(-1, len(self.settings), -1).reshape(-1)
        losses = functional.cross_entropy(out.flatten(0, 1), aims, reduction="sum") / (self.pieces * LENGTH)
        (gradient,) = torch.autograd.grad(losses, self._own)
        with torch.no_grad():
            gradient = torch.where(self._sync, gradient.mean(1, keepdim=True), gradient)
            self._done.add_(1.0)
            rate = self._rates.index_select(0, self._number)[0]
            self._m.lerp_(gradient, 0.1)
            self._v.mul_(self._beta2.float()[:, None])
            self._v.addcmul_(gradient * (1 - self._beta2).float()[:, None], gradient)
            root = self._v.sqrt() / (1 - self._beta2**self._done).sqrt().float()[:, None] + 1e-8
            self._own.mul_((1 - rate * self._decay).float()[:, None])
            self._own.sub_(self._m / root * (rate / (1 - 0.9**self._done)).float()[:, None])
            self._number.add_(1)

    def _turn(self, members: slice, turn: FragmentTurn) -> None:
        """An exchange of a fragment begins, of some settings; or what came of it is applied."""
        each = self.settings[members.start]
        sizes = [math.prod(shape) for shape in self._given.values()]
        cut = cut_fragments(sizes, each.fragments)[turn.fragment]
        part = slice(sum(sizes[: cut.start]), sum(sizes[: cut.stop]))
        own, job = self._own.data[:, :, members, part], self._job[:, members, part]
        if turn.begins:
            sent = job[:, None] - own
            if each.wire:
                kept = self._residual[:, :, members, part]
                total = sent + kept * self._feedback[members, None]
                sent = encoded(total, each.wire)
                kept.copy_(total - sent)
            mean = ((sent[:, 0] + sent[:, 1]) + (sent[:, 2] + sent[:, 3])) / 4
            # The owner of a sum encodes it again, but where all leaves go to all ranks.
            self._under_way[members.start, turn.fragment] = encoded(mean, "int4") if each.wire == "int4" else mean
            return
        mean = self._under_way.pop((members.start, turn.fragment))
        beta = self._momentum[members, None]
        job -= self._outer_rate[members, None] * (mean + beta * self._buffer[:, members, part].mul_(beta).add_(mean))
        mix = each.mix if each.delay else 0.0
        own.copy_(own * mix + job[:, None] * (1.0 - mix))
        if not each.keep_inner and turn.at == each.every:
            self._m[:, :, members], self._v[:, :, members], self._done[members] = 0.0, 0.0, 0.0

    def run(self) -> torch.Tensor:
        """Train; return the parameters of the jobs, [settings, seeds, numbers]."""
        self._begin()
        step: Callable[[], None] = self._inner
        if self.device == "cuda":
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no type for it
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._inner()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._inner()
            step = graph.replay
            self._begin()
        for number in range(self.steps + 1):
            if number:
                step()
            # What ends a round comes before what begins with no step of the next.
            with torch.no_grad():
                for members, turn in sorted(self._turns.get(number, ()), key=lambda each: each[1].at == 0):
                    self._turn(members, turn)
        return torch.where(self._sync, self._own.detach()[:, 0], self._job).transpose(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4480)
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", type=Setting.parse, metavar="SETTING")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = options.settings or [Setting(sync=True, rate=0.02), Setting(wire="int4", rate=0.006)]
    began = time.perf_counter()
    trainer = Trainer(settings, [int(seed) for seed in options.seeds.split(",")], options.steps, options.pieces,
                      options.device)  # fmt: skip
    models = trainer.run()
    losses = held_out(models.flatten(0, 1)).view(models.shape[:2]).cpu()
    seconds = time.perf_counter() - began
    rows = sorted(zip(trainer.settings, losses.tolist(), strict=True), key=lambda row: math.fsum(row[1]))
    best = min((math.fsum(found) for each, found in rows if each.sync), default=math.nan)
    for each, found in rows:
        mean, by_seed = math.fsum(found) / len(found), " ".join(f"{loss:.4f}" for loss in found)
        fewer = f"{each.fewer(trainer.numbers, options.steps):,.0f} times fewer bytes"
        print(f"{mean:.4f} ({by_seed}) {mean * len(found) / best - 1:+.2%} {fewer:>24}  {each}")
    print(
        f"{options.steps} steps of {options.pieces} pieces for each of {WORKERS} workers, {seconds:.0f} s",
        file=sys.stderr,
    )
    if options.json:
        how = {"steps": options.steps, "pieces": options.pieces, "seeds": options.seeds}
        told = [{**asdict(each), **how, "loss": found} for each, found in rows]
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
