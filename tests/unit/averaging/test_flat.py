"""FlatModel: what is carried, how it is averaged, and that nothing about the tensors changes but their values."""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from flodl.averaging.digest import image_digest
from flodl.averaging.flat import FlatModel
from flodl.averaging.regions import sum_range
from flodl.errors import ConfigError
from flodl.messages import Layout

EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class EveryKind(nn.Module):
    """One tensor of every kind that can be carried."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

        self.single = parameter(torch.float32, 3, 5)
        self.brain = parameter(torch.bfloat16, 7)
        self.sixteen = parameter(torch.float16, 2, 2)
        self.wide = parameter(torch.float64, 11)
        self.scalar = parameter(torch.float32)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6, generator=generator).t())
        self.strided = nn.Parameter(torch.randn(10, generator=generator)[::2])
        self.frozen = nn.Parameter(torch.randn(3, generator=generator), requires_grad=False)
        self.register_buffer("mean", torch.randn(5, generator=generator))
        self.register_buffer("mean64", torch.randn(2, generator=generator, dtype=torch.float64))
        self.register_buffer("cache", torch.randn(3, generator=generator), persistent=False)
        self.register_buffer("steps", torch.tensor(1000 + seed))
        self.register_buffer("flags", torch.tensor([bool(seed % 2), True, False]))
        self.register_buffer("table", torch.tensor([seed, 255, 0, 7, 1], dtype=torch.uint8))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("nothing", None)


def reduce_all(flats: Sequence[FlatModel], shares: Sequence[tuple[float, float, bool]]) -> torch.Tensor:
    """Pack every model and sum the images in order, as the planes do."""
    images = []
    for flat, (weight, buffer_weight, include_raw) in zip(flats, shares, strict=True):
        image = flat.allocate()
        assert flat.pack(image, weight, buffer_weight, include_raw)
        images.append(image.numpy())
    result = np.zeros_like(images[0])
    sum_range(flats[0].layout, result, images, 0, result.size)
    return torch.from_numpy(result)


def carried(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_weighted_average_is_within_one_rounding_of_a_float64_oracle() -> None:
    models = [EveryKind(seed) for seed in range(3)]
    before = [{name: tensor.detach().clone() for name, tensor in carried(model).items()} for model in models]
    weights, equal = (0.2, 0.3, 0.5), 1 / 3
    flats = [FlatModel(model) for model in models]

    result = reduce_all(flats, [(weight, equal, rank == 2) for rank, weight in enumerate(weights)])
    for flat in flats:
        flat.adopt(result, take_raw=True)

    for name, tensor in carried(models[0]).items():
        values = [tensors[name] for tensors in before]
        if tensor.dtype not in EPSILON or name == "mask":
            assert torch.equal(tensor, values[2]), name
            continue
        shares = weights if isinstance(tensor, nn.Parameter) else (equal,) * 3
        oracle = sum(value.double() * share for value, share in zip(values, shares, strict=True))
        largest = torch.stack([value.double().abs() for value in values]).amax(0)
        assert bool(((tensor.double() - oracle).abs() <= EPSILON[tensor.dtype] * largest).all()), name


def test_all_ranks_adopt_the_same_bits_and_keep_dtype_shape_and_strides() -> None:
    models = [EveryKind(seed) for seed in range(2)]
    before = {name: (tensor.data_ptr(), tensor.dtype, tensor.stride()) for name, tensor in carried(models[0]).items()}
    flats = [FlatModel(model) for model in models]

    result = reduce_all(flats, [(0.25, 0.5, True), (0.75, 0.5, False)])
    for flat in flats:
        flat.adopt(result, take_raw=True)

    for (name, mine), theirs in zip(carried(models[0]).items(), carried(models[1]).values(), strict=True):
        assert torch.equal(mine, theirs), name
        assert (mine.data_ptr(), mine.dtype, mine.stride()) == before[name]


def test_seed_round_reproduces_the_source_to_the_bit() -> None:
    models = [EveryKind(seed) for seed in range(3)]
    with torch.no_grad():
        models[0].single[0, 0] = -0.0
        models[1].single.fill_(math.nan)
    source = copy.deepcopy(models[0])
    flats = [FlatModel(model) for model in models]

    result = reduce_all(flats, [(1.0, 1.0, True), (0.0, 0.0, False), (0.0, 0.0, False)])
    for flat in flats:
        flat.adopt(result, take_raw=True)

    for model in models:
        for name, tensor in carried(model).items():
            wanted = carried(source)[name]
            as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, wanted)]
            assert torch.equal(*as_bytes), name


def test_without_raw_every_rank_keeps_its_integers() -> None:
    models = [EveryKind(seed) for seed in range(2)]
    flats = [FlatModel(model) for model in models]

    result = reduce_all(flats, [(0.5, 0.5, False), (0.5, 0.5, False)])
    for flat in flats:
        flat.adopt(result, take_raw=False)

    assert [int(model.steps) for model in models] == [1000, 1001]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["single", "brain", "wide", "mean", "mean64"])
def test_a_value_that_is_not_finite_is_reported(name: str, value: float) -> None:
    model = EveryKind(0)
    flat = FlatModel(model)
    with torch.no_grad():
        carried(model)[name].view(-1)[-1] = value

    assert not flat.pack(flat.allocate(), 0.5, 0.5, include_raw=True)


def test_huge_finite_values_are_finite() -> None:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 3e38)
    flat = FlatModel(model)

    assert flat.pack(flat.allocate(), 1.0, 1.0, include_raw=False)


def test_zeros_are_sent_in_place_of_values_that_are_not_finite() -> None:
    model = EveryKind(3)
    nn.init.constant_(model.single, math.nan)
    flat = FlatModel(model)
    image = torch.full((flat.layout.total_bytes,), 255, dtype=torch.uint8)

    flat.pack_zeros(image, include_raw=True)

    floats = image[: flat.layout.f64_offset].view(torch.float32)
    assert bool((floats == 0).all())
    other = FlatModel(EveryKind(4))
    other.adopt(image, take_raw=True)
    assert bool((image[flat.layout.raw_offset + flat.layout.raw_bytes :] == 0).all())


def test_tied_tensors_are_carried_once_and_stay_tied() -> None:
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    shared_storage = nn.Linear(6, 4, bias=False)
    shared_storage.weight.data = embedding.weight.data.t()
    model = nn.ModuleList([embedding, head, shared_storage])
    flat = FlatModel(model)
    image = flat.allocate()

    flat.pack(image, 1.0, 1.0, include_raw=False)
    image[: flat.layout.f64_offset].view(torch.float32).mul_(2)
    wanted = embedding.weight.detach() * 2
    flat.adopt(image, take_raw=False)

    assert flat.layout == Layout(24, 0, 0)
    assert torch.equal(head.weight, wanted)
    assert torch.equal(shared_storage.weight, wanted.t())


def test_a_buffer_that_the_module_rebinds_is_still_averaged() -> None:
    model = EveryKind(0)
    flat = FlatModel(model)
    model.mean = model.mean + 1
    image = flat.allocate()
    flat.pack(image, 1.0, 1.0, include_raw=False)
    wanted = model.mean.clone()
    model.mean.zero_()

    flat.adopt(image, take_raw=False)

    assert torch.equal(model.mean, wanted)


def test_a_buffer_that_grows_is_named() -> None:
    model = EveryKind(0)
    flat = FlatModel(model)
    model.cache = torch.zeros(9)

    with pytest.raises(ConfigError, match=r"buffer cache was float32\[3\].*float32\[9\]"):
        flat.pack(flat.allocate(), 1.0, 1.0, include_raw=False)


def _with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.odd = parameter
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex64"),
        (lambda: nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False), "float8_e4m3fn"),
        (lambda: nn.Parameter(torch.zeros(2, device="meta")), "meta device"),
        (lambda: nn.Parameter(torch.zeros(1).expand(3)), "contiguous"),
        (lambda: nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False), "sparse"),
        (nn.UninitializedParameter, "one batch"),
    ],
)
def test_a_tensor_that_cannot_be_averaged_is_refused_by_name(build: Callable[[], nn.Parameter], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"parameter inner\.odd .*{words}"):
        FlatModel(_with_parameter(build()))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_buffer_is_refused_by_name() -> None:
    model = nn.Module()
    model.register_buffer("odd", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))

    with pytest.raises(ConfigError, match="buffer odd is quantized"):
        FlatModel(model)


def test_the_digests_of_tensors_name_each_and_change_with_any_bit_of_it() -> None:
    flat = FlatModel(EveryKind(1))
    image = flat.allocate()
    flat.pack(image, 1.0, 1.0, include_raw=True)
    before = flat.tensor_digests(image)

    assert {*before} - {"(padding)"} == {name for name, tensor in carried(EveryKind(1)).items() if tensor.numel()}
    changed: set[str] = set()
    for place in range(0, image.numel(), 3):
        image[place] ^= 1
        after = flat.tensor_digests(image)
        (name,) = (name for name in before if before[name] != after[name])
        changed.add(name)
        image[place] ^= 1
    assert changed == {*before}


def test_fingerprint_tells_shapes_and_names_and_never_values() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 3)

    plain, wider = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 4))

    assert FlatModel(plain).fingerprint() == FlatModel(nn.Sequential(nn.Linear(2, 3))).fingerprint()
    assert FlatModel(plain).fingerprint() != FlatModel(wider).fingerprint()
    assert FlatModel(plain).fingerprint() != FlatModel(Renamed()).fingerprint()


def test_divergence_is_the_relative_distance_of_the_parameters() -> None:
    model, other = EveryKind(1), EveryKind(2)
    flat, consensus = FlatModel(model), FlatModel(other).allocate()
    FlatModel(other).pack(consensus, 1.0, 1.0, include_raw=True)

    pre = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    post = torch.cat([p.detach().double().reshape(-1) for p in other.parameters()])
    expected = float((pre - post).norm() / post.norm())

    assert flat.examine(consensus)[1] == pytest.approx(expected, rel=1e-5)
    flat.adopt(consensus, take_raw=True)
    assert flat.examine(consensus)[1] == 0.0


class ManyBlocks(nn.Module):
    """Tensors that begin and end inside blocks of the digest, over several of them, in every layout and dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, size in (("small", 5), ("wide", 700_001), ("next", 300_000), ("last", 7)):
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator)))
        self.turned = nn.Parameter(torch.randn(300, 1001, generator=generator).t())
        self.brain = nn.Parameter(torch.randn(400_003, generator=generator).bfloat16())
        self.binary64 = nn.Parameter(torch.randn(200_003, generator=generator, dtype=torch.float64))
        self.register_buffer("mean", torch.randn(300_001, generator=generator))


