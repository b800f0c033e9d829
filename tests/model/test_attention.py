"""Flash Attention 3 is switched on where it is installed and the GPU runs it, and nowhere else."""

from __future__ import annotations

import pytest

from hispec_ray.model import attention


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_flash_attention_is_switched_on_for_hopper_alone(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switched: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", switched.append)
    monkeypatch.setattr(attention.torch.cuda, "get_device_capability", lambda: capability)
    hopper = capability[0] == 9
    assert attention.flash_attention_reads_blocks() == hopper
    assert switched == ["FA3"] * hopper
    assert ("this GPU's is {}.{}".format(*capability) in caplog.text) != hopper


def test_without_the_package_blocks_are_gathered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", missing)
    monkeypatch.setattr(attention.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert not attention.flash_attention_reads_blocks()
    assert "No module named 'flash_attn_interface'" in caplog.text
