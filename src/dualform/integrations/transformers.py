"""Recording a `transformers.Trainer`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn

from dualform.errors import RecordingError
from dualform.integrations.ids import LoaderIds, carry_in_place, check_loader, is_indexed
from dualform.integrations.session import RecordingSession, resuming, started
from dualform.recording import Recorder, run_path

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "dualform.integrations.transformers needs transformers and accelerate; "
        "install them with: pip install 'dualform[hf]'"
    ) from error

COLUMN = "dualform_ids"
"""The name the ids have among a batch's columns, until the model is called."""


__all__ = ["TransformersCallback"]


class TransformersCallback(TrainerCallback):
    """Records the training of a `transformers.Trainer`; samples are named by dataset index.

    ```python
    recording = TransformersCallback("runs/mine")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[recording])
    trainer.train()
    print(dualform.open("runs/mine").audit())
    ```

    It starts and ends with the training. Where the Trainer saves, the run is marked too, and
    `trainer.train(resume_from_checkpoint=True)` goes on with it. If training breaks off, all that
    was recorded is committed when the callback is closed or the process ends.

    Args:
        path: the run folder.
        ids: False to leave ids out; samples are then numbered in the order they are seen, as they
            are where the dataset is a stream.
        options: those of `dualform.record`, such as overwrite, dataset or strict.
            The Trainer's tokenizer decodes the dataset's `input_ids`, unless another is given.
    """

    def __init__(self, path: str | os.PathLike[str], *, ids: bool = True, **options: Any) -> None:
        self._path, self._ids, self._options = run_path(path), ids, options
        self._session: RecordingSession | None = None
        self._recorder: Recorder | None = None
        self._unnamed = False

    @property
    def recorder(self) -> Recorder:
        """The recorder of the training that runs, or that ran last."""
        return started(self._recorder, "trainer.train()")

    def samples(self, ids: Any) -> None:
        """Names the samples of the next forward pass; for a `compute_loss` of your own."""
        self.recorder.samples(ids.values if isinstance(ids, LoaderIds) else ids)
        self._unnamed = False

    def close(self) -> None:
        """Ends the recording, if there is one; for training that broke off."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the recording."""
        self.close()
        _check(args)
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        named = self._ids and is_indexed(loader)
        if named:
            check_loader(loader)
        options = resuming(self._path, state.global_step, self._options)
        options.setdefault("decode", _decoder(kwargs.get("processing_class")))
        self._session = RecordingSession(self, model, kwargs["optimizer"], self._path, **options)
        self._recorder = self._session.recorder
        if named:
            self._take_ids(self._session, model, loader)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The next batch has not been named yet."""
        self._unnamed = True

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The next batch of an accumulated step has not been named yet."""
        self._unnamed = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Marks the step that the Trainer is about to save: a kill may come in between."""
        if control.should_save and self._session is not None:
            self._session.recorder.checkpoint()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Marks the step the Trainer has just saved, where that was decided late."""
        if self._session is not None:
            self._session.recorder.checkpoint()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the recording with the last step, before the Trainer may load its best weights."""
        self.on_step_end(args, state, control)
        if control.should_training_stop:
            self.close()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the recording with the last log, where training stopped after an evaluation."""
        if "train_runtime" in kwargs.get("logs", {}):
            self.close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the recording, if that has not happened yet."""
        self.close()

    def _take_ids(self, session: RecordingSession, model: nn.Module, loader: Any) -> None:
        session.at_the_end(carry_in_place(loader, _as_column))
        name = weakref.WeakMethod(self._name)  # the model must not keep the callback alive

        def take_off(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            ids = kwargs.pop(COLUMN, None)
            if torch.is_grad_enabled() and (callback := name()) is not None:
                callback(ids)
            return args, kwargs

        # before the recorder's own hook, which wants the batch named
        hook = model.register_forward_pre_hook(take_off, with_kwargs=True, prepend=True)
        session.at_the_end(hook.remove)

    def _name(self, ids: LoaderIds | None) -> None:
        if ids is not None:
            self.samples(ids)
        elif self._unnamed:
            raise RecordingError(
                "the model was called without the ids of its batch: compute_loss passes on only "
                "some of its inputs. Call model(**inputs) there, or before the model "
                f"callback.samples(inputs.pop('{COLUMN}')), or give TransformersCallback ids=False."
            )


def _as_column(batch: Any, ids: LoaderIds) -> Any:
    if not isinstance(batch, MutableMapping):
        raise RecordingError(
            f"the data collator made a {type(batch).__name__}; TransformersCallback puts the ids "
            "among the columns of a dict. Return a dict, or give TransformersCallback ids=False."
        )
    batch[COLUMN] = ids
    return batch


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """What makes texts of token ids; None where the Trainer has no tokenizer."""
    decode = getattr(tokenizer, "decode", None)
    return None if decode is None else partial(decode, skip_special_tokens=True)


def _check(args: TrainingArguments) -> None:
    sharding: Any = args.fsdp_config or {}
    problems = {
        f"{args.n_gpu} GPUs (DataParallel)": (args.n_gpu > 1, "set CUDA_VISIBLE_DEVICES=0"),
        "torch_compile=True": (args.torch_compile, "use torch_compile=False"),
        "DeepSpeed": (bool(args.deepspeed), "leave deepspeed out"),
        "fsdp= of version 1": (
            bool(args.fsdp) and int(sharding.get("version", 2)) < 2,
            "give fsdp_config={'version': 2}",
        ),
        "auto_find_batch_size=True": (args.auto_find_batch_size, "give the batch size"),
    }
    for problem, (given, cure) in problems.items():
        if given:
            raise RecordingError(f"TransformersCallback cannot record with {problem} yet; {cure}.")
