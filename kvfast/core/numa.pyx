# cython: language_level=3
"""Where the pages of caches lie on a machine whose memory is in several nodes (NUMA).

The system puts a page into the node of the thread that writes it first. A prompt is often written by one thread, so a cache would lie
in one node, and all threads that read it would wait for that node's memory. So the pages of a large cache take turns between the nodes.
"""
import os

from libc.stdint cimport uint64_t

from kvfast.core.text import shown

cdef extern from *:
    """
    #if defined(__linux__)
    #include <errno.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    /* Of linux/mempolicy.h, which is not installed everywhere. */
    enum { KV_POLICY_DEFAULT = 0, KV_POLICY_INTERLEAVE = 3 };
    /* 0, or what errno says. */
    static int kv_interleave(char *data, size_t bytes, const uint64_t *nodes, unsigned long bits)
    {
        return syscall(SYS_mbind, data, bytes, KV_POLICY_INTERLEAVE, nodes, bits + 1, 0) == 0 ? 0 : errno;
    }
    static int kv_has_own_policy(void)
    {
        int policy = KV_POLICY_DEFAULT;
        return syscall(SYS_get_mempolicy, &policy, NULL, 0, NULL, 0) == 0 && policy != KV_POLICY_DEFAULT;
    }
    #else
    static int kv_interleave(char *data, size_t bytes, const uint64_t *nodes, unsigned long bits)
    {
        (void)data, (void)bytes, (void)nodes, (void)bits;
        return 0;
    }
    static int kv_has_own_policy(void) { return 0; }
    #endif
    """
    int kv_interleave(char *data, size_t bytes, const uint64_t *nodes, unsigned long bits) nogil
    int kv_has_own_policy() nogil

cdef enum:
    NODE_WORDS = 16            # bits for all nodes that a Linux kernel can be built for
    MOST_NODES = 64 * NODE_WORDS

ctypedef uint64_t[NODE_WORDS] kv_nodes

_POLICIES = "interleave", "local"
_VARIABLE = "KVFAST_NUMA_POLICY"
_FOLDER = "/sys/devices/system/node"


def _check(policy, origin):
    if policy not in _POLICIES:
        raise ValueError(f"{origin} must be 'interleave' or 'local', got {shown(policy)}")
    return policy


def set_numa_policy(policy):
    """Set where the pages of caches that are made from now on lie, on a machine with several memory nodes, for the whole process.

    It holds on Linux, for caches of 8 MiB and more. Memory that others allocated, and mapped files, stay as they are.

    Parameters
    ----------
    policy : str or None
        ``"interleave"``: pages take turns between the nodes on whose CPUs the process may run. Nothing changes if that is one node, or
        if the process was started with a policy of its own (``numactl``). ``"local"``: each page lies where it is written first.
        None goes back to ``KVFAST_NUMA_POLICY``, else to ``"interleave"``.

    Raises
    ------
    ValueError

    Examples
    --------
    >>> from kvfast.core.numa import set_numa_policy
    >>> set_numa_policy("local")
    >>> set_numa_policy(None)
    """
    global _policy
    _policy = _wished() if policy is None else _check(policy, "policy")


def _wished():
    return _check(os.environ[_VARIABLE], _VARIABLE) if os.environ.get(_VARIABLE) else "interleave"


def numa_state():
    """The policy, and what it comes to now, in words."""
    from mmap import mmap  # `import kvfast` does not load it

    cdef kv_nodes nodes
    cdef int error
    cdef unsigned char[::1] page
    used = _nodes()
    if len(used) < 2:
        return _policy, "one node"
    if _policy == "local":
        return _policy, "each page where it is written first"
    if kv_has_own_policy():
        return _policy, "as the process was started, with a policy of its own"
    _fill(nodes, used)
    page = mmap(-1, 1)
    error = kv_interleave(<char *>&page[0], page.shape[0], nodes, MOST_NODES)
    if error:
        return _policy, f"each page where it is written first, as the system refuses a policy ({os.strerror(error)})"
    return _policy, f"interleaved over the nodes {', '.join(map(str, used))}"


cdef int spread(char *data, size_t nbytes) except -1:
    """Let the pages of new memory, which begins a page, take turns between the nodes, if the policy says so. A system that refuses
    it leaves them where they are written first."""
    cdef kv_nodes nodes
    if _policy != "interleave":
        return 0
    used = _nodes()
    if len(used) > 1 and not kv_has_own_policy():
        _fill(nodes, used)
        kv_interleave(data, nbytes, nodes, MOST_NODES)
    return 0


cdef int _fill(kv_nodes nodes, object used) except -1:
    cdef int i
    for i in range(NODE_WORDS):
        nodes[i] = 0
    for i in used:
        nodes[i // 64] |= <uint64_t>1 << i % 64
    return 0


def _nodes():
    """The nodes that have memory, and CPUs on which this thread may run; empty where the system does not tell."""
    try:
        with_memory = _numbers("has_memory")
        if len(with_memory) < 2:
            return with_memory
        cpus = os.sched_getaffinity(0)
        return [node for node in with_memory if node < MOST_NODES and not cpus.isdisjoint(_numbers(f"node{node}/cpulist"))]
    except (OSError, ValueError, AttributeError):
        return []


def _numbers(name):
    """The numbers of a list such as 0-3,8."""
    with open(os.path.join(_FOLDER, name)) as file:
        parts = [part.split("-") for part in file.read().strip().split(",") if part]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


_policy = _wished()  # or what set_numa_policy has set
