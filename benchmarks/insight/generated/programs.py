"""Generated training programs: a seed and a number choose everything about one."""

from __future__ import annotations

import math
import random
import textwrap
from typing import Literal, NamedTuple, TypeAlias

from benchmarks.insight.generated.holders import HOLDERS, Holder
from benchmarks.insight.generated.things import KIB, MIB, THINGS, Sizes, Thing, side

Trainer: TypeAlias = Literal["plain", "Lightning", "HF"]
End: TypeAlias = Literal["finish", "kill"]
Variant: TypeAlias = Literal["leak", "bounded", "detached"]
"""``leak`` keeps all things, ``bounded`` the newest ones, and ``detached`` all, without their graphs."""

PERIODS = (1, 8, 25, 50, 200, 500)
"""Steps from one time at which a program keeps something to the next."""
_TIMES = {1: 160, 8: 30, 25: 16, 50: 14, 200: 10, 500: 6}
"""Minimum number of times, by the period."""
_SHORTEST = 12
"""Minimum number of times in a program whose memory is measured without memlog."""
_LEAST_KEPT, _MOST_KEPT = 64 * MIB, 1024 * MIB
"""Bytes that a program keeps in all."""
_RATES = (64 * KIB, 8 * MIB)
"""Bytes that a program keeps per step, on average."""

_WORDS = {
    "adjective": "recent raw sampled cached frozen noisy daily hard masked pooled scaled sorted early paired "
    "seen coarse dense pending shared final",
    "noun": "scores embeddings tiles vectors outputs frames states samples examples targets features logits "
    "crops traces queries hits entries results patches views rows pieces",
    "owner": "tracker monitor meter auditor reviewer planner collector reporter curator ledger",
    "part": "memory epoch stage bank summary journal archive section",
    "verb": "record note store collect remember register save_for_later take_in",
    "make": "probe inspect_batch make_report encode_pages sample_inputs look_up prepare build_view",
    "file": "train_classifier finetune_encoder fit_ranker train_tagger pretrain_small run_experiment",
}  # fmt: skip
"""Words that names are made of, by their role."""

_PROGRAM = '''"""{summary}

{truth}
"""

{imports}

torch.manual_seed({seed})
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear({inputs}, {hidden}), nn.ReLU())
        self.head = nn.Linear({hidden}, {classes}){table}

    def forward(self, x):
        return self.head(self.encoder(x))


net = Net()


{parts}
'''

_TRAIN: dict[Trainer, str] = {
    "plain": """
def main():
    {declares}{local}optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(1, {steps} + 1):
        x, y = torch.randn({batch}, {inputs}), torch.randint(0, {classes}, ({batch},))
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {keep}


main()
""",
    "Lightning": """
class Batches(data.Dataset):
    def __len__(self):
        return {steps}

    def __getitem__(self, number):
        return torch.randn({batch}, {inputs}), torch.randint(0, {classes}, ({batch},))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, number):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    {hook}:
        {declares}step = self.global_step
        {keep}


trainer = lightning.Trainer(
    max_steps={steps}, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, {arguments}
)
trainer.fit(Classifier(), data.DataLoader(Batches(), batch_size=None){validation})
""",
    "HF": """
class Batches(data.Dataset):
    def __len__(self):
        return {steps}

    def __getitem__(self, number):
        return {{"x": torch.randn({batch}, {inputs}), "y": torch.randint(0, {classes}, ({batch},))}}


class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **others):
        return functional.cross_entropy(model(inputs["x"]), inputs["y"])


class Evaluation(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        {declares}step = state.global_step
        {keep}


arguments = transformers.TrainingArguments(
    "out", max_steps={steps}, per_device_train_batch_size=1, use_cpu=True, remove_unused_columns=False,
    report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
)
Trainer(
    net, arguments, train_dataset=Batches(), data_collator=lambda items: items[0], callbacks=[Evaluation()]
).train()
""",
}
_IMPORTS: dict[Trainer, tuple[str, ...]] = {
    "plain": (),
    "Lightning": ("import lightning", "from torch.utils import data"),
    "HF": ("import transformers", "from torch.utils import data"),
}


