"""The rank of the stage tune: TRL's trainer, with our data order, checkpoints and stops.

The order of the rows is a pure function of (seed, epoch), and before each step every generator of random numbers gets a
seed of (seed, step). So a checkpoint holds weights and moments alone, as one of train does, and nothing is pickled: a
resumed run builds TRL's trainer anew over the rows that are left, fills weights and moments, and goes on bit for bit.
"""

import json
import math
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import load_from_disk
from peft import LoraConfig

from pipelines.extras.tune.conversations import answer_in
from pipelines.extras.tune.rewards import score_of
from pipelines.extras.tune.tune_task import HELD_OUT, ROWS, TUNED, TuneTask
from pipelines.recipe.recipe import CHAT_TOKENS, REWARD, REWARDED, TuneConfig
from pipelines.run.stages.follow import FACTS_FILE
from pipelines.run.stages.rank import Joined
from pipelines.run.text.chat import END, TEMPLATE, ChatTokens
from pipelines.run.text.tokenizer import tokenizer_of
from trainer.base.events import Started
from trainer.base.process import StopSignal
from trainer.base.store import Store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece
from trainer.checkpoint.save_clock import SaveClock
from trainer.config.errors import Diverged, Interrupted, UserError

TRL_NAMES = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
LEFT_OUT = ("epoch", "num_tokens", "step_time")  # of TRL's logs: relative to the start of this process, or its speed
MEASURED_AT_ONCE = 64  # held-out rows of a rank


