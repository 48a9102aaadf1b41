"""How vLLM gets kvfast's backends and its connector."""

import contextlib
import logging
import os

from kvfast.engines.vllm import versions

SWITCH = "KVFAST_VLLM"
BACKENDS = {  # of each part, by the name of the one that it replaces
    versions.ATTENTION: {"CPU_ATTN": "kvfast.engines.vllm.backend.KVFastBackend"},
    versions.LATENT_ROWS: {
        "CPU_MLA": "kvfast.engines.vllm.mla.KVFastMLABackend",
        "AMX_MLA": "kvfast.engines.vllm.mla.KVFastMLABackend",
    },
}
CONNECTOR = "KVFastConnector"


def register():
    """Let vLLM use kvfast for attention on CPUs, and find `KVFastConnector`; each of its processes calls this.

    Nothing happens, and vLLM uses its own backend, with ``KVFAST_VLLM=0``. On a version of vLLM that was not tested, kvfast looks for
    all that it uses of vLLM. If something is missing, it switches itself off, and a warning says what is missing. If all is there, the
    first layer of a model tries one attention call. Latent rows are left to vLLM then, as no such call is tried for them.
    """
    if not _is_on():
        return
    version, parts = versions.installed_version(), list(versions.USED)
    versions.Untested.needs_trial = not versions.is_tested(version)
    versions.Untested.is_off = False
    if versions.Untested.needs_trial:
        parts = [part for part in (versions.ATTENTION, versions.PROMPTS) if _has_all(part, version)]
    if versions.ATTENTION not in parts:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvfast.engines.vllm.by_layer import asked
    from kvfast.engines.vllm.formats import has_tail, register_names

    has_tail()
    asked()  # so that an error of a setting comes before a model is loaded
    register_names()
    _replace_in_platform("check_and_update_config", _keep_images_whole)
    if versions.LATENT_ROWS in parts:
        _replace_in_platform("get_attn_backend_cls", _take_latents)
    for part in parts:
        for name, backend in BACKENDS.get(part, {}).items():
            register_backend(AttentionBackendEnum[name], backend)
    if versions.PROMPTS in parts:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        with contextlib.suppress(ValueError):  # vLLM calls this more than once in a process
            KVConnectorFactory.register_connector(CONNECTOR, "kvfast.engines.vllm.connector", CONNECTOR)


def _is_on():
    return os.environ.get(SWITCH, "1").strip().lower() not in ("0", "off", "false", "no")


def _replace_in_platform(name, new):
    """Replace a method of vLLM's platform by what `new` makes of it. vLLM calls `register` more than once in a process."""
    from vllm.platforms import current_platform

    original = getattr(current_platform, name)
    if getattr(original, "__module__", None) != __name__:
        setattr(type(current_platform), name, staticmethod(new(original)))


def _keep_images_whole(original):
    """Do as the platform of CUDA: where the tokens of an image see each other, no step ends inside of one."""

    def check_and_update_config(vllm_config):
        original(vllm_config)
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        if _is_on() and model is not None and model.is_mm_prefix_lm and scheduler.is_multimodal_model:
            scheduler.disable_chunked_mm_input = True

    return check_and_update_config


def _take_latents(original):
    """Take the formats of kvfast for latent rows. From 0.33 on, vLLM refuses all but floats before it asks a backend."""
    from kvfast.engines.vllm.formats import LATENT_NAMES

    def get_attn_backend_cls(selected_backend, attn_selector_config, *args, **options):
        if _is_on() and attn_selector_config.use_mla:
            attn_selector_config = type(attn_selector_config)(*("auto" if one in LATENT_NAMES else one for one in attn_selector_config))
        return original(selected_backend, attn_selector_config, *args, **options)

    return get_attn_backend_cls


def _has_all(part, version):
    """Whether a version that was not tested has all that a part uses. If not, this says so."""
    lacking = versions.missing(part)
    if lacking is not None:
        logging.getLogger("vllm.kvfast").warning(
            "kvfast switched itself off (%s): %s; it was tested with vLLM %s, and %s is installed",
            part,
            lacking,
            versions.tested_text(),
            version,
        )
    return lacking is None
