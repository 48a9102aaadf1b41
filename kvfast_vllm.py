"""The entry point of vLLM's plugins. vLLM goes on without a plugin that it cannot import, and its own backend then takes formats that
it does not have. So kvfast is imported when vLLM calls `register`, whose errors end vLLM."""


def register():
    """As `kvfast.vllm.register`."""
    import kvfast.vllm

    kvfast.vllm.register()
