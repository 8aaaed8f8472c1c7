"""The ways to synchronize that are compared, each over the same work."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import Work

from lightning_replicate import replicate


class Peer:
    """One way to synchronize the modules of one work."""

    def __init__(self, name: str, work: Work, rank: int) -> None:
        self.name, self.work, self.rank = name, work, rank
        torch.manual_seed(0)
        self.plain = work.build()
        marks, parts = work.marks or (lambda module: [module]), work.optimizers or (lambda module: [module])
        self.marked = [marked for module in self.plain for marked in marks(module)]
        dist.barrier()
        start = time.perf_counter()
        self.modules: list[Any] = [self._synchronize(module) for module in self.plain]
        self.set_up_s = time.perf_counter() - start
        self.optimizers = [
            torch.optim.SGD(part.parameters(), lr=1e-4) for module in self.plain for part in parts(module)
        ]
        self.number = 0

    def _synchronize(self, module: nn.Module) -> Any:
        if self.name == "none":
            return module
        if self.name.startswith("ours"):
            cap: Any = "auto" if "auto" in self.name else 25.0
            for marked in self.marked:
                replicate(marked, bucket_cap_mb=cap)
            return module
        if self.name.startswith("ddp"):
            options: dict[str, Any] = {"find_unused_parameters": "unused" in self.name}
            if "tuned" in self.name:
                options.update(gradient_as_bucket_view=True, batched_grad_copy=True)
            if "static" in self.name:
                options["static_graph"] = True
            return DistributedDataParallel(module, **options)
        if self.name == "torch replicate":
            from torch.distributed._composable.replicate import replicate as composable

            return composable(module)
        from torch.distributed._composable.replicate_with_fsdp import replicate as on_fsdp2
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in _layers(module):
            on_fsdp2(layer, mesh=mesh)
        return on_fsdp2(module, mesh=mesh)

    @property
    def _is_active(self) -> bool:
        return self.name.startswith("ours") and dist.get_world_size() > 1

    def _no_sync(self) -> Any:
        if self.name.startswith("ours"):
            return replicate.state(self.plain[0]).no_sync()
        return self.modules[0].no_sync() if hasattr(self.modules[0], "no_sync") else nullcontext()

    def step(self) -> None:
        """One optimizer step."""
        if self.work.accumulate > 1:
            with ExitStack() as stack:
                stack.enter_context(self._no_sync())
                for _ in range(self.work.accumulate - 1):
                    self.modules[0](torch.randn(4, 2048)).sum().backward()
        self.work.step(self.modules, self.optimizers, self.rank, self.number)
        self.number += 1

    def seconds(self, steps: int) -> float:
        """How long a step takes, mean over some steps that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps

    def facts(self) -> dict[str, Any]:
        """What can be counted: it does not depend on the machine."""
        params = [param for module in self.plain for param in module.parameters()]
        found: dict[str, Any] = {"parameters": len(params), "model_bytes": sum(param.nbytes for param in params)}
        if self._is_active:
            self.step()
            rounds = [replicate.state(marked).last_round for marked in self.marked]
            found.update(bytes=sum(r.nbytes for r in rounds if r), collectives=sum(r.collectives for r in rounds if r))
            found["early"] = sum(r.early for r in rounds if r)
        storages = {
            param.grad.untyped_storage().data_ptr(): param.grad.untyped_storage().nbytes()
            for param in params
            if param.grad is not None and type(param.grad) is torch.Tensor
        }
        found["gradient_bytes"] = sum(storages.values())
        return found

    def remove(self) -> None:
        """Takes ours off its model. Otherwise the next one would be a group beside this one, and both take turns."""
        if self.name.startswith("ours"):
            for marked in self.marked:
                replicate.state(marked).remove()


def _layers(module: nn.Module) -> list[nn.Module]:
    """What FSDP2 is called on, one call each: modules that hold parameters themselves, and whole transformer layers."""
    found: list[nn.Module] = []
    for child in module.children():
        own = any(True for _ in child.parameters(recurse=False))
        found += [child] if own or isinstance(child, nn.TransformerEncoderLayer) else _layers(child)
    return found


def peers_of(work: Work) -> list[str]:
    """Who is compared over a work: DDP needs ``find_unused_parameters`` where some parameters get no gradient."""
    if work.unused:
        return ["ours", "none", "ddp unused", "ddp tuned unused"]
    names = ["ours", "none", "ddp", "ddp tuned"]
    if work.accumulate == 1:  # a static graph cannot be combined with no_sync
        names.append("ddp tuned static")
    return [*names, "torch replicate", "torch replicate on FSDP2"]
