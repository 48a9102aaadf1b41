"""Arguments that several commands share: the format of a cache, the kind of a model, and the number of threads."""

import os
import re
import sys
from dataclasses import replace

import kvfast


def storage_of(dtype, args):
    """The dtype arguments of a cache."""
    if args.calibration:
        if args.k_dtype or args.v_dtype:
            raise ValueError("--calibration is for a format, not for --k-dtype and --v-dtype")
        return {"dtype": replace(kvfast.KVFormat.of(dtype), calibration=kvfast.Calibration.load(args.calibration))}
    storage = {"dtype": dtype, "k_dtype": args.k_dtype, "v_dtype": args.v_dtype}
    kvfast.KVCache(1, 1, 1, max_seq_len=1, **storage)  # refuses an unknown name before any model is fetched
    return storage


def set_threads(count):
    """Limit kvfast's threads and, through threadpoolctl, those of the BLAS under NumPy."""
    if count is None:
        return
    kvfast.set_num_threads(count)
    try:
        import threadpoolctl
    except ImportError:
        print("note: without threadpoolctl, --threads does not limit NumPy's matrix products", file=sys.stderr)
    else:
        threadpoolctl.threadpool_limits(count, user_api="blas")


def is_hugging_face(model):
    """Whether a model is a folder, or a name like owner/name."""
    if os.path.isdir(model):
        if not os.path.exists(os.path.join(model, "config.json")):
            raise ValueError(f"the folder {model} has no config.json: give a GGUF file, or the folder of a model of Hugging Face")
        return True
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", model)) and not model.endswith(".gguf") and not os.path.exists(model)
