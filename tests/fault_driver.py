"""Every stage under calls of the file system that fail: one process, warmed up, which forks a child for each fault.

Started by ``test_faults.py`` with the library of ``faults.c`` preloaded, so that safetensors, Lightning and W&B pass it
too. Prints a JSON line for every fault: what failed, how the command ended, and what was wrong with that.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvxfer.experiment import command, runs
from kvxfer.experiment.stages import calibrate, evaluate, train, train_network
from kvxfer.models.pair import load_pair
from tests.launching import PNG
from tests.small_runs import TOY_EVAL, settings_of, toy_models

SMALL = ["corpus.rows.fit=4", "corpus.rows.validation=2", "corpus.rows.held_out=2"]
SMALL += ["calibration.checkpoint_minutes=0", "calibration.batch_size=2"]
EVAL = [*TOY_EVAL, "eval.stories=2", "eval.questions=1", "eval.batch_size=2"]
TRAINED = ["solver=corrected", "corpus.rows.training=4", "trainer.max_steps=2", "trainer.batch_size=2"]
TRAINED += ["trainer.warmup_steps=0", "trainer.validate_every=1", "trainer.lr=1e-3"]
ERRNO = {"open": errno.EACCES, "create": errno.EACCES, "write": errno.ENOSPC, "rename": errno.EROFS}
ERRNO |= {"mkdir": errno.ENOSPC, "unlink": errno.EACCES, "fsync": errno.EIO, "flock": errno.ENOLCK}
_UNTOLD = {"seconds", "started", "finished", "environment", "hash"}


@dataclass(frozen=True)
class Stage:
    """A command: how it is run in an outputs folder, what it needs there, and what of it must stay the same."""

    name: str
    run: Callable[[Path], Any]
    result: Callable[[Path], Any]
    under: str = ""
    anew: tuple[str, ...] = ()
    """What is removed of a first run, so that only the rest is done again for each fault."""
    resumes: bool = False
    """Whether it goes on from what a failed run has left; others begin anew."""


class Library:
    """The preloaded library, in this process and its children."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.c.fault_call.restype = ctypes.c_char_p
        self.c.fault_count.restype = ctypes.c_long

    def arm(self, folder: Path | str, nth: int = 0, number: int = 0, lasting: bool = False) -> None:
        self.c.fault_arm(str(folder).encode(), ctypes.c_long(nth), number, int(lasting))

    def calls(self) -> list[str]:
        return [self.c.fault_call(ctypes.c_long(n)).decode() for n in range(self.c.fault_count())]


def site(call: str) -> str:
    """A call without what differs from one run, stage or file to another: the same code makes all of these."""
    kind, _, path = call.partition(" ")
    name = re.sub(r"\.?[0-9a-f]{8,}|\.tmp\w{6}|\d+", "#", path.rpartition("/")[2])
    whole = name.removesuffix(".tmp")
    own = "run.json" in name or "checkpoint" in name or "." not in whole.removeprefix(".")
    return f"{kind} {name if own else Path(whole).suffix}"


def in_child(work: Callable[[], Any], said: Path) -> int:
    """Run in a copy of this process, as a command is run; what it says goes to a file. Returns the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "0"  # a command sets it, and keeps the stream that it logs to
    logging.getLogger("kvxfer").handlers = []
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 3
    try:
        with said.open("w") as file, redirect_stderr(file), redirect_stdout(file):
            try:
                with command._mistakes_in_one_line([]):
                    command._begun.set()
                    work()
                code = 0
            except SystemExit as end:
                code = 1 if isinstance(end.code, str) else int(end.code or 0)
                file.write(f"{end.code}\n")
            except BaseException:
                traceback.print_exc(file=file)
    finally:
        os._exit(code)


def faults(calls: list[str], seen: set[str] | None) -> Iterator[tuple[int, int, bool]]:
    """The number of a call, its errno, and whether all that follow fail too; without those of sites that were seen."""
    for n, call in enumerate(calls, start=1):
        if seen is None or site(call) not in seen:
            kind = call.split()[0]
            yield n, ERRNO[kind], kind in ("write", "mkdir")
        if seen is not None:
            seen.add(site(call))


def try_stage(
    stage: Stage, before: Path, home: Path, library: Library, seen: set[str] | None
) -> Iterator[dict[str, Any]]:
    """Every fault of a stage, each from the state ``before``; then the same command without one."""
    said, outputs = home / "said.txt", home / "outputs"

    def fresh() -> None:
        shutil.rmtree(outputs, ignore_errors=True)
        shutil.copytree(before, outputs)

    # In this process, so that its children find everything imported.
    fresh()
    library.arm(f"{outputs}/{stage.under}")
    with (home / "told.txt").open("w") as file, redirect_stderr(file), redirect_stdout(file):
        stage.run(outputs)
    calls = library.calls()
    library.arm("")
    gc.freeze()
    expected = stage.result(outputs)
    tried = list(faults(calls, seen))
    for n, number, lasting in tried:
        fresh()

        def broken(n: int = n, number: int = number, lasting: bool = lasting) -> None:
            library.arm(f"{outputs}/{stage.under}", n, number, lasting)
            stage.run(outputs)

        code, wrong = in_child(broken, said), []
        text = said.read_text()
        if "Traceback" in text or code not in (0, 1):
            wrong.append(f"ends with {code} and: {text[-2000:]}")
        if code == 1 and len(text.strip().splitlines()[-1].split("error: ")) != 2:
            wrong.append(f"no line of ours: {text[-500:]}")
        # What begins anew does so from any state: each is tried where there is time for it.
        # Of what goes on, a file that can't be opened leaves less behind than one that can't be written.
        goes_on = seen is None or n in (tried[0][0], tried[-1][0])
        goes_on |= stage.resumes and calls[n - 1].split()[0] not in ("open", "create")
        if code == 1 and not goes_on:
            pass
        elif in_child(lambda: stage.run(outputs), said):
            wrong.append(f"the same command does not go on: {said.read_text()[-2000:]}")
        elif stage.result(outputs) != expected:
            wrong.append("the same command gives another result")
        line = text.strip().splitlines()[-1:] if code else []
        yield {
            "stage": stage.name,
            "call": calls[n - 1],
            "errno": errno.errorcode[number],
            "lasting": lasting,
            "code": code,
            "line": line,
            "wrong": wrong,
        }


def plain(value: Any) -> Any:
    """JSON without times, and without the digests of what holds times."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in _UNTOLD}
    return [plain(each) for each in value] if isinstance(value, list) else value


