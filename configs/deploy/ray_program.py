"""Answers a data set of Parquet files on a Ray cluster: an engine for each GPU, in actors of Ray Data.

    python configs/deploy/ray_program.py --input /data/questions --output /data/answers --model Qwen/Qwen3-8B

Every node needs this package and the model. Runs under KubeRay (kubernetes/ray-job.yaml) and Slurm (slurm/ray.sbatch).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray

from toka_async import LLM, SamplingParams

BATCH = 512  # rows of a call; each actor works on two, so its engine is never without requests
ROWS = 2048  # of a block: what is repeated when an actor is lost


class Engine:
    """An engine in an actor. It ends with the actor's process, even if that is killed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.llm = LLM(options.model, **dict(each.split("=", 1) for each in options.set))
        self.params = SamplingParams(n=options.n, temperature=options.temperature, max_tokens=options.max_tokens)
        self.column = options.column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate([str(text) for text in batch[self.column]], self.params, use_tqdm=False)
        texts = np.empty(len(outputs), dtype=object)
        texts[:] = [[sample.text for sample in output.outputs] for output in outputs]
        return batch | {"generated_text": texts}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True, help="Parquet files, as Ray Data reads them: a folder, s3://, gs://")
    parser.add_argument("--output", required=True, help="folder for the answers")
    parser.add_argument("--model", required=True)
    parser.add_argument("--column", default="prompt")
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--engines", type=int, help="default: one for each GPU of the cluster")
    parser.add_argument("--gpus", type=float, default=1, help="of an engine; 0: it runs on CPUs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of toka_async.LLM"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    ray.init()  # the cluster of the job
    engines = options.engines or int(ray.cluster_resources()["GPU"] / options.gpus)
    rows = ray.data.read_parquet(options.input).repartition(target_num_rows_per_block=ROWS)
    answered = rows.map_batches(
        Engine,
        fn_constructor_args=(options,),
        batch_size=BATCH,
        num_gpus=options.gpus,
        compute=ray.data.ActorPoolStrategy(size=engines),
        max_concurrency=2,
    )
    answered.write_parquet(options.output)


if __name__ == "__main__":
    main()