@pytest.mark.parametrize("build", [EveryKind, ManyBlocks])
def test_one_pass_gives_the_digest_of_the_bytes_and_the_distance_of_the_values(
    build: Callable[[int], nn.Module],
) -> None:
    model, other = build(1), build(2)
    flat, consensus = FlatModel(model), FlatModel(other).allocate()
    assert FlatModel(other).pack(consensus, 1.0, 1.0, include_raw=True)

    digest, divergence = flat.examine(consensus)

    pre = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    post = torch.cat([p.detach().double().reshape(-1) for p in other.parameters()])
    assert digest == image_digest(consensus)
    assert divergence == pytest.approx(float((pre - post).norm() / post.norm()), rel=1e-6)


@pytest.mark.parametrize("place", [0, 699_999, 700_000])
def test_a_value_that_is_not_finite_is_found_in_any_block(place: int) -> None:
    model = ManyBlocks(0)
    with torch.no_grad():
        model.wide[place] = math.nan
    flat = FlatModel(model)

    assert not flat.pack(flat.allocate(), 0.5, 0.5, include_raw=False)
    assert math.isnan(flat.examine(flat.allocate())[1])


def test_divergence_from_a_consensus_of_zeros_is_finite() -> None:
    flat = FlatModel(nn.Linear(2, 2))

    assert math.isfinite(flat.examine(flat.allocate())[1])


