"""Planning time and memory of large models, each in a process of its own: `python benchmarks/planning.py`.

Built without values, planned for data=2,model=4. The peak is the process's, imports included; these are printed too.
keras_hub imports TensorFlow wherever it finds it; here it finds none, unless `--with-tensorflow` is said.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

HIDING = Path(__file__).parents[1] / "ci" / "without_tensorflow"
MODELS = {
    "BERT base": ("BertBackbone", (30522, 12, 12, 12, 768, 3072)),
    "GPT-2 XL": ("GPT2Backbone", (50257, 48, 25, 25, 1600, 6400)),
    "Llama 7B": ("LlamaBackbone", (32000, 32, 32, 32, 4096, 11008)),
    "Llama 405B": ("LlamaBackbone", (128256, 126, 128, 8, 16384, 53248)),
}


def _peak() -> float:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str) -> None:
    import keras
    import keras_hub

    import unidist

    kind, (vocabulary, layers, heads, groups, hidden, intermediate) = MODELS[name]
    named = {"vocabulary_size": vocabulary, "num_layers": layers, "hidden_dim": hidden}
    named |= {"intermediate_dim": intermediate}
    grouped = kind == "LlamaBackbone"
    named |= {"num_query_heads": heads, "num_key_value_heads": groups} if grouped else {"num_heads": heads}
    imports, began = _peak(), time.perf_counter()
    with keras.StatelessScope(initialize_variables=False):
        model = getattr(keras_hub.models, kind)(**named)
    built, cpu = time.perf_counter(), time.process_time()
    plan = unidist.plan(model, unidist.Mesh({"data": 2, "model": 4}))
    done, cpu = time.perf_counter(), time.process_time() - cpu
    print(
        f"{name}: built in {built - began:.1f} s, planned in {done - built:.1f} s, {cpu:.1f} s of CPU; "
        f"peak {_peak():.0f} MB, {imports:.0f} MB of it imports; "
        f"{plan.sharded_fraction:.1%} sharded, {len(plan.pairs)} pairs, {plan.predicted.count()} collectives a step"
    )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in MODELS:
        measure(sys.argv[1])
    else:
        env = {"KERAS_BACKEND": "torch", **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if "--with-tensorflow" not in sys.argv:
            env["PYTHONPATH"] = os.pathsep.join([str(HIDING), *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in MODELS:
            subprocess.run([sys.executable, __file__, name], env=env, check=True)
