"""Lightning: a Trainer accepts a feeder instead of a DataLoader, with checkpoints inside an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiofeed import Feeder, Stream
from aiofeed.errors import IteratorClosedError, StateError

EPOCHS = 3
BATCHES = 7

pytestmark = [
    pytest.mark.integration,
    # Lightning and its imports warn about the machine, the small Trainer and new versions.
    pytest.mark.filterwarnings("default"),
]


class Lit:
    """Lightning's module and trainer. The first test that uses them imports Lightning, which takes seconds."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lightning = self.lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            """A regression that records its batches and saves a checkpoint after the given steps."""

            def __init__(self, save_after: tuple[int, ...] = (), folder: Path | None = None) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(2, 1, bias=False)
                torch.nn.init.constant_(self.linear.weight, 0.5)
                self.seen: list[tuple[int, torch.Tensor]] = []
                self.save_after = save_after
                self.folder = folder

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                self.seen.append((self.current_epoch, batch.clone()))
                return self.linear(batch / 26).square().mean()

            def on_train_batch_end(self, *_: Any) -> None:
                if self.global_step in self.save_after:
                    assert self.folder is not None
                    self.trainer.save_checkpoint(self.folder / f"{self.global_step}.ckpt")

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        self.Module = Module

    def trainer(self, folder: Path, **options: Any) -> Any:
        no_output = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        arguments = {"max_epochs": EPOCHS, "enable_checkpointing": False, **no_output, **options}
        return self.lightning.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **arguments)


@pytest.fixture(scope="module")
def lit() -> Lit:
    return Lit()


def same(one: list[tuple[int, torch.Tensor]], other: list[tuple[int, torch.Tensor]]) -> bool:
    """Return whether the batches and their epochs are equal bit for bit."""
    return len(one) == len(other) and all(
        epoch == epoch_of_other and torch.equal(batch, batch_of_other)
        for (epoch, batch), (epoch_of_other, batch_of_other) in zip(one, other, strict=True)
    )


