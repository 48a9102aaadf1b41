import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from cache_kinds import filled

import kvfast
from kvfast.core import numa

LARGE = 1 << 16  # tokens of 512 bytes


def maps():
    """The policy of each mapping of this process, by its first address."""
    try:
        with open("/proc/self/numa_maps") as file:
            return {int(line.split()[0], 16): line.split()[1] for line in file}
    except OSError:
        pytest.skip("this system does not tell where pages lie")


def policy_of(cache):
    """The policy of the pages of a cache of one layer."""
    address = cache.k(0).__array_interface__["data"][0]
    return maps()[max(begin for begin in maps() if begin <= address)]


def written(tokens=LARGE):
    cache = kvfast.KVCache(1, 1, 64, max_seq_len=tokens, dtype="float32")
    rows = np.ones((1, 1, 64), np.float32)
    filled(cache, rows, rows)
    return cache


@pytest.fixture
def four_nodes(tmp_path, monkeypatch):
    """A machine that says that it has four nodes, the CPUs of this process in the first and the third. Linux takes those that exist."""
    cpus = sorted(os.sched_getaffinity(0))
    (tmp_path / "has_memory").write_text("0-2,3\n")
    for node, own in enumerate((cpus[:1], [1000], cpus, [])):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(",".join(map(str, own)) + "\n")
    monkeypatch.setattr(numa, "_FOLDER", str(tmp_path))
    yield
    numa.set_numa_policy(None)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
class TestFourNodes:
    def test_pages_of_large_caches_take_turns(self, four_nodes):
        state = numa.numa_state()
        if "refuses" in state[1]:
            pytest.skip(state[1])
        assert state == ("interleave", "interleaved over the nodes 0, 2")
        assert policy_of(written()).startswith("interleave")
        assert policy_of(written(64)) == "default"

    def test_local(self, four_nodes):
        numa.set_numa_policy("local")
        assert numa.numa_state() == ("local", "each page where it is written first")
        assert policy_of(written()) == "default"

    def test_a_process_on_the_cpus_of_one_node(self, four_nodes, tmp_path):
        (tmp_path / "node0" / "cpulist").write_text("1001\n")
        assert numa.numa_state() == ("interleave", "one node")
        assert policy_of(written()) == "default"

    @pytest.mark.parametrize("text", ["", "0-", "a\n"])
    def test_what_is_no_list(self, four_nodes, tmp_path, text):
        (tmp_path / "has_memory").write_text(text)
        assert numa.numa_state()[1] == "one node"
        assert policy_of(written()) == "default"

    def test_a_policy_of_the_process(self, four_nodes):
        """As numactl --membind=0 sets it."""
        number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())  # of set_mempolicy
        if number is None:
            pytest.skip("the number of the system call is not known here")
        code = (
            "import ctypes, sys\n"
            "from kvfast.core import numa\n"
            f"numa._FOLDER = {numa._FOLDER!r}\n"
            "BIND, node = 2, ctypes.c_ulong(1)\n"
            f"if ctypes.CDLL(None).syscall({number}, BIND, ctypes.byref(node), 65): sys.exit('refused')\n"
            "print(numa.numa_state()[1])"
        )
        got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if got.stderr == "refused\n":
            pytest.skip("this system refuses a policy")
        assert got.stdout == "as the process was started, with a policy of its own\n", got.stderr


def test_one_node_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(numa, "_FOLDER", str(tmp_path / "none"))
    assert kvfast.config()["numa"] == {"policy": "interleave", "memory": "one node"}
    assert policy_of(written()) == "default"


@pytest.mark.parametrize("policy", ["", "bind", 1, b"local", ["local"]])
def test_other_policies_are_refused(policy):
    with pytest.raises(ValueError, match="policy must be 'interleave' or 'local', got"):
        numa.set_numa_policy(policy)


def test_the_environment():
    code = (
        "import kvfast\n"
        "for policy in (None, 'interleave', None):\n"
        "    kvfast.core.numa.set_numa_policy(policy)\n"
        "    print(kvfast.config()['numa']['policy'])"
    )
    run = [sys.executable, "-c", code]
    got = subprocess.run(run, env={**os.environ, "KVFAST_NUMA_POLICY": "local"}, capture_output=True, text=True, check=True)
    assert got.stdout == "local\ninterleave\nlocal\n"
    got = subprocess.run(run, env={**os.environ, "KVFAST_NUMA_POLICY": "near"}, capture_output=True, text=True, check=False)
    assert "KVFAST_NUMA_POLICY must be 'interleave' or 'local', got 'near'" in got.stderr
