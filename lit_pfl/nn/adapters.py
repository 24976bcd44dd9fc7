"""Adapters of the `peft` library (LoRA, IA3, prompts), found by how it marks its layers."""

from torch import nn


def adapter_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Return what names of parameters begin with that belong to an adapter.

    A layer of ``peft`` names the attributes that hold its adapters in ``adapter_layer_names``; prompts lie in the
    ``prompt_encoder`` of a model with a ``peft_config``.
    """
    found: list[str] = []
    for path, part in module.named_modules(remove_duplicate=False):
        own = f"{path}." if path else ""
        names = getattr(part, "adapter_layer_names", ())
        if isinstance(names, tuple | list):
            found += [f"{own}{name}" for name in names if hasattr(part, name)]
        if hasattr(part, "peft_config") and isinstance(getattr(part, "prompt_encoder", None), nn.Module):
            found.append(f"{own}prompt_encoder")
    return tuple(found)


def is_of_adapter(name: str, prefixes: tuple[str, ...]) -> bool:
    """Say whether a parameter belongs to an adapter; see :func:`adapter_prefixes`."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