def plain_loop(feeder: Feeder[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Return the batches of a plain loop, each with its epoch."""
    with feeder:
        return [(epoch, batch) for epoch in range(EPOCHS) for batch in feeder]


def test_fit_gives_what_a_plain_loop_gets(lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path) -> None:
    """`Trainer.fit` trains on the batches of a plain loop: every sample once per epoch, each epoch in another order."""
    module = lit.Module()
    lit.trainer(tmp_path).fit(module, train_dataloaders=make_feeder())
    assert same(module.seen, plain_loop(make_feeder()))
    orders = [
        [int(index) for of, batch in module.seen if of == epoch for index in batch[:, 0]] for epoch in range(EPOCHS)
    ]
    assert [sorted(order) for order in orders] == [list(range(26))] * EPOCHS
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_validation_with_a_feeder(
    lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path, num_sanity_val_steps: int
) -> None:
    """Each epoch ends with one complete validation epoch, with or without a sanity check before training."""
    seen: list[list[int]] = []

    class Validated(lit.Module):  # type: ignore[misc,name-defined]
        def on_validation_epoch_start(self) -> None:
            seen.append([])

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            seen[-1] += batch[:, 0].int().tolist()

    trainer = lit.trainer(tmp_path, num_sanity_val_steps=num_sanity_val_steps)
    trainer.fit(Validated(), train_dataloaders=make_feeder(), val_dataloaders=make_feeder(10, shuffle=False))
    assert seen == [[0, 1, 2, 3, 4, 5, 6, 7]] * bool(num_sanity_val_steps) + [list(range(10))] * EPOCHS


def test_resume_after_any_step_is_exact(lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path) -> None:
    """A run resumed from a checkpoint after any step continues with the next batch and ends with the weights of the
    uninterrupted run: it skips and repeats no batch, not even at the end of an epoch."""
    steps = range(1, EPOCHS * BATCHES)
    whole = lit.Module(save_after=tuple(steps), folder=tmp_path)
    lit.trainer(tmp_path).fit(whole, train_dataloaders=make_feeder())
    assert len(whole.seen) == EPOCHS * BATCHES
    for step in steps:
        rest = lit.Module()
        lit.trainer(tmp_path).fit(
            rest, train_dataloaders=make_feeder(), ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True
        )
        assert same(rest.seen, whole.seen[step:]), f"after step {step}"
        assert torch.equal(rest.linear.weight, whole.linear.weight), f"after step {step}"


def stream_of(length: int | None) -> Feeder[Any]:
    """A feeder over 26 items, shuffled in groups."""

    def items(epoch: int) -> Iterator[torch.Tensor]:
        for index in range(26):
            yield torch.tensor([float(index), float(epoch)])

    return Feeder(Stream(items, shuffle_buffer=10, length=length), batch_size=4)


@pytest.mark.parametrize("length", [None, 26])
def test_fit_with_a_stream(lit: Lit, tmp_path: Path, length: int | None) -> None:
    """`fit` gives the batches of a plain loop. With a length, a resume is exact; without one Lightning reads a batch
    ahead, which the state counts."""
    whole = lit.Module(save_after=(3, 9), folder=tmp_path)
    lit.trainer(tmp_path).fit(whole, train_dataloaders=stream_of(length))
    assert same(whole.seen, plain_loop(stream_of(None)))
    for step in (3, 9):
        rest = lit.Module()
        lit.trainer(tmp_path).fit(
            rest, train_dataloaders=stream_of(length), ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True
        )
        assert same(rest.seen, whole.seen[step + (length is None) :]), f"after step {step}"


def test_checkpoint_holds_the_feeders_state(lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path) -> None:
    """The checkpoint counts the trained batches: Lightning fetches no batch ahead from a loader with a length."""
    lit.trainer(tmp_path).fit(lit.Module(save_after=(3,), folder=tmp_path), train_dataloaders=make_feeder())
    [state] = torch.load(tmp_path / "3.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (state["epoch"], state["position"]) == (0, 3 * 4)


def test_model_checkpoint_resumes_in_mid_epoch(
    lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path
) -> None:
    """A run resumed from a checkpoint of `ModelCheckpoint(every_n_train_steps=...)` equals the uninterrupted run."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    class Fails(lit.Module):  # type: ignore[misc,name-defined]
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step == 12:
                raise OSError("power failure")

    whole, failed, rest = lit.Module(), Fails(), lit.Module()
    lit.trainer(tmp_path).fit(whole, train_dataloaders=make_feeder())
    keep = callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    with pytest.raises(OSError, match="power"):
        lit.trainer(tmp_path, enable_checkpointing=True, callbacks=[keep]).fit(failed, train_dataloaders=make_feeder())
    lit.trainer(tmp_path).fit(rest, train_dataloaders=make_feeder(), ckpt_path=tmp_path / "step=10.ckpt")
    assert same(failed.seen[:10] + rest.seen, whole.seen)
    assert torch.equal(rest.linear.weight, whole.linear.weight)


def test_resume_with_another_batch_size(lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path) -> None:
    """A feeder with another batch size delivers the rest of the epoch in its own batches."""
    before = lit.Module(save_after=(3,), folder=tmp_path)
    lit.trainer(tmp_path, max_steps=3).fit(before, train_dataloaders=make_feeder())
    rest = lit.Module()
    lit.trainer(tmp_path, max_epochs=1).fit(
        rest, train_dataloaders=make_feeder(batch_size=2), ckpt_path=tmp_path / "3.ckpt"
    )
    whole = [batch for epoch, batch in plain_loop(make_feeder()) if epoch == 0]
    assert torch.equal(torch.cat([batch for _, batch in before.seen + rest.seen]), torch.cat(whole))


def test_checkpoint_of_other_data_is_refused(lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path) -> None:
    """Resuming with other data ends `fit` with a `StateError` that names the difference."""
    lit.trainer(tmp_path).fit(lit.Module(save_after=(3,), folder=tmp_path), train_dataloaders=make_feeder())
    with pytest.raises(StateError, match="length: 26 in the state, 27 here"):
        lit.trainer(tmp_path).fit(lit.Module(), train_dataloaders=make_feeder(27), ckpt_path=tmp_path / "3.ckpt")


def test_one_feeder_for_training_and_validation_is_refused(
    lit: Lit, make_feeder: Callable[..., Feeder[Any]], tmp_path: Path
) -> None:
    """A validation inside the epoch starts a second iterator of the same feeder; the error names the way out."""

    class Validated(lit.Module):  # type: ignore[misc,name-defined]
        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            pass

    feeder = make_feeder()
    trainer = lit.trainer(tmp_path, val_check_interval=0.5, num_sanity_val_steps=0)
    with pytest.raises(IteratorClosedError, match=r"create two feeders, or an aiofeed\.DataLoader"):
        trainer.fit(Validated(), train_dataloaders=feeder, val_dataloaders=feeder)