class Program(NamedTuple):
    """Choices about a program.

    Attributes:
        seed, number: What chose the others.
        holder: Key of `HOLDERS`. ``which`` is the number of the holder of this sort.
        thing: Number of the thing in `THINGS`.
        period: Steps between two times at which the program keeps something.
        times: Number of these times.
        each: Number of things that are kept each time.
        rate: Bytes that the program keeps per step, on average.
        limit: Number of times after which the bounded program removes the first things.
        is_cleared: True if the bounded program removes all things at once.
        is_local: True if a variable of ``main()`` is the holder.
        is_validation: True if a validation loop of the trainer keeps the things.
        names: Names in the program, by their role.
    """

    seed: int
    number: int
    holder: str
    which: int
    thing: int
    period: int
    times: int
    each: int
    rate: int
    limit: int
    is_cleared: bool
    is_local: bool
    is_validation: bool
    trainer: Trainer
    end: End
    names: dict[str, str]
    sizes: Sizes

    @property
    def name(self) -> str:
        """Name that a finding about the leak must contain."""
        return self.names["name"]

    @property
    def file(self) -> str:
        return f"{self.names['file']}.py"

    @property
    def steps(self) -> int:
        return self.period * self.times

    @property
    def kept(self) -> Thing:
        return THINGS[self.thing]

    @property
    def title(self) -> str:
        """One line on the choices."""
        ends = "" if self.end == "finish" else ", killed at the end"
        return (
            f"{self.kept.name}, {self.holder}, {self.rate / MIB:.2f} MiB a step, every {self.period} steps, "
            f"{self.trainer}{ends}"
        )

    def text(self, variant: Variant, *, is_short: bool = False) -> str:
        """Return the program.

        ``is_short``: without the steps that keep nothing, and without a kill at the end.
        """
        holder, thing = HOLDERS[self.holder][self.which], self.kept
        is_bounded = variant == "bounded"
        values: dict[str, object] = {
            **self.names,
            "seed": self.number,
            **self.sizes._asdict(),
            "steps": max(self.times, _SHORTEST) if is_short else self.steps,
            "limit": self.limit * self.each,
            "at": "step" if self.each == 1 else "(step, part)",
            **self._size(),
        }
        values["item"] = f"{values['make']}(net)" + (".detach()" if variant == "detached" else "")
        define = (is_bounded and holder.limited) or holder.define
        clear = self.is_cleared and holder.clear
        keep = (clear or holder.ring) if is_bounded else holder.keep
        period = 1 if is_short else self.period
        is_killed = self.end == "kill" and not is_short
        parts = [thing.setup.format(**values)]
        parts += _made(thing, define, values, is_local=self.is_local)
        train = _TRAIN[self.trainer].format(
            **values,
            keep=self._keeping(keep.format(**values), period).replace("\n", "\n        "),
            local=f"{define.format(**values)}\n    " if self.is_local else "",
            declares=self._declares(holder),
            hook=_hook(is_validation=self.is_validation),
            arguments=f"val_check_interval={period}" if self.is_validation else "max_epochs=1",
            validation=", data.DataLoader(Batches(), batch_size=None)" if self.is_validation else "",
        )  # fmt: skip
        if self.is_validation:
            train = train.replace(
                "num_sanity_val_steps=0", "num_sanity_val_steps=0, limit_val_batches=2"
            )
        if holder.close:
            train += f"{holder.close.format(**values)}\n"
        if is_killed:
            train += "os.kill(os.getpid(), signal.SIGKILL)\n"
        table = ""
        if thing.sort == "copy":
            table = (
                f"\n        self.table = nn.Embedding({values['rows']}, 64).requires_grad_(False)"
            )
        return _PROGRAM.format(
            **{**values, "seed": self.seed},
            summary=f"Train a small network. Generated: seed {self.seed}, program {self.number}, {variant}.",
            truth=self._truth(variant),
            imports=_imports(self.trainer, holder, thing, is_killed=is_killed),
            table=table,
            parts="\n\n\n".join(part.strip("\n") for part in (*parts, train) if part),
        )

    def _declares(self, holder: Holder) -> str:
        if not holder.rebinds or self.is_local:
            return ""
        depth = 4 if self.trainer == "plain" else 8
        return f"global {self.name}\n{' ' * depth}"

    def _size(self) -> dict[str, int]:
        size = self.rate * self.period // self.each
        rows = self.kept.rows(size, self.sizes)
        return {"rows": rows, "side": side(size)}

    def _keeping(self, keep: str, period: int) -> str:
        if self.each > 1:
            keep = f"for part in range({self.each}):\n{textwrap.indent(keep, '    ')}"
        if period == 1 or self.is_validation:
            return keep
        return f"if step % {period} == 0:\n{textwrap.indent(keep, '    ')}"

    def _truth(self, variant: Variant) -> str:
        if variant == "bounded":
            return f"Truth: healthy. `{self.name}` keeps what the last {self.limit} times made."
        remedy = "detach what is kept" if self.kept.sort == "graph" else "limit its length"
        if variant == "detached":
            return f"`{self.name}` keeps everything, without graphs."
        text = (
            f"Truth: `{self.name}` keeps {self.kept.name} every {self.period} steps, "
            f"{self.rate / MIB:.2f} MiB per step on average. Remedy: {remedy}."
        )
        return textwrap.fill(text, 100)


