"""What must hold at every step, whatever the code does in between."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from simulation.disk import Node
from simulation.machines import LEASE_SECONDS, Process
from simulation.scheduler import Violation

if TYPE_CHECKING:
    from simulation.world import World

SOURCE = "/sim/source"
WEIGHTS = ".safetensors"
STATE = ".fp4convert"
CARD = "README.md"
RECORD, REPORT = "quantization_config.json", "quantization_report.json"
# A claim that is waited for may itself be guarded by one of a dead process; looks are 3 s apart,
# and a machine believes what it knows of a file on a network for 30 s.
LONGEST_WAIT = 2 * (LEASE_SECONDS + 3.0) + 30.0
AT_ONCE = 15.0  # for a dead process of the same machine
USER = "user"


class Rules:
    """Judge calls while they are made; Violation where one breaks a promise.

    out     the output
    wanted  name -> its bytes in the artifacts of the plans of this world
    kept    shards that are finished, and need not be made again from now on
    """

    def __init__(self, world: World, out: str, wanted: dict[str, set[bytes]]) -> None:
        self.world = world
        self.out = out
        self.wanted = wanted
        self.kept: set[str] = set()
        self.is_one_plan = True
        self._final: dict[int, str] = {}

    def _break(self, words: str) -> Violation:
        """Note what was seen: the code that is judged may catch the exception."""
        scheduler = self.world.scheduler
        scheduler.broken = scheduler.broken or words
        return Violation(words)

    def _below_output(self, path: str) -> str | None:
        """Return a path below the output; None for one that is elsewhere."""
        return path[len(self.out) + 1 :] if path.startswith(f"{self.out}/") else None

    def _refuse_elsewhere(self, process: Process, path: str, node: Node) -> None:
        if path.startswith(SOURCE):
            raise self._break(f"{process} changes the source: {path}")
        is_ours = node.is_folder and (self.out == path or self.out.startswith(f"{path}/"))
        if self._below_output(path) is None and not is_ours:
            raise self._break(f"{process} changes what is not its own: {path}")
        if node.maker == USER:
            raise self._break(f"{process} changes a file of somebody else: {path}")

    def changed(self, process: Process, path: str, node: Node) -> None:
        """Judge a file that is opened to be written, or written; a folder that is made."""
        self._refuse_elsewhere(process, path, node)
        if node.inode in self._final:
            raise self._break(f"{process} writes into {self._final[node.inode]}, which is final")

    def named(self, process: Process, path: str, node: Node) -> None:
        """Judge a file that gets a name."""
        self._refuse_elsewhere(process, path, node)
        file, before = self._below_output(path), self.world.disk.find(path)
        if before is not None and before.maker == USER:
            raise self._break(f"{process} takes the place of a file of somebody else: {path}")
        if file is None or node.is_folder:
            return
        if not file.startswith(f"{STATE}/"):
            self._judge_final(process, file, node)
        elif file.startswith(f"{STATE}/done/"):
            self._judge_done(process, node)
        elif file.startswith(f"{STATE}/claims/"):
            self._note_done(process, file.rpartition("/")[2])
        elif file.startswith(f"{STATE}/tmp/"):
            name = file.split("/", 3)[-1]
            if name in self.kept:
                raise self._break(f"{process} makes {name} again, which was finished and whole")
            # A read that failed since it claimed may have hidden the record from it.
            if not process.was_troubled and any(name in late for late in process.late.values()):
                raise self._break(f"{process} makes {name} again, which was done when it took it")

    def _note_done(self, process: Process, key: str) -> None:
        """Note the shards that are there and recorded while a process claims their task."""
        process.late.pop(key, None)
        record = self.world.disk.find(f"{self.out}/{STATE}/done/{key}.json")
        # What failed, or is believed of a file for a while, may hide them from it.
        hides = process.was_troubled or process.machine.cache_seconds
        if record is None or hides or not self.is_one_plan:
            return
        entry = json.loads(bytes(record.data))
        shards = {file for file in entry["files"] if file.endswith(WEIGHTS)}
        if entry.get("is_gone") or all(
            self.world.disk.find(f"{self.out}/{file}") for file in shards
        ):
            process.late[key] = shards

    def _judge_final(self, process: Process, file: str, node: Node) -> None:
        if bytes(node.data) not in self.wanted.get(file, ()):
            raise self._break(f"{process} gives {file} its name with bytes that are not its own")
        if node.pending or node.durable != bytes(node.data):
            raise self._break(f"{process} gives {file} its name before it is on the disk")
        if file in self.kept:
            raise self._break(f"{process} makes {file} again, which was finished and whole")
        if file == RECORD:
            self.check_durable(f"{process} writes {RECORD}", but=RECORD)
            self._check_one_plan(process, node)
        self._final[node.inode] = file

    def _check_one_plan(self, process: Process, record: Node) -> None:
        """Refuse files of one plan under the record of another."""
        for name in self.world.plans:
            files = self.world.wanted[name].files
            if files[RECORD] != bytes(record.data):
                continue
            for file, data in files.items():
                found = self.world.disk.find(f"{self.out}/{file}")
                if file != RECORD and found is not None and bytes(found.data) != data:
                    raise self._break(f"{process} writes {RECORD}, and {file} is of another plan")
                if found is None and file != RECORD and not self._is_elsewhere(file):
                    raise self._break(f"{process} writes {RECORD}, and {file} is not there")

    def _judge_done(self, process: Process, node: Node) -> None:
        if node.durable != bytes(node.data):
            raise self._break(f"{process} records a task before that record is on the disk")
        entry = json.loads(bytes(node.data))
        for file, sha256 in entry["files"].items():
            if entry.get("is_gone"):
                if sha256 not in self.world.hub.ever:
                    raise self._break(f"{process} records {file} as sent, and the Hub lacks it")
                continue
            found = self.world.disk.find(f"{self.out}/{file}", is_durable=True)
            # Who slept while another plan took its place tells of what nobody will ask for.
            is_outlived = not self.is_one_plan and process.last_frozen > 0
            is_there = found and hashlib.sha256(found.durable).hexdigest() == sha256
            if not (is_there or is_outlived):
                raise self._break(f"{process} records {file} as done before it is on the disk")

    def removed(self, process: Process, path: str, node: Node, target: str = "") -> None:
        """Judge a name that goes, or that is exchanged for a target."""
        self._refuse_elsewhere(process, path, node)
        file = self._below_output(path)
        if file is None or not file.startswith(f"{STATE}/"):
            is_kept = self.is_one_plan and not self._has_left(bytes(node.data))
            is_put_aside = target.startswith(f"{self.out}/{STATE}/tmp/")
            if (target and not is_put_aside) or (is_kept and file not in (RECORD, REPORT)):
                raise self._break(f"{process} takes {path} away")
            if is_put_aside:
                node.maker = process
            self._final.pop(node.inode, None)
            return
        kind, name = file.split("/")[1], file.rpartition("/")[2]
        if kind == "claims":
            process.late.pop(name, None)
        elif kind == "done":
            for each in self.world.processes:
                each.late.pop(name.removesuffix(".json"), None)
        # Who slept between the look and the call has taken the claim that came meanwhile: no disk
        # does both at once. Two then make the same bytes.
        if kind == "tmp":  # whose claim was looked for
            path = f"{self.out}/{STATE}/claims/worker-{file.split('/')[2]}"
        has_slept = process.opened.get(path, process.started) < process.last_frozen
        maker = node.maker if isinstance(node.maker, Process) else None
        is_fenced = kind == "tmp" and maker is not None and maker.is_fenced
        is_judged = kind in ("claims", "tmp") and not (has_slept or is_fenced)
        if is_judged and self._is_lively(maker, process):
            raise self._break(f"{process} takes {file} from {maker}, which is at work")
        if kind == "claims" and name.startswith("worker-") and maker not in (None, process):
            maker.is_fenced = True
        if kind == "claims":
            self.world.claim_gone(node.maker)

    def _is_lively(self, owner: object, other: Process) -> bool:
        """Tell whether a process is at work, and nothing kept it from saying so."""
        if not isinstance(owner, Process) or owner is other or owner.is_over:
            return False
        awake = self.world.scheduler.now - owner.last_missed
        return self.world.is_calm(owner, other) and awake > LEASE_SECONDS

    def touched(self, process: Process, path: str, node: Node) -> None:
        if path.startswith(SOURCE) or node.maker == USER:
            raise self._break(f"{process} sets the time of {path}")

    def looked(self, process: Process, path: str, node: Node) -> None:
        """Judge how long a process waits for a claim of a dead one."""
        owner = node.maker
        if not isinstance(owner, Process) or not owner.is_over:
            return
        if f"/{STATE}/claims/" not in path:
            return
        # Whoever could not remove its own claim or guard leaves one more to wait for.
        claims = self.world.disk.find(f"{self.out}/{STATE}/claims")
        makers = [each.maker for each in ((claims and claims.entries) or {}).values()]
        if not self.world.is_calm(process, *(each for each in makers if isinstance(each, Process))):
            return
        awake = self.world.scheduler.now - process.frozen_seconds
        waited = awake - process.looks.setdefault(node.inode, awake)
        # Of several machines, one that is gone may guard it: it was just about to take it away.
        is_near = self._is_near(owner, process) and len(self.world.machines) == 1
        # Its maker may have been killed while it wrote down who it is.
        most = AT_ONCE if is_near and node.data.endswith(b"}") else LONGEST_WAIT
        if waited > most * 1.1:
            raise self._break(f"{process} waits {waited:.0f} s for {path} of the dead {owner}")

    @staticmethod
    def _is_near(owner: object, process: Process) -> bool:
        """Tell whether a process sees that another one, dead or alive, is of its machine."""
        return (
            isinstance(owner, Process)
            and owner.machine is process.machine
            and owner.boot == process.boot
        )

    def check_durable(self, who: str, but: str = "") -> None:
        """Refuse an artifact that a power cut could still take away."""
        for file, wanted in self.wanted.items():
            if file == but or (file == REPORT and not self.is_one_plan):
                continue
            node = self.world.disk.find(f"{self.out}/{file}", is_durable=True)
            if node is None:
                if self.is_one_plan and not self._is_elsewhere(file):
                    raise self._break(f"{who}, and {file} is not on the disk")
            elif node.durable not in wanted:
                raise self._break(f"{who}, and {file} holds other bytes")

    def _is_elsewhere(self, file: str) -> bool:
        """Tell whether a file may have left the disk for the Hub."""
        return any(map(self._has_left, self.wanted[file]))

    def _has_left(self, data: bytes) -> bool:
        return not self.world.keeps and self.world.hub.has_had(data)

    def committed(
        self, process: Process, before: dict[str, bytes], after: dict[str, bytes]
    ) -> None:
        """Judge a commit: the whole artifact, and nothing of anybody else's."""
        for file, wanted in self.wanted.items():
            found = after.get(file)
            if found not in wanted:
                raise self._break(f"{process} commits without {file}, or with other bytes")
        for file, data in before.items():
            if file not in self.wanted and file != CARD and after.get(file) != data:
                raise self._break(f"{process} commits a change of {file}, which is not its own")

    def check_left(self, harmed: set[str]) -> None:
        """Judge what a power cut left.

        harmed  files that somebody has damaged
        """
        root = self.world.disk.find(self.out)
        files = self.world.disk.files(root) if root else {}
        for file, node in files.items():
            if node.maker == USER or file in harmed:
                continue
            if not file.startswith(f"{STATE}/"):
                if bytes(node.data) not in self.wanted.get(file, ()):
                    raise self._break(
                        f"the power cut leaves {file} with bytes that are not its own"
                    )
            elif file.startswith(f"{STATE}/done/"):
                for each, sha256 in json.loads(bytes(node.data))["files"].items():
                    found = files.get(each)
                    data = bytes(found.data) if found else b""
                    if (
                        self.is_one_plan
                        and each not in harmed
                        and hashlib.sha256(data).hexdigest() != sha256
                        and (self.world.keeps or sha256 not in self.world.hub.ever)
                    ):
                        raise self._break(f"the power cut takes {each}, which was finished")
        lost = [
            file
            for file in self.wanted
            if file not in files and file != REPORT and not self._is_elsewhere(file)
        ]
        if RECORD in files and lost and self.is_one_plan:
            raise self._break(f"the power cut leaves {RECORD} and takes {lost[0]}")

    def check_end(self, wanted: dict[str, bytes], last: Process) -> None:
        """Judge the output of the last run: exactly the artifact, and nothing left over."""
        root = self.world.disk.find(self.out)
        files = self.world.disk.files(root) if root else {}
        found = {
            file: bytes(node.data)
            for file, node in files.items()
            if not file.startswith(f"{STATE}/") and node.maker != USER
        }
        if found != wanted:
            names = [file for file in found.keys() | wanted if found.get(file) != wanted.get(file)]
            raise self._break(f"the last run leaves other files: {sorted(names)}")
        # Of the dead of other machines nobody knows within a minute that they are.
        for folder in ("claims", "tmp"):
            node = self.world.disk.find(f"{self.out}/{STATE}/{folder}")
            entries = (node and node.entries) or {}
            # Whose guard is of another machine, or says nothing, as its maker was killed while it
            # wrote, waits a minute too.
            if any(
                not each.data.endswith(b"}")
                or (name.startswith(".") and not self._is_near(each.maker, last))
                for name, each in entries.items()
                if not each.is_folder
            ):
                continue
            for name, left in entries.items():
                if self._is_near(left.maker, last) and (left.is_folder or left.data.endswith(b"}")):
                    raise self._break(f"the last run leaves {folder}/{name}")
