"""Which accelerators there are to share out, found without JAX."""

from collections.abc import Mapping
from pathlib import Path

from millrace.config import ConfigurationError


def uses_gpu(variables: Mapping[str, str]) -> bool:
    """Whether JAX would compute on GPUs in this environment."""
    platforms = variables.get("JAX_PLATFORMS", "")
    asked = not platforms or "cuda" in platforms or "gpu" in platforms
    return asked and bool(visible_gpus(variables))


def visible_gpus(variables: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES lets through, or the numbers of all."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [word.strip() for word in visible.split(",") if word.strip()]
    found = [path.name[6:] for path in devices.glob("nvidia[0-9]*")]
    return [str(number) for number in range(len(found))]


def gpus_for(
    number: int, num_instances: int, per_instance: int, variables: Mapping[str, str]
) -> str:
    """Return the GPUs of an instance, as CUDA_VISIBLE_DEVICES has them."""
    gpus = visible_gpus(variables)
    if num_instances * per_instance > len(gpus):
        raise ConfigurationError(
            f"{num_instances} instances with {per_instance} devices each need "
            f"{num_instances * per_instance} GPUs, but there are {len(gpus)}. Start "
            "fewer, or set JAX_PLATFORMS=cpu."
        )
    return ",".join(gpus[number * per_instance : (number + 1) * per_instance])
