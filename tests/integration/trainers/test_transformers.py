"""A Trainer of Transformers or TRL: memlog adds rows and leaves the Trainer's own rows unchanged."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest
from support import child
from support.launching import Recorded, launch, recorded, write
from support.trainers import MlflowRun, mlflow_runs, of_time
from support.wandb_file import Row, read_only_run

from memlog.events import Phase

pytestmark = pytest.mark.integration
with_a_store = pytest.mark.usefixtures("ready_store")

RSS = "memory/host/rss_mib"
PREAMBLE = """
    import mlflow
    import torch
    import transformers
    import wandb

    import memlog
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    ROWS = [{"input_ids": one, "labels": one} for one in torch.arange(256).reshape(32, 8)]

    def trainer(report_to, steps=6, *, callbacks=None, trained_by=Trainer, **more):
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_head=2, n_embd=16, vocab_size=256, n_positions=8, bos_token_id=0, eos_token_id=0
        )
        arguments = TrainingArguments(
            "out", max_steps=steps, per_device_train_batch_size=2, report_to=report_to,
            logging_steps=1, disable_tqdm=True, use_cpu=True, **{"save_strategy": "no", **more},
        )
        model = GPT2LMHeadModel(config)
        return trained_by(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=callbacks)

    EVERYTHING = dict(
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3,
        save_strategy="steps", save_steps=3,
    )
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a Trainer has trained without memlog, once for each tracker."""
    from support.mlflow_server import sqlite_store

    folder = tmp_path_factory.mktemp("alone")
    sqlite_store(folder)
    run(
        """
    trainer(["mlflow", "wandb", "tensorboard"], **EVERYTHING).train()
    """,
        folder,
    )
    return folder


def run(script: str, folder: Path, **environment: str) -> str:
    return child.run(
        dedent(PREAMBLE) + dedent(script),
        folder,
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        TENSORBOARD_LOGGING_DIR="events",
        MLFLOW_DISABLE_TELEMETRY="true",
        HF_HUB_OFFLINE="1",
        **environment,
    )


def without_times(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if not of_time(key)} for row in rows]


def phases_of(recording: Recorded) -> list[str]:
    return [event.label for event in recording.events if isinstance(event, Phase)]


def only_run(folder: Path) -> MlflowRun:
    (found,) = mlflow_runs(folder)
    return found


@with_a_store
def test_memory_stands_in_each_trainers_mlflow_run_at_its_global_step(
    tmp_path: Path, alone: Path
) -> None:
    run(
        """
    memlog.init(finish_timeout=60)
    from memlog_transformers import MemlogCallback

    trainer(["mlflow", "tensorboard"], run_name="by itself", **EVERYTHING).train()
    passed = [MemlogCallback, MemlogCallback()]
    trainer("mlflow", callbacks=passed, run_name="passed twice", **EVERYTHING).train()
    resumed = trainer("mlflow", steps=8, run_name="resumed", **EVERYTHING)
    resumed.train(resume_from_checkpoint="out/checkpoint-6")
    trainer("mlflow", run_name="only evaluates", **EVERYTHING).evaluate()
    """,
        tmp_path,
    )
    held = {one.name: one for one in mlflow_runs(tmp_path)}
    assert {one.status for one in held.values()} == {"FINISHED"}
    (without_memlog,) = mlflow_runs(alone)
    for name in ("by itself", "passed twice"):
        assert held[name].users_rows() == without_memlog.users_rows()
        assert held[name].steps(RSS) == [1, 2, 3, 4, 5, 6]
        for phase in ("validation", "checkpoint"):
            assert held[name].steps(f"memory/phase/{phase}/host/rss_mib") == [3, 6]
    assert held["resumed"].steps(RSS) == held["resumed"].steps("loss") == [7, 8]
    assert held["resumed"].steps("memory/phase/validation/host/rss_mib") == [8]
    assert held["only evaluates"].steps("eval_loss") == [0]


def test_memory_stands_in_the_rows_of_the_trainers_wandb_run(tmp_path: Path, alone: Path) -> None:
    run('memlog.init(); trainer("wandb", **EVERYTHING).train()', tmp_path)
    held, before = read_only_run(tmp_path), read_only_run(alone)
    assert without_times(held.users_rows()) == without_times(before.users_rows())
    steps = [(row["memlog/step"], row["train/global_step"]) for row in held.rows if RSS in row]
    assert {own for own, _ in steps} == {1, 2, 3, 4, 5, 6}
    assert all(own == trainers for own, trainers in steps)


def test_without_a_tracker_each_update_counts(tmp_path: Path) -> None:
    output = run(
        """
    import contextlib, sys
    from memlog_transformers import MemlogCallback

    with contextlib.redirect_stderr(sys.stdout):
        trainer("none", steps=1, callbacks=[MemlogCallback]).train()
    untouched = trainer("none", steps=1)
    untouched.train()
    assert not any(isinstance(one, MemlogCallback) for one in untouched.callback_handler.callbacks)

    session = memlog.init("local")
    skipping = trainer("none", steps=5, max_grad_norm=0, logging_strategy="no")
    skipping.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    skipping.train()
    skipping.evaluate()
    for _ in range(2):
        skipping.optimizer.optimizer.step()
    print(f"halved to {skipping.accelerator.scaler.get_scale():.4g}")
    """,
        tmp_path,
    )
    assert (
        "memlog: this training is not recorded: call memlog.init() before trainer.train()" in output
    )
    assert "halved to 9.375e+36" in output  # five times, so the scaler skipped each
    (recording,) = recorded(tmp_path / "memlog_runs")
    assert recording.steps == [1, 2, 3, 4, 5, 6, 7]
    assert phases_of(recording) == ["validation"]


TRL = """
    import mlflow
    import torch
    import transformers
    import trl
    import wandb

    import memlog
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    memlog.init(finish_timeout=60)
    known = {word: at for at, word in enumerate(["<pad>", "<eos>", *"abcdefgh"])}
    words = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(known), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )

    def train(kind, rows, **more):
        options = {} if kind != "GRPO" else {"num_generations": 2, "max_completion_length": 4}
        arguments = getattr(trl, f"{kind}Config")(
            "out", run_name=kind, max_steps=3, per_device_train_batch_size=2, report_to="mlflow",
            logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", **options,
        )
        getattr(trl, f"{kind}Trainer")(
            LlamaForCausalLM(config), args=arguments, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({name: [text] * 8 for name, text in rows.items()}), **more,
        ).train()

    train("SFT", {"text": "a b c d"})
    pairs = {"prompt": "a b", "chosen": " c d", "rejected": " e f"}
    train("DPO", pairs, ref_model=LlamaForCausalLM(config))
    def lengths(completions, **_):
        return [float(len(one)) for one in completions]

    train("GRPO", {"prompt": "a b"}, reward_funcs=lengths)
"""


@with_a_store
def test_trls_trainers_are_recorded_in_their_own_runs(tmp_path: Path) -> None:
    child.run(TRL, tmp_path, MLFLOW_DISABLE_TELEMETRY="true", HF_HUB_OFFLINE="1")
    held = {one.name: one for one in mlflow_runs(tmp_path)}
    assert held.keys() == {"SFT", "DPO", "GRPO"}
    for one in held.values():
        assert one.steps(RSS) == one.steps("loss") == [1, 2, 3]


def test_an_unchanged_script_under_memlog_run_counts_as_its_trainer_does(tmp_path: Path) -> None:
    script = dedent(PREAMBLE) + 'trainer("none", gradient_accumulation_steps=2).train()'
    for unused in ("memlog", "mlflow", "wandb"):
        script = script.replace(f"import {unused}\n", "")
    write(tmp_path, script)
    launch(tmp_path, sys.executable, "train.py", options=("--backend", "local"))
    (recording,) = recorded(tmp_path / "memlog_runs")
    assert recording.steps == [1, 2, 3, 4, 5, 6]
