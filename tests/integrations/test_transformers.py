"""A `transformers.Trainer` with one callback more."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.integrations.one_hot import COUNT, Columns, Net, X, Y, check_run, same_weights, sgd
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import dualform
from dualform.errors import RecordingEndedWarning, RecordingError
from dualform.integrations.transformers import TransformersCallback
from dualform.recording.pages import PageWriter

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder / "out"), **(usual | settings))


def trainer_of(
    net: nn.Module, args: TrainingArguments, *callbacks: Any, kind: type = Trainer, **others: Any
) -> Trainer:
    data = {"train_dataset": Columns(), "optimizers": (sgd(net), None), **others}
    trainer: Trainer = kind(net, args, callbacks=list(callbacks), **data)
    return trainer


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "workers": {"dataloader_num_workers": 2, "gradient_accumulation_steps": 3},
    "persistent workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "saved": {"save_strategy": "steps", "save_steps": 4, "dataloader_drop_last": True},
    "scheduled": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_have_their_ids_and_training_is_the_same(name: str, tmp_path: Path) -> None:
    recorded, plain = Net(), Net()
    args = arguments(tmp_path, **SETTINGS[name])
    trainer_of(recorded, args, TransformersCallback(tmp_path / "run")).train()
    trainer_of(plain, args).train()
    assert same_weights(recorded, plain)
    accumulate = args.gradient_accumulation_steps
    whole = len(recorded.diary) / 3 % accumulate == 0  # else an epoch ends with a shorter step
    run = check_run(tmp_path / "run", recorded, accumulate if whole else 0)
    if name == "saved":
        assert {4, 8, 12} <= set(run.kept_steps)


def test_the_loader_is_given_back_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of(Net(), arguments(tmp_path), TransformersCallback(tmp_path / "run"))
    trainer.train()
    loader = trainer.callback_handler.train_dataloader
    assert type(loader.dataset) is Columns
    assert sorted(next(iter(loader))) == ["labels", "x"]
    assert not trainer.model._forward_pre_hooks


def test_best_weights_loaded_at_the_end_are_not_taken_for_the_last(tmp_path: Path) -> None:
    net = Net()
    args = arguments(
        tmp_path,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first is the best
    )
    callbacks = TransformersCallback(tmp_path / "run"), EarlyStoppingCallback(1)
    trainer_of(net, args, *callbacks, eval_dataset=Columns()).train()
    run = check_run(tmp_path / "run", net)
    assert not torch.equal(run.state_dict()["first.weight"], net.first.weight)


class Stumbling(Net):
    """Breaks off in the n-th forward pass."""

    breaks_at = 9

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if torch.is_grad_enabled() and len(self.diary) + 1 == self.breaks_at:
            raise KeyboardInterrupt
        return super().forward(x, labels)


def test_training_that_breaks_off_leaves_its_run(tmp_path: Path) -> None:
    for close in (True, False):
        net, path = Stumbling(), tmp_path / f"run {close}"
        callback = TransformersCallback(path)
        trainer = trainer_of(net, arguments(tmp_path), callback)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        if close:
            callback.close()
        del trainer, callback
        gc.collect()
        assert check_run(path, net).steps == 8
        assert not net._forward_pre_hooks


def test_going_on_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=5)
    broken, whole, resumed = Stumbling(), Net(), Net()
    trainer_of(whole, args).train()
    for checkpoint in (tmp_path / "out").iterdir():
        checkpoint.rename(tmp_path / f"old {checkpoint.name}")
    callback = TransformersCallback(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        trainer_of(broken, args, callback).train()
    callback.close()
    again = trainer_of(resumed, args, TransformersCallback(tmp_path / "run"))
    again.train(resume_from_checkpoint=True)
    assert same_weights(resumed, whole)
    resumed.diary = broken.diary[:5] + resumed.diary
    assert check_run(tmp_path / "run", resumed).steps == 18


class Choosy(Trainer):
    """A `compute_loss` that picks from its inputs."""

    callback: TransformersCallback | None = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        if self.callback is not None:
            self.callback.samples(inputs["dualform_ids"])
        return model(inputs["x"], inputs["labels"])["loss"]


def test_a_loss_that_hides_the_ids(tmp_path: Path) -> None:
    trainer = trainer_of(
        Net(), arguments(tmp_path), TransformersCallback(tmp_path / "a"), kind=Choosy
    )
    with pytest.raises(RecordingError, match=r"callback\.samples\(inputs\.pop"):
        trainer.train()

    net, callback = Net(), TransformersCallback(tmp_path / "b")
    trainer = trainer_of(net, arguments(tmp_path), callback, kind=Choosy)
    trainer.callback = callback
    trainer.train()
    check_run(tmp_path / "b", net)

    trainer_of(Net(), arguments(tmp_path), TransformersCallback(tmp_path / "c", ids=False)).train()
    assert dualform.open(tmp_path / "c").ids == list(range(3 * COUNT))


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        yield from ({"x": x, "labels": y} for x, y in zip(X, Y, strict=True))


def test_streams_are_numbered_in_order(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=8)
    net = Net()
    trainer_of(net, args, TransformersCallback(tmp_path / "run"), train_dataset=Stream()).train()
    run = dualform.open(tmp_path / "run")
    assert run.ids == list(range(sum(map(len, net.diary))))


def test_a_language_model_and_its_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    tokens = torch.randint(30, (12, 7))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    args = arguments(tmp_path, max_grad_norm=0.0, dataloader_num_workers=2)
    lora = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    adapter = get_peft_model(LlamaForCausalLM(config), lora)
    for name, net in {"all": LlamaForCausalLM(config), "lora": adapter}.items():
        net.double()  # the changes are small against the weights
        trainer_of(net, args, TransformersCallback(tmp_path / name), train_dataset=data).train()
        run = dualform.open(tmp_path / name)
        audit = run.audit()
        assert audit.remainder <= 1e-6
        assert run.ids == list(range(12))
        by_row = {book.name for book in audit.books if book.granularity == "row"}
        trained = {book.name for book in audit.books if book.granularity != "frozen"}
        linear = {n for n in trained if "embed" not in n and "norm" not in n}
        assert by_row >= linear
        assert len(linear) == (15 if name == "all" else 8)
        assert {book.rows for book in audit.books if book.name in linear} == {3 * 12 * 7}


@pytest.mark.parametrize(
    ("setting", "cure"),
    [
        ({"n_gpu": 2}, "CUDA_VISIBLE_DEVICES=0"),
        ({"torch_compile": True}, "torch_compile=False"),
        ({"deepspeed": {}, "auto_find_batch_size": True}, "give the batch size"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "give fsdp_config={'version': 2}"),
    ],
)
def test_what_cannot_be_recorded_yet(setting: dict[str, Any], cure: str, tmp_path: Path) -> None:
    usual = {"n_gpu": 1, "torch_compile": False, "deepspeed": None, "fsdp": []}
    args: Any = SimpleNamespace(
        **(usual | {"auto_find_batch_size": False, "fsdp_config": None} | setting)
    )
    with pytest.raises(RecordingError, match=cure):
        TransformersCallback(tmp_path / "run").on_train_begin(args, None, None)  # type: ignore[arg-type]


def test_a_second_training_does_not_overwrite_the_first(tmp_path: Path) -> None:
    trainer = trainer_of(
        Net(), arguments(tmp_path, max_steps=2), TransformersCallback(tmp_path / "run")
    )
    trainer.train()
    with pytest.raises(dualform.DualformError, match="overwrite=True"):
        trainer.train()


class Tokenizer:
    """As much of one as the recorder uses."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return " ".join(f"w{token}" for token in tokens)