def _made(thing: Thing, define: str, values: dict[str, object], *, is_local: bool) -> list[str]:
    """Return the definitions of the function that makes things, and of the holder."""
    body = textwrap.indent(thing.body.format(**values), "    ")
    if define.startswith("@functools"):  # the cached function is the holder
        return [f"{define.format(**values)}\ndef {values['name']}(net, number):\n{body}\n"]
    made = f"def {values['make']}(net):\n{body}\n"
    return [made] if is_local else [made, define.format(**values)]


def _hook(*, is_validation: bool) -> str:
    if not is_validation:
        return "def on_train_batch_end(self, *_)"
    return (
        "def validation_step(self, batch, number):\n        x, y = batch\n"
        "        functional.cross_entropy(self.net(x), y)\n\n    def on_validation_epoch_end(self)"
    )


def _imports(trainer: Trainer, holder: Holder, thing: Thing, *, is_killed: bool) -> str:
    needed = {"import torch", "from torch import nn", "from torch.nn import functional"}
    needed |= {*_IMPORTS[trainer], *holder.imports, *thing.imports}
    if is_killed:
        needed |= {"import os", "import signal"}
    return "\n".join(sorted(needed, key=lambda line: (line.startswith("from"), line)))


def program(seed: int, number: int) -> Program:
    """Return a program. All pairs of holder and period occur in 96 numbers in a row."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - the same at every run
    shuffled = random.Random(seed)  # noqa: S311 - likewise
    holders, periods = list(HOLDERS), list(PERIODS)
    shuffled.shuffle(holders)
    shuffled.shuffle(periods)
    turn, place = divmod(number, len(holders))
    name, period = holders[place], periods[(place + turn) % len(periods)]
    which = rng.randrange(len(HOLDERS[name]))
    holder = HOLDERS[name][which]
    thing = rng.choice([each for each in THINGS if holder.can_keep(each)])
    trainer: Trainer = rng.choices(("plain", "Lightning", "HF"), (3, 1, 1))[0]
    least, most = _RATES
    times = _TIMES[period]
    most = min(most, min(_MOST_KEPT, thing.most) // (times * period))
    rate = round(math.exp(rng.uniform(math.log(least), math.log(max(least, most)))))
    times = max(times, math.ceil(_LEAST_KEPT / rate / period))
    limit = rng.randint(1, max(1, min(times // 3 - 1, 24)))
    in_no_grad = trainer == "Lightning" and period >= 25 and rng.random() < 0.5
    has_gradients = thing.sort == "graph" or "backward" in thing.name
    return Program(
        seed,
        number,
        name,
        which,
        THINGS.index(thing),
        period,
        times,
        each=1 if period == 1 else rng.choice((1, 1, 4, 8)),
        rate=rate,
        limit=limit,
        is_cleared=rng.random() < 0.4,
        is_local=_may_be_local(holder, trainer) and rng.random() < 0.5,
        is_validation=in_no_grad and not has_gradients,
        trainer=trainer,
        end=rng.choices(("finish", "kill"), (7, 3))[0],
        names=_names(rng),
        sizes=Sizes(
            inputs=rng.choice((32, 64)),
            hidden=rng.choice((128, 192, 256)),
            classes=rng.choice((8, 10, 16)),
            batch=rng.choice((128, 192, 256)),
        ),
    )  # fmt: skip


def _may_be_local(holder: Holder, trainer: Trainer) -> bool:
    is_variable = holder.define.startswith("{name} = ")
    return trainer == "plain" and is_variable


def _names(rng: random.Random) -> dict[str, str]:
    word = {role: rng.choice(words.split()) for role, words in _WORDS.items()}
    is_plain = rng.random() < 0.3
    return {
        **word,
        "name": word["noun"] if is_plain else f"{word['adjective']}_{word['noun']}",
        "Owner": word["owner"].title(),
        "Part": word["part"].title(),
    }
