from tests.drivers.runners import fake_graphs, model_dir, plain_kernels, reference, runner

__all__ = ["fake_graphs", "model_dir", "plain_kernels", "reference", "runner"]
