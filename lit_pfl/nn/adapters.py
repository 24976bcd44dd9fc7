"""Adapters of the `peft` library (LoRA, IA3, prompts), found by how it marks its layers."""

from torch import nn

#: what peft calls the two factors of a LoRA: A, (r, inputs), and B, (outputs, r)
FACTORS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}


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


def adapted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a module that hold adapters, by path; prompts are in none."""
    found = {}
    for path, part in module.named_modules():
        names = getattr(part, "adapter_layer_names", ())
        if isinstance(names, tuple | list) and any(hasattr(part, name) for name in names):
            found[path] = part
    return found


def lora_factors(module: nn.Module) -> dict[str, str]:
    """Return the names of the parameters B of a module's LoRAs, by those of A: a layer's weight gains ``B A``."""
    prefixes = adapter_prefixes(module)
    names = [name for name, _ in module.named_parameters() if is_of_adapter(name, prefixes)]
    found = {}
    for name in names:
        twin = ".".join(FACTORS.get(part, part) for part in name.split("."))
        if twin != name and twin in names:
            found[name] = twin
    return found
