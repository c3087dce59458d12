"""benchmarks/diloco_loss.py, the plain loop that says what DiLoCo loses, beside the library in a simulated cluster."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quicoll.numerics.codecs import codec_of
from quicoll.numerics.dtypes import FLOAT32
from quicoll.sim import Settings, Simulation
from quicoll.train import DiLoCo

if TYPE_CHECKING:
    from quicoll.job import Job

STEPS, PIECES, SEED = 16, 2, 3


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loop() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "diloco_loss.py"
    spec = importlib.util.spec_from_file_location("diloco_loss", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def by_the_library(loop: Any, setting: Any) -> torch.Tensor:
    """The parameters that two simulated ranks come to."""
    found: list[torch.Tensor] = []

    async def worker(job: Job, _: Simulation) -> None:
        torch.manual_seed(SEED)
        model = loop.EXAMPLE.Reader(0.0)
        momentum = setting.momentum
        diloco = DiLoCo(
            job,
            model,
            torch.optim.AdamW(model.parameters(), lr=setting.rate, betas=(0.9, setting.beta2)),
            torch.optim.SGD(model.parameters(), lr=setting.outer_rate, momentum=momentum, nesterov=momentum > 0),
            lambda model, part: loop.EXAMPLE.loss(
                model, loop.EXAMPLE.TEXT, loop.EXAMPLE.begins(SEED, part.step, part.shard, PIECES)
            ),
            shards=loop.WORKERS,
            every=setting.every,
            fragments=setting.fragments,
            delay=setting.delay,
            wire=setting.wire or None,
            feedback=setting.feedback,
            keep_inner=setting.keep_inner,
            schedule=lambda step: float(loop.EXAMPLE.annealed(step, STEPS)),
        )
        await diloco.run(steps=STEPS // setting.every)
        found.append(torch.cat([each.detach().reshape(-1) for each in model.parameters()]))

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=2, limit=400.0)).run()
    if outcome.error is not None:
        raise outcome.error
    assert torch.equal(*found)
    return found[0]


@pytest.mark.parametrize(
    "text",
    [
        "rate=0.05,every=4",
        "rate=0.05,every=4,wire=int4,fragments=2,delay=1,beta2=0.99",
        "rate=0.05,every=4,wire=topk-2bit:1/16,outer_rate=1.0,momentum=0.5,feedback=0.95",
        "rate=0.05,every=4,wire=topk:1/8,momentum=0.0,keep_inner=False",
    ],
)
def test_the_plain_loop_comes_to_what_the_library_comes_to(loop: Any, text: str) -> None:
    # Beside another setting and another seed, which are not to leave anything in this one.
    setting = loop.Setting.parse(text)
    trainer = loop.Trainer([loop.Setting(sync=True), setting], [SEED, SEED + 1], STEPS, PIECES)
    mine = trainer.run()[trainer.settings.index(setting), 0]
    theirs = by_the_library(loop, setting)
    moved = (theirs - loop.first(SEED)).norm()
    # AdamW divides by roots of next to nothing at first: what float32 rounds shows there.
    assert float((mine - theirs).norm() / moved) < 0.01
    assert loop.held_out(mine[None]).item() == pytest.approx(loop.held_out(theirs[None]).item(), rel=1e-4)


@pytest.mark.parametrize("wire", ["int4", "topk:1/64", "topk-2bit:1/4", "topk-2bit:1/16"])
def test_its_wire_formats_have_the_bits_of_the_library(loop: Any, wire: str) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(9001, generator=generator) * torch.rand(9001, generator=generator) ** 4
    codec = codec_of(wire)
    sent, out = np.empty(codec.wire_bytes(9001, FLOAT32), np.uint8), np.empty(9001, np.float32)
    codec.encode(numbers.numpy(), FLOAT32, sent)
    codec.decode(sent, FLOAT32, out)
    assert np.array_equal(loop.encoded(numbers[None], wire)[0].numpy(), out)


def test_a_setting_says_how_many_times_fewer_bytes_it_sends(loop: Any) -> None:
    assert loop.Setting.parse("wire=int4,every=56").fewer(26_944, 17_920) == pytest.approx(421, abs=1)
    assert loop.Setting.parse("wire=topk-2bit:1/4,every=192").fewer(26_944, 71_680) == pytest.approx(2037, abs=3)
    with pytest.raises(ValueError, match="'speed' is none of sync, rate"):
        loop.Setting.parse("speed=1")
