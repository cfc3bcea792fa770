"""`kubectl gym` on a real cluster, as its users run it: through kubectl, with the role that its page gives them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gym_kit import tools
from gym_kit.demo.site import Site, site
from gym_kit.demo.stage import SECRET, Grounds
from gym_kit.documented import plugin_role
from gym_kit.run import search_path

pytestmark = pytest.mark.timeout(300)
ROLLOUTS = 2
START_SECONDS = 120.0
REPLACE_SECONDS = 60.0
VERB_SECONDS = 120.0
QUICK = {"prepareTimeout": "5s", "commitTimeout": "5s"}
SERVERS = {"env", "policy", "agent", "counter", "collection"}
IN_SERVICE = "INFO gym_servers: in service, attempt"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class User:
    """Somebody with a kubeconfig of their own, where kubectl finds the plugin on PATH."""

    kubeconfig: Path

    def gym(self, *words: str, **environment: str) -> Done:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "AWS_", "GYM_"))}
        path = f"{Path(sys.executable).parent}:{search_path()}"
        done = subprocess.run(
            [str(tools.kubectl()), "gym", *words],
            env={**kept, "PATH": path, "KUBECONFIG": str(self.kubeconfig), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERB_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def place(whole_cluster: Grounds, tmp_path: Path) -> Iterator[Site]:
    with site(whole_cluster, tmp_path, rollouts=ROLLOUTS) as place:
        yield place


def user_of(place: Site, folder: Path) -> User:
    """A service account that may do in this namespace what the page says, and nothing else."""
    role, namespace = plugin_role(), place.kube.namespace
    (secrets,) = [rule for rule in role["rules"] if rule["resources"] == ["secrets"]]
    secrets["resourceNames"] = [SECRET]
    name = role["metadata"]["name"]
    manifest = folder / "role.yaml"
    manifest.write_text(yaml.safe_dump(role))
    place.kubectl("apply", "--filename", str(manifest))
    place.kubectl("create", "serviceaccount", name)
    place.kubectl("create", "rolebinding", name, f"--role={name}", f"--serviceaccount={namespace}:{name}")
    config = yaml.safe_load(place.grounds.cluster.kubeconfig.read_text())
    (context,) = [one["context"] for one in config["contexts"] if one["name"] == config["current-context"]]
    context |= {"user": name, "namespace": namespace}
    config["users"] = [{"name": name, "user": {"token": place.kubectl("create", "token", name).strip()}}]
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    return User(kubeconfig)


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page, each a list of rows without its headings; a row is its cells."""
    lines = [[re.split(r" {3,}", line) for line in part.splitlines()] for part in text.strip().split("\n\n")]
    return [rows[1:] for rows in lines]


def one_line(done: Done, code: int) -> str:
    """What went wrong, as the user is told."""
    assert (done.code, done.err.count("\n"), done.err[:13]) == (code, 1, "kubectl gym: "), done
    return done.err


def test_every_verb_does_what_its_page_says(place: Site, tmp_path: Path) -> None:
    place.install("team", place.values("team", checkpoints=QUICK))
    user = user_of(place, tmp_path)
    place.wait("rollouts are under way", lambda: place.at_work("team"), START_SECONDS)

    taken = user.gym("checkpoint", "team", "--name=by-hand", "--label=step=7", "--wait")
    assert taken.code == 0, taken
    assert re.fullmatch(
        "gymcheckpoint.gymops.dev/by-hand created\n"
        rf"checkpoint by-hand succeeded: {ROLLOUTS} rollouts in [\d.]+ KiB, paused for [\d.]+s" + "\n",
        taken.out,
    ), taken
    shows_the_stack(user)
    with ThreadPoolExecutor(1) as beside:
        drilled = beside.submit(user.gym, "drill", "team")  # it takes the longest, and disturbs nobody
        reads_the_checkpoint(place, user)
        is_refused(place, user)
        is_held_up(place, user)
        drill = drilled.result()
    assert (drill.code, drill.out) == (
        0,
        f"checkpoint by-hand can be restored: rollouts that would continue: {ROLLOUTS}\n",
    ), drill
    first, *_, last = drill.err.splitlines()
    assert first == "checkpoint by-hand is restored into GymStack team-drill, which is deleted then"
    assert last == "GymStack team-drill is deleted; its pods end"
    assert (set(place.kube.all_of("GymStack")), place.pods("team-drill")) == ({"team"}, {})
    folders = {key.partition("/")[0] for key in place.store(f"{place.kube.namespace}/checkpoints").list("")}
    assert folders == {place.kube.stack("team")["metadata"]["uid"]}
    assert place.cell("team")["attempt"] == 0, "the run has not noticed"

    back = user.gym("restore", "team", "--from=step=7", "--name=back", "--wait")
    assert (back.code, back.out) == (
        0,
        "gymrestore.gymops.dev/back created\n"
        f"restore back succeeded: rollouts that continue from by-hand: {ROLLOUTS}; cell 0 under attempt 1\n",
    ), back
    assert "back: Restoring: " in back.err
    place.wait("it goes on from there", lambda: place.at_work("team", 1), REPLACE_SECONDS)
    assert user.gym("logs", "team", "--server=agent") == Done(0, f"{IN_SERVICE} 1\n", "")


