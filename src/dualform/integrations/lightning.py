"""Recording a Lightning `Trainer`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from dualform.errors import RecordingError
from dualform.integrations.ids import Carried, LoaderIds, is_indexed, naming
from dualform.integrations.session import RecordingSession, resuming, started
from dualform.private import is_compiled_by_lightning
from dualform.recording import Recorder, run_path

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "dualform.integrations.lightning needs lightning; "
        "install it with: pip install 'dualform[lightning]'"
    ) from error


__all__ = ["LightningCallback"]


class LightningCallback(Callback):
    """Records what a Lightning `Trainer` fits; samples are named by their index in the dataset.

    ```python
    trainer = Trainer(max_epochs=3, callbacks=[LightningCallback("runs/mine")])
    trainer.fit(module, loader)
    print(dualform.open("runs/mine").audit())
    ```

    It starts with the training and ends with it, also after an exception. Where Lightning saves a
    checkpoint, the run is marked too, and `trainer.fit(..., ckpt_path=...)` goes on with it.

    Args:
        path: the run folder.
        ids_of: gives the ids of a batch; for data without an index, such as streams.
        options: those of `dualform.record`, such as overwrite, dataset or strict.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ids_of: Callable[[Any], Tensor | Sequence[int] | Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        self._path, self._ids_of, self._options = run_path(path), ids_of, options
        self._session: RecordingSession | None = None
        self._recorder: Recorder | None = None
        self._waiting: deque[LoaderIds] = deque()
        self._restore: Callable[[], None] | None = None

    @property
    def recorder(self) -> Recorder:
        """The recorder of the training that runs, or that ran last."""
        return started(self._recorder, "trainer.fit(…)")

    def close(self, error: BaseException | None = None) -> None:
        """Ends the recording, if there is one."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
        session, self._session = self._session, None
        if session is not None:
            session.close(error)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Has the loaders that Lightning makes or is given name their samples."""
        if stage != "fit":
            return
        self.close()
        if self._ids_of is None:
            self._name_loaders(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the recording."""
        _check_training(trainer, pl_module)
        if self._ids_of is None and not isinstance(trainer.train_dataloader, DataLoader):
            given = type(trainer.train_dataloader).__name__
            raise RecordingError(
                f"LightningCallback reads ids from one train loader, and was given a {given}; "
                "give one DataLoader, or say which ids a batch has: "
                "LightningCallback(path, ids_of=…)."
            )
        options = resuming(self._path, trainer.global_step, self._options)
        optimizer = trainer.optimizers[0]
        self._session = RecordingSession(self, pl_module, optimizer, self._path, **options)
        self._recorder = self._session.recorder

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Names the samples of the batch."""
        if self._ids_of is not None:
            self.recorder.samples(self._ids_of(batch))
        else:
            self.recorder.samples(self._waiting.popleft().values)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Marks the step that Lightning saves."""
        if self._session is not None:
            self._session.recorder.checkpoint()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the recording."""
        self.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the recording with what it has."""
        self.close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the recording, however the training ended."""
        self.close()

    def _name_loaders(self, trainer: Trainer) -> None:
        """Steps in where Lightning lets its strategy wrap the loaders: before they are iterated."""
        strategy = trainer.strategy
        usual = strategy.process_dataloader

        def process(loader: object) -> object:
            loader = usual(loader)
            return self._name(loader) if trainer.training else loader

        vars(strategy)["process_dataloader"] = process
        self._restore = lambda: vars(strategy).pop("process_dataloader", None)

    def _name(self, loader: object) -> object:
        if not is_indexed(loader):
            kind = type(getattr(loader, "dataset", loader)).__name__
            raise RecordingError(
                f"the train loader reads a {kind}, whose samples have no index; "
                "say which ids a batch has: LightningCallback(path, ids_of=lambda batch: …)."
            )
        return naming(loader, self._deliver)  # type: ignore[type-var]

    def _deliver(self, carried: Iterator[Carried]) -> Iterator[Any]:
        """Keeps ids until their batch is used: Lightning may fetch one ahead."""
        waiting = self._waiting = deque()

        def batches() -> Iterator[Any]:
            for batch, ids in carried:
                if batch is not None:  # Lightning passes these over
                    waiting.append(ids)
                yield batch

        return batches()


def _check_training(trainer: Trainer, module: LightningModule) -> None:
    count = len(trainer.optimizers)
    if count != 1:
        raise RecordingError(
            f"configure_optimizers gave {count} optimizers, and LightningCallback records one; "
            "put the parameters into groups of one optimizer."
        )
    if is_compiled_by_lightning(module):
        raise RecordingError(
            "the LightningModule is compiled; fit the module that was given to torch.compile."
        )