class Tokens(Columns):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "text": None, "input_ids": [index, 1]}


def test_samples_are_described(tmp_path: Path) -> None:
    """By the dataset, by the Trainer's tokenizer, and afterwards by the recorder or its path."""
    callback = TransformersCallback(tmp_path / "run", dataset=Columns())
    with pytest.raises(RecordingError, match=r"nothing has been recorded yet; trainer\.train\(\)"):
        _ = callback.recorder
    trainer_of(Net(), arguments(tmp_path, max_steps=2), callback).train()
    samples = dualform.open(tmp_path / "run").samples
    assert samples.labels == {i: int(Y[i]) for i in range(COUNT)}
    preview = samples.preview(3)
    assert preview is not None
    assert preview.data == "sample 3"

    assert callback.recorder.step == 2
    callback.recorder.describe([3], labels=["renamed"])
    assert dualform.open(tmp_path / "run").samples.labels[3] == "renamed"
    with pytest.raises(RecordingError, match="is not recording"):
        callback.recorder.samples([1])

    args, told = (
        arguments(tmp_path, max_steps=2),
        TransformersCallback(tmp_path / "told", dataset=Tokens()),
    )
    trainer_of(Net(), args, told, processing_class=Tokenizer()).train()
    preview = dualform.open(tmp_path / "told").samples.preview(3)
    assert preview is not None
    assert preview.data == "w3 w1"


def test_a_failure_of_recording_is_not_the_trainer_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, plain = Net(), Net()
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer_of(plain, args).train()
    usual = PageWriter.write

    def failing(self: PageWriter, step: int, *args: Any) -> int:
        if step == 5:
            raise MemoryError("no more of it")
        return usual(self, step, *args)

    monkeypatch.setattr(PageWriter, "write", failing)
    callback = TransformersCallback(tmp_path / "run")
    with pytest.warns(RecordingEndedWarning, match=r"MemoryError: no more of it.*up to step 4\."):
        trainer_of(recorded, args, callback).train()
    assert same_weights(recorded, plain)
    assert isinstance(callback.recorder.failure, RecordingError)
    assert dualform.open(tmp_path / "run").audit().remainder <= 1e-6
