"""Where a head's training starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from pilotfish.errors import ConfigError
from pilotfish.models.heads import HeadConfig, head_tensors

__all__ = ["LayerInit", "initial_parameters"]

LayerInit = Literal["last", "random"]

_STD = 0.02
"""Standard deviation of random weights, Llama's ``initializer_range``."""


def initial_parameters(
    config: HeadConfig,
    target_weights: Mapping[str, Tensor],
    *,
    layer_init: LayerInit,
    lm_head: Tensor,
    seed: int,
) -> dict[str, Tensor]:
    """The float32 tensors of ``head_tensors(config)``, ready to be trained.

    Norms are ones and biases zeros. The projection that joins embedding and state starts as the identity on the state
    and small on the embedding: a head that hands the state on. EAGLE-3's ``fc`` starts as the mean of its layers.

    Args:
        config: of the head.
        target_weights: the target's, by Hugging Face's names; read where ``layer_init`` is ``last``.
        layer_init: the decoder layer is a copy of the target's last one (as far as shapes agree), or random.
        lm_head: [D, H], what an output head of its own starts from.
        seed: of random weights.

    Raises:
        ConfigError: ``layer_init`` is neither.
    """
    if layer_init not in get_args(LayerInit):
        raise ConfigError(f"init={layer_init!r}: must be one of {', '.join(get_args(LayerInit))}")
    generator = torch.Generator().manual_seed(seed)
    last = f"model.layers.{_num_target_layers(config) - 1}."
    parameters = {}
    for name, shape in head_tensors(config).items():
        source = None
        if layer_init == "last" and "layer." in name:
            source = target_weights.get(last + name.split("layer.", 1)[1])
        if source is not None and tuple(source.shape) == shape:
            tensor = source.detach().float().clone()
        elif source is not None and source.ndim == 2 and shape == (source.shape[0], 2 * source.shape[1]):
            # EAGLE-3's attention reads [embedding; state]: the target's projection is for states.
            tensor = torch.cat([torch.randn(source.shape, generator=generator) * _STD, source.float()], dim=1)
            tensor = tensor.roll(source.shape[1], 1) if config.hidden_first else tensor
        else:
            tensor = _fresh(name, shape, config, lm_head, generator)
        parameters[name] = tensor.contiguous()
    return parameters


def _num_target_layers(config: HeadConfig) -> int:
    return 1 if config.target is None else config.target.num_layers


def _fresh(
    name: str, shape: tuple[int, ...], config: HeadConfig, lm_head: Tensor, generator: torch.Generator
) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    if name == "lm_head.weight":
        return lm_head.detach().float().clone()
    random = torch.randn(shape, generator=generator) * _STD
    hidden = shape[0]
    if name.endswith("eh_proj.weight") or (name == "fc.weight" and config.kind == "eagle"):
        columns = slice(0, hidden) if config.hidden_first else slice(hidden, 2 * hidden)
        random[:, columns] = torch.eye(hidden)
    elif name == "fc.weight" and config.target_hidden_size == hidden:
        count = len(config.aux_layers)
        random = torch.eye(hidden).repeat(1, count) / count
    return random