def test_packing_again_uses_no_new_image_memory() -> None:
    model = EveryKind(0)
    flat = FlatModel(model)
    image = flat.allocate()
    flat.pack(image, 1.0, 1.0, include_raw=True)
    cached = flat._images[image.data_ptr(), image.numel()]

    flat.pack(image, 1.0, 1.0, include_raw=True)

    assert flat._images[image.data_ptr(), image.numel()] is cached


def test_only_a_few_images_stay_cached() -> None:
    flat = FlatModel(nn.Linear(2, 2))
    images = [flat.allocate() for _ in range(9)]

    for image in images:
        flat.pack(image, 1.0, 1.0, include_raw=True)

    assert len(flat._images) <= 4


def test_an_image_of_another_size_is_refused() -> None:
    flat = FlatModel(nn.Linear(2, 2))

    with pytest.raises(ValueError, match="an image of this model"):
        flat.adopt(torch.zeros(128, dtype=torch.uint8), take_raw=False)


def test_a_model_without_tensors_has_an_empty_image() -> None:
    flat = FlatModel(nn.ReLU())

    assert flat.layout == Layout(0, 0, 0)
    assert flat.pack(flat.allocate(), 1.0, 1.0, include_raw=True)
    assert flat.examine(flat.allocate())[0]


def test_parameter_added_after_the_start_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    flat = FlatModel(model)
    model[0].register_buffer("cache", torch.zeros(3))  # a cache that comes with the first batch is each rank's own
    assert flat.pack(flat.allocate(), 1.0, 1.0, include_raw=True)
    model[0].register_parameter("late", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"parameter 0\.late was added after.*in the model factory"):
        flat.pack(flat.allocate(), 1.0, 1.0, include_raw=True)
