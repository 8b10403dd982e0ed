"""A seed becomes a world: machines, processes and faults; and that becomes a verdict."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fp4convert.execution.finish import merge
from fp4convert.planning.plan import Plan
from fp4convert.progress import Phases
from simulation.checkpoint import Wanted, converts, part, pushes, put_source
from simulation.disk import Disk, Node
from simulation.hub import Hub
from simulation.invariants import RECORD, SOURCE, STATE, WEIGHTS, Rules
from simulation.machines import Machine, Process, Trouble
from simulation.scheduler import Scheduler, Violation
from simulation.system import NS, Files

YEAR = 365 * 86400.0
EPOCH = 1.7e9  # the true time at which every world begins
STEPS = 900  # of one process that works alone: faults come in so many, for each
MERGES = ("unfinished", "no-plan", "damaged")  # what it may say of a folder
READS = ("read", "look")  # they change nothing: a lost reply is a failure
CALM_SECONDS = 0.05  # calls that take no longer keep no process from renewing its claims
FULL = (errno.ENOSPC, errno.EDQUOT)
TROUBLES: dict[str, tuple[int, ...]] = {
    "create": (*FULL, errno.EIO, errno.EACCES, errno.EROFS),
    "write": (*FULL, errno.EIO),
    "flush": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC, errno.EROFS),
    "unlink": (errno.EIO, errno.EROFS),
    "mkdir": (*FULL, errno.EIO),
    "utime": (errno.EIO, errno.ESTALE),
    "open": (errno.EIO, errno.ESTALE, errno.EMFILE),
    "read": (errno.EIO, errno.ESTALE),
    "look": (errno.EIO, errno.ESTALE),
}


@dataclass
class Verdict:
    """What became of a seed: "" where every promise held."""

    seed: int
    trace_hash: str
    broken: str
    outcomes: dict[str, int]
    steps: int
    trace: list[str]


class World:
    """One world, and all that happens in it."""

    def __init__(
        self,
        seed: int,
        wanted: dict[str, Wanted],
        plans: dict[str, Plan],
        source: dict[str, bytes],
    ) -> None:
        self.seed = seed
        self._plans = plans
        self.chance = chance = Random(seed)
        self.wanted = wanted
        self.is_network = chance.random() < 0.5
        self.scheduler = Scheduler(
            chance,
            hasty=chance.choice((0.0, 0.5, 0.9, 0.98)),
            naps=chance.choice((0.0, 0.0, 0.002, 0.01)),
            step_seconds=chance.choice((0.0005, 0.0005, 0.0005, 0.01, 0.4)),
        )
        self.scheduler.on_step = self._on_step
        keeps_names = self.is_network and chance.random() < 0.5
        self.disk = Disk(chance, chance.choice((1, 4_000_000, NS, 2 * NS)), keeps_names)
        self.files = Files(self.disk)
        self._stamps_by_client = self.is_network and chance.random() < 0.3
        self._source = source
        put_source(self.disk, source)
        self.disk.put("/sim/work/theirs.txt", b"not ours")
        self.out = chance.choice(("/sim/work/out", "/sim/work/new/deep/out"))
        self.plans = ["a", "b"] if chance.random() < 0.15 else ["a"]
        # Of every five worlds one pushes, and of these every other keeps no shard.
        self.is_pushing, self.keeps = seed % 5 == 4, seed % 10 != 9
        if self.is_pushing:
            self.plans = ["a"]
        # Of two plans, one may sleep while it begins, for longer than its lease lasts.
        self.beginner_sleeps = len(self.plans) > 1 and chance.random() < 0.5
        self.hub = Hub(self)
        names: dict[str, set[bytes]] = {}
        for plan in self.plans:
            for file, data in wanted[plan].files.items():
                names.setdefault(file, set()).add(data)
        self.rules = Rules(self, self.out, names)
        self.rules.is_one_plan = len(self.plans) == 1
        self.machines = self._make_machines()
        self.processes: list[Process] = []
        self.faults: list[tuple[int, Callable[[Process], None]]] = []
        self.troubles: list[Trouble] = []
        self.was_full = False
        self.has_failed = False  # any call
        self.was_blind = False  # a call failed by which one sees what others did
        self.has_faults = False
        self.was_crowded = False  # several at once, of which --no-keep lets one work
        self.harmed: set[str] = set()
        self.outcomes: dict[str, int] = {}

    def is_calm(self, *processes: Process) -> bool:
        """Tell whether calls are fast, and none of these processes' has failed."""
        was_troubled = self.was_full or any(each.was_troubled for each in processes)
        return self.scheduler.step_seconds < CALM_SECONDS and not was_troubled

    # Machines and their clocks.

    def _make_machines(self) -> list[Machine]:
        chance, made = self.chance, []
        count = chance.choice((2, 2, 3)) if self.is_network else chance.choice((1, 1, 2))
        cache = chance.choice((0.0, 3.0, 30.0)) if self.is_network else 0.0
        is_cloned = chance.random() < 0.5
        for number in range(count):
            is_apart = self.is_network or not made
            machine = Machine(
                name=f"m{number}",
                host="localhost" if is_cloned else f"host{number}",
                boot=f"boot-{number}" if is_apart else made[0].boot,
                wall_seconds=chance.choice((0.0, 0.0, 3600.0, -5 * YEAR, 5 * YEAR)),
                start_seconds=chance.uniform(0, 1e6),
                tick=chance.uniform(0.98, 1.02),
                slowness=chance.choice((1.0, 1.0, 3.0)),
                cache_seconds=cache,
                namespace=4026531836 + number,
            )
            made.append(machine)
        if not self.is_network:  # containers of one machine
            for machine in made[1:]:
                machine.wall_seconds = made[0].wall_seconds
                machine.tick, machine.start_seconds = made[0].tick, made[0].start_seconds
        return made

    def wall_seconds(self, machine: Machine) -> float:
        return EPOCH + machine.wall_seconds + machine.tick * self.scheduler.now

    def file_time(self, machine: Machine) -> int:
        """Return what time it is for the disk, in ns."""
        by_client = self._stamps_by_client or not self.is_network
        seconds = self.wall_seconds(machine) if by_client else EPOCH + self.scheduler.now
        return int(seconds * NS) // self.disk.tick_ns * self.disk.tick_ns

    def living(self, machine: Machine) -> dict[int, Process]:
        """Return the processes in a machine's table."""
        return {
            each.number: each
            for each in self.processes
            if not each.is_over and each.machine is machine
        }

    def proc_text(self, process: Process, path: str) -> str:
        if path.endswith("boot_id"):
            return f"{process.machine.boot}\n"
        found = self.living(process.machine).get(int(path.split("/")[2]))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such process", path)
        fields = ["S", *("0" for _ in range(18)), str(int(found.started * 100)), "0"]
        return f"{found.number} (python) {' '.join(fields)}"

    # Faults.

    def trouble(self, process: Process, kind: str) -> Trouble | None:
        for trouble in self.troubles:
            if trouble.kind == kind and trouble.left and not process.is_over:
                trouble.left -= 1
                process.was_troubled = self.has_failed = True
                self.was_blind |= kind in ("open", "read", "look")
                self.scheduler.note(process, "fails", errno.errorcode[trouble.number])
                return trouble
        return None

    def _on_step(self, process: Process, call: str, subject: str) -> None:
        while self.faults and self.faults[-1][0] <= self.scheduler.steps:
            self.faults.pop()[1](process)
        if self.beginner_sleeps and self.chance.random() < 0.05:
            lease = self.disk.find(f"{self.out}/{STATE}/claims/plan")
            if lease is not None and lease.maker is process:
                self.beginner_sleeps, self.has_faults = False, True
                process.freeze(self.chance.choice((70.0, 200.0)))

    def _kill(self, process: Process) -> None:
        process.is_torn = self.chance.random() < 0.5
        process.end("killed")

    def _freeze(self, process: Process) -> None:
        process.freeze(self.chance.choice((5.0, 50.0, 70.0, 200.0)))

    def claim_gone(self, owner: object) -> None:
        """Wake its maker now, perhaps, which sleeps: while others hold what it held."""
        sleeps = isinstance(owner, Process) and owner.frozen_until > self.scheduler.now
        if sleeps and self.chance.random() < 0.7:
            owner.thaw(self.chance.choice((5.0, 50.0, 300.0)) * self.scheduler.step_seconds)

    def _jump(self, process: Process) -> None:
        if not self.is_network:
            seconds = self.chance.choice((-3600.0, -1.0, 2.0, 3600.0))
            for machine in self.machines:
                machine.wall_seconds += seconds

    def _fail(self, process: Process) -> None:
        kind = self.chance.choice((*TROUBLES, "flush", "flush"))  # what matters most
        number = self.chance.choice(TROUBLES[kind])
        is_done = self.is_network and self.chance.random() < 0.3 and kind not in READS
        left = self.chance.choice((1, 1, 2, 10, 1000))
        self.troubles.append(Trouble(kind, number, left, is_done))

    def _fill_disk(self, process: Process) -> None:
        self.disk.free_nbytes = self.chance.randrange(4000)
        self.was_full = self.has_failed = True

    def _cut_power(self, process: Process) -> None:
        """End everything; or on a network, at times, one machine alone."""
        self.scheduler.note(process, "power", "cut")
        alone = self.is_network and self.chance.random() < 0.5
        gone = [process.machine] if alone else self.machines
        for each in self.processes:
            if each.machine in gone:
                each.end("killed")
        for machine in gone:
            machine.boot += "+"
            machine.start_seconds = 0.0 - self.scheduler.now
            machine.forget()
        if alone:
            self.disk.lose_client(process.machine)
        else:
            self.disk.cut_power()
        self.rules.check_left(self.harmed)

    def _of_hub(self, call: Callable[[], None]) -> Callable[[Process], None]:
        def happen(process: Process) -> None:
            self.scheduler.note(process, "the Hub", call.__name__)
            call()

        return happen

    def _plan_faults(self, processes: int) -> None:
        chance = self.chance
        kinds = (self._kill, self._kill, self._freeze, self._fail, self._fail, self._cut_power)
        kinds += (self._jump, self._fill_disk)
        if self.is_pushing:
            hub = self.hub
            calls = (hub.fail, hub.fail, hub.fail, hub.lose, hub.let_others_commit)
            kinds += tuple(self._of_hub(call) for call in calls)
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            step = self.scheduler.steps + chance.randrange(STEPS * processes)
            self.faults.append((step, chance.choice(kinds)))
        self.has_faults |= bool(self.faults)
        self.faults.sort(key=lambda fault: -fault[0])

    # What happens.

    def start(self, machine: Machine, what: str, plan: str, run: Callable[[], Any]) -> Process:
        living = self.living(machine)
        number = self.chance.choice([n for n in range(40, 48) if n not in living])
        process = Process(self, machine, number, f"{what} {plan}", run)
        process.plan = "" if what == "merge" else plan
        process.began_whole = self.disk.find(f"{self.out}/{RECORD}") is not None
        self.processes.append(process)
        self.scheduler.note(process, "begins", process.what)
        return process

    def _start_some(self) -> list[Process]:
        chance = self.chance
        count = chance.choice((1, 2, 2, 2, 3))
        self.was_crowded |= count > 1 and not self.keeps
        shares = chance.random() < 0.15
        started = []
        for number in range(count):
            name = chance.choice(self.plans)
            plan, what = self._plans[name], chance.choice(("run", "run", "run", "join"))
            if self.is_pushing and (not self.keeps or chance.random() < 0.8):
                joins = self.keeps and what == "join"
                run = pushes(plan, self.out, not self.keeps, is_joining=joins)
                what = "push"
            elif shares:
                run = converts(plan, self.out, share=part(number, count)) if count > 1 else None
                what = f"part {number} of {count}"
            elif what == "join":
                run = converts(plan, self.out, is_joining=True)
            else:
                run = converts(plan, self.out, is_forced=len(self.plans) > 1)
            is_merged = chance.random() < 0.15 and self.disk.find(self.out) and self.keeps
            if run is None or is_merged:
                run, what = (lambda: merge(Path(self.out), Phases())), "merge"
            started.append(self.start(chance.choice(self.machines), what, name, run))
        return started

    def _go_on(self) -> None:
        """Run until every process is over."""
        self.scheduler.run()
        for process in self.processes:
            self.scheduler.forget(process.threads)
            process.threads.clear()
        for process in self.processes:
            self._judge(process)
        self.processes.clear()

    def _judge(self, process: Process) -> None:
        self.outcomes[process.outcome] = self.outcomes.get(process.outcome, 0) + 1
        if process.outcome == "crash":
            raise Violation(f"{process} ends with a traceback:\n{process.words}")
        if process.outcome == "ok":
            digest = process.result.get("digest") if isinstance(process.result, dict) else None
            digest = digest or getattr(process.result, "digest", None)
            plans = [process.plan] if process.plan in self.plans else self.plans
            if digest and digest not in {self.wanted[plan].digest for plan in plans}:
                raise Violation(f"{process} ends with another digest")
            if not digest and "part" not in process.what:
                raise Violation(f"{process} ends without a digest")
            if process.what.startswith("push"):
                self._check_pushed()
        elif process.what.startswith("merge") and process.outcome in MERGES:
            self._judge_merge(process)
        elif process.outcome == "unfinished" and self._is_seen_well():
            raise Violation(f"{process} gives up, though others only do again what was harmed")
        elif process.outcome == "given-up" and self.scheduler.step_seconds >= CALM_SECONDS:
            return  # its heart got no turn for a minute
        elif not (self.has_faults or self.is_network or len(self.plans) > 1 or self.was_crowded):
            words = f"{process.outcome}: {process.words}"
            raise Violation(f"{process} is refused without a fault: {words}")

    def _judge_merge(self, process: Process) -> None:
        """Judge what merge finds wrong where nothing was."""
        if self.harmed or self.has_failed or self.is_network or len(self.plans) > 1:
            return
        if process.outcome == "damaged" or process.began_whole:
            raise Violation(f"{process} finds a folder {process.outcome} that is whole")

    def _is_seen_well(self) -> bool:
        """Tell whether every process saw what the others did, and none slept."""
        slept = any(each.last_frozen > 0 for each in self.processes)
        caches = any(machine.cache_seconds for machine in self.machines)
        return not (slept or caches or self.was_blind or len(self.plans) > 1)

    def _check_pushed(self) -> None:
        """Judge the head of the repository after a push that ended well."""
        for file, data in self.wanted["a"].files.items():
            found = self.hub.head.files.get(file)
            if found != data:
                raise Violation(f"a push ends well, and the repository's {file} is another")

    def _meddle(self) -> None:
        """Do what people do in between: add a file, damage one."""
        chance, root = self.chance, self.disk.find(self.out)
        if root is None or root.entries is None or STATE not in root.entries:
            return
        if chance.random() < 0.3 and self.disk.find(f"{self.out}/{STATE}/plan.json"):
            self.disk.put(f"{self.out}/notes.txt", b"mine")
        if chance.random() < 0.25:
            files = [
                (file, node)
                for file, node in self.disk.files(root).items()
                if file.endswith(".safetensors") and "/" not in file and node.data
            ]
            if files:
                file, node = chance.choice(files)
                self._damage(node)
                self.harmed.add(file)

    def _damage(self, node: Node) -> None:
        place = self.chance.randrange(len(node.data))
        node.data[place] ^= 1
        node.durable = bytes(node.data)
        node.written_ns = node.changed_ns = self.file_time(self.machines[0])

    def _finished(self) -> set[str]:
        """Name the shards that are whole, recorded and on the disk."""
        found: set[str] = set()
        folder = self.disk.find(f"{self.out}/{STATE}/done")
        if folder is None or folder.entries is None:
            return found
        for name, node in folder.entries.items():
            entry = json.loads(bytes(node.data))
            files = entry["files"]
            if entry.get("is_gone"):
                if all(sha256 in self.hub.objects for sha256 in files.values()):
                    found |= files.keys()
                continue
            nodes = [(file, self.disk.find(f"{self.out}/{file}")) for file in files]
            if folder.durable_entries.get(name) is node and all(
                each is not None and bytes(each.data) in self.rules.wanted[file]
                for file, each in nodes
            ):
                found |= files.keys()
        return found

    def alone(self, run: Callable[[], Any]) -> Any:
        """Return what a process returns that is alone, and meets no fault."""
        process = self.start(self.machines[0], "alone", "", run)
        self.scheduler.run()
        if process.outcome != "ok":
            raise RuntimeError(process.words)
        return process.result

    def live(self) -> None:
        """Let it all happen, then have one last run without a fault."""
        for _ in range(self.chance.choice((1, 1, 2))):
            processes = self._start_some()
            self._plan_faults(len(processes))
            self._go_on()
            self.faults.clear()
            self.beginner_sleeps = False
            self.troubles.clear()
            self.hub.troubles.clear()
            self.disk.free_nbytes = 1 << 40
            self.scheduler.now += self.chance.choice((0.0, 1.0, 100.0))
            self._meddle()
        # The last run.
        self.was_full = False
        self.scheduler.step_seconds = 0.0005
        name = self.plans[-1]
        self.scheduler.now += 100.0 if self.is_network else 0.0  # what was cached is old
        if self.rules.is_one_plan:
            self.rules.kept = self._finished()
        run = converts(self._plans[name], self.out, is_forced=len(self.plans) > 1)
        if self.is_pushing:
            run = pushes(self._plans[name], self.out, not self.keeps)
        what, before = "push" if self.is_pushing else "last", self.scheduler.now
        last = self.start(self.chance.choice(self.machines), what, name, run)
        self._go_on()
        if last.outcome != "ok" or last.result.digest != self.wanted[name].digest:
            raise Violation(f"the last run ends otherwise: {last.outcome} {last.words}")
        seconds = self.scheduler.now - before
        if seconds > 300.0:
            raise Violation(f"the last run takes {seconds:.0f} seconds, alone")
        files = self.wanted[name].files
        if self.is_pushing and not self.keeps:
            files = {file: data for file, data in files.items() if not file.endswith(WEIGHTS)}
        self.rules.check_end(files, last)
        if self.rules.is_one_plan:
            self.rules.check_durable("the last run is over")
        self._check_others()

    def _check_others(self) -> None:
        root = self.disk.find(SOURCE)
        found = (
            {file: bytes(node.data) for file, node in self.disk.files(root).items()} if root else {}
        )
        if found != self._source:
            raise Violation("the source is not what it was")
        theirs = self.disk.find("/sim/work/theirs.txt")
        if theirs is None or bytes(theirs.data) != b"not ours":
            raise Violation("a file of somebody else is gone")

    def verdict(self, is_traced: bool) -> Verdict:
        """Live, and say what became of it."""
        self.scheduler.is_noted = is_traced
        broken = ""
        try:
            self.live()
        except Violation as violation:
            broken = str(violation)
        finally:
            for process in self.processes:
                process.end("unwound")
                self.scheduler.forget(process.threads)
        return Verdict(
            self.seed,
            self.scheduler.trace_hash,
            broken,
            self.outcomes,
            self.scheduler.steps,
            self.scheduler.trace,
        )