def bits(pattern: str) -> Callable[[Path], Any]:
    """The digests of a stage's results."""

    def found(outputs: Path) -> Any:
        files = sorted(outputs.glob(pattern))
        assert files, pattern
        return [(str(file.relative_to(outputs)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]

    return found


def judged(outputs: Path) -> Any:
    """The numbers of an evaluation, and the evidence beside the map."""
    files = [*outputs.glob("evaluate/[!.]*/results.json"), *outputs.glob("train/[!.]*/evidence/*.json")]
    assert len(files) == 2
    return [plain(json.loads(file.read_text())) for file in files]


def swept(outputs: Path) -> Any:
    """What a sweep's table says, and that its figure is there."""
    (table,) = outputs.glob("sweeps/*/summary.csv")
    assert table.with_name("quality.png").is_file()
    return table.read_text()


def stages(folders: tuple[Path, Path], home: Path) -> Iterator[Stage]:
    """The commands, in the order in which each finds what it needs."""
    given = [*toy_models(folders), *SMALL]
    of = {name: settings_of(name, home, *given, *more) for name, more in (("train", ()), ("evaluate", EVAL))}
    of["trained"] = settings_of("train", home, *given, *TRAINED)
    pair = load_pair(of["train"].pair)
    for module in (calibrate, train_network):
        module.load_pair = lambda spec: pair  # type: ignore[attr-defined]

    def at(name: str, outputs: Path) -> Any:
        return replace(of[name], outputs=outputs)

    def sweep(outputs: Path) -> None:
        sys.argv = ["train.py", "-m", *given, "pair.device=cpu", f"paths.outputs={outputs}", "logger=disabled"]
        sys.argv += ["penalty.lam=0.01,0.1"]
        command.run("train")

    yield Stage(
        "calibrate",
        lambda outputs: calibrate.calibrate(at("train", outputs)),
        bits("calibrate/[!.]*/*.safe*"),
        resumes=True,
    )
    yield Stage("train", lambda outputs: train.train(at("train", outputs)), bits("train/[!.]*/map.safetensors"))
    yield Stage(
        "evaluate",
        lambda outputs: evaluate.evaluate(at("evaluate", outputs), load=lambda spec: pair),
        judged,
        "",
        ("evaluate", "train/*/evidence"),
    )
    yield Stage(
        "trained",
        lambda outputs: train.train(at("trained", outputs)),
        bits("train/[!.]*/map.safetensors"),
        resumes=True,
    )
    yield Stage("sweep", sweep, swept, "sweeps/", ("sweeps",))


def main(home: Path, folders: tuple[Path, Path], every: bool, wanted: list[str]) -> None:
    library, seen = Library(), None if every else set[str]()
    around = runs.environment()
    for module in (runs, evaluate):
        module.environment = lambda: around
    Figure.savefig = lambda self, path, **_: Path(path).write_bytes(PNG)  # type: ignore[method-assign,assignment]
    before = home / "before"
    before.mkdir()
    for stage in stages(folders, before):
        if stage.anew:
            stage.run(before)
            for pattern in stage.anew:
                for path in before.glob(pattern):
                    shutil.rmtree(path)
        if stage.name in wanted:
            for found in try_stage(stage, before, home, library, seen):
                print(json.dumps(found), flush=True)
        if not stage.anew:
            # What follows finds it there.
            stage.run(before)


if __name__ == "__main__":
    place, source, target, all_calls, *names = sys.argv[1:]
    main(Path(place), (Path(source), Path(target)), all_calls == "every", names)
