"""The command `plan` of `python -m kvfast`."""

import json

from kvfast import plan


def run_plan(args):
    """Print what a model's cache will take."""
    dtype = None if args.dtype is None else [name.strip() for name in args.dtype.split(",")]
    found = plan(
        args.model,
        context=args.context,
        batch=args.batch,
        dtype=dtype,
        memory=args.memory,
        bandwidth=args.bandwidth,
        weight_bytes=args.weights,
        weight_bytes_read=args.weights_read,
        engine=args.engine,
        checkpoints=args.checkpoints,
        drafts=int(args.drafts) if args.drafts and args.drafts.isdecimal() else args.drafts,
    )
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(found)
