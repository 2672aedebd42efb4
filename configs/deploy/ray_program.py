"""Answers a data set of Parquet files on a Ray cluster, with an engine for each GPU.

    python configs/deploy/ray_program.py --input /data/questions --output /data/answers --model Qwen/Qwen3-8B

Every node needs this package and the model. The same command again computes only what is missing. Runs under KubeRay
(kubernetes/ray-job.yaml) and Slurm (slurm/ray.sbatch).
"""

from __future__ import annotations

import argparse

import ray

from toka_async.ray.data import generate


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True, help="Parquet files, as Ray Data reads them: a folder, s3://, gs://")
    parser.add_argument("--output", required=True, help="folder for the answers")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--id-column", default="id", help="unique numbers or texts")
    parser.add_argument("-n", type=int, default=1, help="samples of a row")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--tp", type=int, default=1, help="GPUs of an engine")
    parser.add_argument("--engines", type=int, help="at most; default: as many as the cluster has GPUs for")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the engines' configuration")
    return parser.parse_args()


def main() -> None:
    options = parse()
    ray.init()  # the cluster of the job
    engines = options.engines or int(ray.cluster_resources()["GPU"]) // options.tp
    generate(
        ray.data.read_parquet(options.input),
        model=options.model,
        prompt_column=options.prompt_column,
        id_column=options.id_column,
        output=options.output,
        samples=options.n,
        sampling={"temperature": options.temperature, "max_tokens": options.max_tokens},
        replicas=(1, engines),
        tp=options.tp,
        **dict(each.split("=", 1) for each in options.set),
    )


if __name__ == "__main__":
    main()