def shows_the_stack(user: User) -> None:
    status = user.gym("status", "team")
    stack, cells = tables(status.out)[:2]
    assert (status.code, stack[0][:6]) == (0, ["team", "Running", "0", "1/1", f"0/{ROLLOUTS}", "by-hand"]), status
    assert (cells[0][:3], cells[0][4:6]) == (["0", "Running", "0"], [f"0/{ROLLOUTS}", "by-hand"]), status

    listed = user.gym("checkpoints", "team")
    ((row,),) = tables(listed.out)
    assert (listed.code, [*row[:2], row[3], *row[6:]]) == (
        0,
        ["by-hand", "Succeeded", str(ROLLOUTS), "step=7", "-"],
    ), listed

    logs = user.gym("logs", "team")
    assert (logs.code, set(logs.out.splitlines())) == (
        0,
        {f"team-{server}-0: {IN_SERVICE} 0" for server in SERVERS},
    ), logs


def reads_the_checkpoint(place: Site, user: User) -> None:
    """By its name and by its place, as it is in the bucket."""
    told = place.kube.checkpoint("by-hand")["status"]
    uri, digest = told["uri"], told["cells"][0]["digest"]
    keys = place.grounds.bucket.credentials
    with_keys = {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
    bucket = (f"--endpoint={place.grounds.bucket.endpoint}", "--addressing-style=path")

    inspected = user.gym("inspect", "by-hand", "--output=json")
    (part,) = json.loads(inspected.out)["parts"]
    assert (inspected.code, part["uri"], part["digest"], part["labels"]) == (0, uri, digest, {"step": "7"})
    assert {one["name"] for one in part["participants"]} == SERVERS
    assert sorted(one["rollout"] for one in part["episodes"]) == [f"{n}-0" for n in range(ROLLOUTS)]
    by_place = user.gym("inspect", uri, "--output=json", *bucket, **with_keys)
    assert (by_place.code, json.loads(by_place.out)["parts"]) == (0, [part]), by_place

    verified = user.gym("verify", "by-hand")
    (where,), results = tables(verified.out)
    assert (verified.code, where) == (0, [uri, digest]), verified
    assert {(row[1], row[4]) for row in results} == {(server, "good") for server in SERVERS}
    other = user.gym("verify", uri, f"--digest={'0' * 64}", *bucket, **with_keys)
    assert "checkpoint.json" in one_line(other, 1)


def is_refused(place: Site, user: User) -> None:
    """What nothing can come of, and what the role does not hold."""
    namespace = place.kube.namespace
    assert f"no GymStack nobody in namespace {namespace}: there are team" in one_line(user.gym("status", "nobody"), 2)
    assert "GymCheckpoint by-hand exists already" in one_line(user.gym("checkpoint", "team", "--name=by-hand"), 2)
    assert "that succeeded has step: 8" in one_line(user.gym("restore", "team", "--from=step=8"), 2)
    elsewhere = user.gym("status", "team", "--namespace=default")
    assert "you may not get gymstacks.gymops.dev in namespace default" in one_line(elsewhere, 3)


def is_held_up(place: Site, user: User) -> None:
    """A checkpoint that rollouts do not let be taken fails, and says which."""
    with place.in_tool_calls():
        failed = user.gym("checkpoint", "team", "--name=held-up", "--wait")
    assert (failed.code, failed.out) == (1, "gymcheckpoint.gymops.dev/held-up created\n"), failed
    *_, why = failed.err.splitlines()
    assert why.startswith("kubectl gym: checkpoint held-up failed: PrepareTimeout: "), failed
    blockers = re.findall(r"^(\S+) {3,}0 {3,}\w+ {3,}", failed.err, re.MULTILINE)
    assert set(blockers) == {f"{n}-0" for n in range(ROLLOUTS)}, failed
    status = user.gym("status", "team")
    (told,) = [rows[0] for rows in tables(status.out) if rows and rows[0][0] == "held-up"]
    assert (status.code, told[1:3]) == (0, ["Failed", "PrepareTimeout"]), status
