"""What the process that others are forked from imports: all that programs and their recording would import by themselves."""

import torch._dynamo
import torch.distributed
from sklearn import datasets

import watchstep.pytorch.watch
from benchmarks.detection.witnessed import witnessed_programs

__all__ = ["datasets", "torch", "watchstep"]

witnessed_programs()