@dataclass
class Tuning(transformers.TrainerCallback):
    """One step of tuning in this process, to which TRL's trainer reports as to a callback."""

    task: TuneTask
    folder: Path
    store: Store
    together: Joined
    checkpointer: Checkpointer
    stop: StopSignal

    def __post_init__(self) -> None:
        task, self.world, self.log = self.task, self.together.world, self.together.log
        self.device = self.world.device
        self.tokens = ChatTokens(tokenizer_of(task.recipe.tokens, self.store, task.tokens))
        self.step = step = next(one for one in task.recipe.tune if one.name == task.step)
        self.rows = load_from_disk(self.folder / ROWS)
        self.held_out = json.loads((self.folder / HELD_OUT).read_text())
        self.examples = step.batch // step.generations if step.method in REWARDED else step.batch  # of a step
        self.steps = len(self.rows) * step.epochs // self.examples
        self.order = order_of(len(self.rows), step.epochs, step.seed)[: self.steps * self.examples]
        self.model, self.tokenizer = model_in(Path(str(task.weights)), self.tokens, step, step.method == REWARD)
        self.tokenizer.apply_chat_template = partial(ids_of_chats, self.tokens)  # TRL calls it, and nothing else
        self.trainer = self.trainer_of_trl()
        self.model = self.trainer.model  # with adapters, if the step has a lora_rank
        self.trainer.create_optimizer()
        self.pieces = self.pieces_of_state()
        self.state = TrainState(world_size=self.world.world_size)
        self.save_clock = SaveClock(task.recipe.runtime, task.between_failures)
        self.tokens_before, self.stepped = 0.0, time.perf_counter()
        self.saved_step = -1  # that this attempt saved last

    def tune(self) -> None:
        """Tune from the newest commit to the last step, commit and measure; then write the model and its facts into the
        folder, on rank 0. Raises Interrupted after a stop, whose state is being committed."""
        self.resume()
        self.log.write(self.started())
        if self.step.held_out and not self.state.step:
            self.measure()
        if self.state.step < self.steps:
            self.trainer.add_callback(self)
            self.trainer.train()
            if self.state.step < self.steps:
                raise Interrupted
        if self.step.held_out and self.state.evaluated_step < self.state.step:
            self.measure()
            self.save()
        self.checkpointer.insist(self.pieces, self.log, self.together.check)
        self.checkpointer.finish(self.log)
        self.log.clock.enter("checkpoint")
        if self.world.rank == 0:
            self.write_result()

    def resume(self) -> None:
        """Fill weights and moments from the newest commit, if there is one, and leave out the rows that it has read."""
        self.log.clock.enter("load")
        self.state = self.checkpointer.load_latest(self.pieces, self.log) or self.state
        if self.device.type == "cpu":  # sums add in another order with another number of threads
            self.state.threads = self.state.threads or torch.get_num_threads()
            torch.set_num_threads(self.state.threads)
        done, trainer = self.state.step, self.trainer
        for moments in trainer.optimizer.state.values():
            moments["step"].fill_(done)
        trainer.train_dataset = trainer.train_dataset.select(self.order[done * self.examples :])

    def trainer_of_trl(self) -> Any:
        """TRL's trainer of the method over all rows."""
        step, device = self.step, self.device
        arguments: dict[str, Any] = {
            "output_dir": str(self.folder / "trl"),
            "per_device_train_batch_size": step.at_once // self.world.world_size,
            "max_steps": self.steps,  # of the schedule: a resumed run has fewer rows, and `on_log` ends it
            "learning_rate": step.learning_rate,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": device.type == "cpu",
            "bf16": device.type == "cuda" and torch.cuda.is_bf16_supported(),
            "gradient_checkpointing": False,
            "ddp_find_unused_parameters": False,
            "seed": step.seed,
            **step.options,
        }
        if step.beta is not None:
            arguments["beta"] = step.beta
        more = {"model": self.model, "processing_class": self.tokenizer, "train_dataset": self.rows}
        if rank := step.lora_rank:  # Hu et al. 2021
            kind = "SEQ_CLS" if step.method == REWARD else "CAUSAL_LM"
            more["peft_config"] = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=kind)
        if step.method in REWARDED:
            arguments |= {"num_generations": step.generations, "max_completion_length": step.max_answer}
            arguments |= {"shuffle_dataset": False, "reward_weights": [reward.weight for reward in step.rewards]}
            more["reward_funcs"] = [score_of(reward, self) for reward in step.rewards]
        else:
            longest = step.max_length or self.task.recipe.model.block_size
            arguments |= {"train_sampling_strategy": "sequential", "max_length": longest}
        trainer, config = (getattr(trl, TRL_NAMES[step.method] + part) for part in ("Trainer", "Config"))
        made = trainer(**more, args=config(**arguments))
        if getattr(made, "ref_model", None):  # read from the folder, without the chat's tokens
            reference = made.accelerator.unwrap_model(made.ref_model)
            reference.resize_token_embeddings(self.model.config.vocab_size, mean_resizing=False)
            reference.load_state_dict(self.model.state_dict())
        return made

    def padded(self, ids: list[list[int]], side: str) -> Any:
        """Ids as a batch for transformers, padded on one side, on the device."""
        return self.tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt").to(self.device)

    def pieces_of_state(self) -> dict[str, Piece]:
        """Weights and moments, for the checkpointer. Makes the moments, which AdamW makes at its first step."""
        pieces = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if not (state := self.trainer.optimizer.state[parameter]):
                    state.update({moment: torch.zeros_like(parameter) for moment in MOMENTS})
                    state["step"] = torch.zeros((), device=parameter.device)
                pieces[f"model.{name}"] = Piece.whole(parameter)
                pieces |= {f"{moment}.{name}": Piece.whole(state[moment]) for moment in MOMENTS}
        return pieces

    def started(self) -> Started:
        """What the pipeline reports about this rank."""
        return Started(
            step=self.state.step,
            world_size=self.world.world_size,
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            engine=f"TRL {trl.__version__}, {self.step.method}",
            precision="bf16" if self.trainer.args.bf16 else "fp32",
            parameters=self.model.num_parameters(),
            micro_batch_size=self.trainer.args.per_device_train_batch_size,
            micro_batch_why=f"{self.steps:,} steps of {self.step.batch}",
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Bring the schedule to the next step, and collect the pieces again: accelerate copies the weights for several
        ranks on a CPU."""
        self.pieces = self.pieces_of_state()
        with warnings.catch_warnings(action="ignore"):  # torch expects a step of the optimizer before the schedule's
            for _step in range(self.state.step):
                self.trainer.lr_scheduler.step()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seed every generator of random numbers for the next step, on each rank by another number."""
        self.log.clock.enter("redone" if self.state.step < self.log.reached else "train")
        own = f" {self.world.rank}" if self.world.rank else ""
        transformers.set_seed(random.Random(f"{self.step.seed} {self.state.step}{own}").randrange(2**32))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until a save has copied the weights."""
        self.checkpointer.before_update()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Log a step and save it when that is due. The training ends after the last step, and if a rank was asked to
        stop."""
        if not logs or "loss" not in logs:  # the summary at the end
            return
        tokens = float(logs.get("num_tokens", 0))
        self.state.advance(round(tokens - self.tokens_before), applied=True)
        seconds, self.stepped = time.perf_counter() - self.stepped, time.perf_counter()
        values = {name: float(value) for name, value in logs.items() if name not in LEFT_OUT}
        values["tokens_per_second"], self.tokens_before = (tokens - self.tokens_before) / seconds, tokens
        if not math.isfinite(loss := values["loss"]):
            why = f"the loss of step {self.state.step:,} is {loss}"
            raise Diverged(f"tune.{self.step.name}: {why}; lower learning_rate, and run again from the last commit")
        self.log.row(self.state.step, {f"tune/{self.step.name}/{name}": value for name, value in values.items()})
        self.together.watchdog.step_done(seconds)
        self.checkpointer.prove()  # this step's loss was computed with the weights before it
        self.checkpointer.settle(self.log)
        due = self.world.rank == 0 and self.save_clock.due_now() and not self.checkpointer.busy
        stop, save = map(bool, self.world.sum(self.stop.asked, due))
        ends = self.state.step >= self.steps or stop
        if ends or save:
            self.save(proven=ends)
        control.should_training_stop = ends

    def save(self, proven: bool = True) -> None:
        """Start to commit the state, or add a measurement to the commit of this step."""
        with self.log.clock.phase("checkpoint"):
            if self.state.step == self.saved_step:
                return self.checkpointer.amend(self.state, self.pieces, self.log)
            started, self.saved_step = time.monotonic(), self.state.step
            self.checkpointer.save(self.state, self.pieces, self.log, proven)
            self.save_clock.saved(time.monotonic() - started)

    def measure(self) -> None:
        """Log the share of held-out prompts whose likeliest answer is the right one, and the first answer. A collective
        call: the ranks divide the rows."""
        rows, world, right, shown = self.held_out, self.world, 0, list[str]()
        self.model.eval()
        with self.log.clock.phase("evaluate"), torch.no_grad():
            for first in range(0, len(rows), MEASURED_AT_ONCE * world.world_size):
                self.together.check()
                some = rows[first : first + MEASURED_AT_ONCE * world.world_size][world.rank :: world.world_size]
                if not some:
                    continue
                questions, answers = zip(*some, strict=True)
                given = self.padded([*map(self.tokens.prompt, questions)], "left")
                length = given["input_ids"].shape[1]
                room = min(self.step.max_answer, self.task.recipe.model.block_size - length)
                made = self.model.generate(**given, do_sample=False, max_new_tokens=room)
                texts = self.tokenizer.batch_decode(made[:, length:], skip_special_tokens=True)
                shown = shown or [f"{questions[0][-1]['content']} → {texts[0]}"]
                right += sum(answer_in(a) == answer_in(b) for a, b in zip(texts, answers, strict=True))
        self.state.evaluated_step = self.state.step
        self.log.row(self.state.step, {f"tune/{self.step.name}/exact": world.sum(right)[0] / len(rows)}, shown)

    def write_result(self) -> None:
        """Write the model as a folder for transformers, and its facts last."""
        model = self.model.merge_and_unload() if self.step.lora_rank else self.model
        model.config.use_cache = True  # TRL's trainer has switched it off
        model.to(getattr(torch, self.task.recipe.export.dtype)).save_pretrained(self.folder / TUNED)
        self.tokenizer.save_pretrained(self.folder / TUNED, save_jinja_files=False)
        facts = {"method": self.step.method, "steps": self.state.step, "vocab_size": model.config.vocab_size}
        (self.folder / FACTS_FILE).write_text(json.dumps(facts))


def order_of(rows: int, epochs: int, seed: int) -> list[int]:
    """The numbers of the rows in the order in which they are read: each epoch reads all of them."""
    order = []
    for epoch in range(epochs):
        numbers = list(range(rows))
        random.Random(f"{seed} {epoch}").shuffle(numbers)
        order += numbers
    return order


def model_in(folder: Path, tokens: ChatTokens, step: TuneConfig, scores: bool = False) -> tuple[Any, Any]:
    """The model in float32 and the tokenizer of a folder, with the two tokens of ChatML and its template. The first
    row begins as the mean of all others (Hewitt 2021), the second as far beyond <|endoftext|> as that is beyond the
    mean: a head that LoRA leaves as it is could never prefer a mean. With `scores`, a reward model: it has one output,
    which a base model draws from the seed."""
    transformers.set_seed(step.seed)  # of the adapters, too
    kind = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    options = {"num_labels": 1} if scores else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.chat_template == TEMPLATE:
        return model, tokenizer
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_TOKENS)})
    if tokenizer.convert_tokens_to_ids(list(CHAT_TOKENS)) != [tokens.start, tokens.end]:
        raise UserError(f"tune: the tokenizer has {' and '.join(CHAT_TOKENS)} already; tune its model with TRL itself")
    if model.config.vocab_size < tokens.n_vocab:
        model.resize_token_embeddings(tokens.n_vocab, mean_resizing=False)
    with torch.no_grad():
        for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            mean, eot = layer.weight[:known].mean(0), layer.weight[tokens.encoding.eot_token]
            layer.weight[tokens.start], layer.weight[tokens.end] = mean, 2 * eot - mean
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, END
    if getattr(model, "generation_config", None):  # a reward model has none
        model.generation_config.eos_token_id = [tokens.end, tokens.encoding.eot_token]
    model.config.eos_token_id = tokens.end
    return model, tokenizer


def ids_of_chats(
    tokens: ChatTokens, conversation: Sequence[Any], add_generation_prompt: bool = False, **_: Any
) -> dict[str, Any]:
    """Do what TRL calls `apply_chat_template` for, on one conversation or several. transformers would encode the
    rendered text, and so take a text that spells a special token for that token."""
    if not isinstance(conversation[0], Mapping):
        ids = [ids_of_chats(tokens, one, add_generation_prompt)["input_ids"] for one in conversation]
        return {"input_ids": ids}
    return {"input_ids": tokens.prompt(conversation) if add_generation_prompt else tokens.conversation(conversation)[0]}
