//! Weights of modules, between a trainer and services over each fabric.

use std::error::Error;

use burn::{
    backend::Flex,
    module::{Module, Param, ParamId},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    store::{ModuleSnapshot as _, ModuleStore as _},
    tensor::{Bool, DType, Device, Int, Tensor, TensorData, bf16, f16},
};
use tensorwire::{FabricKind, Peer, Worker, sets::Policy};
use tensorwire_burn::{Error as BurnError, SnapshotStore, named_tensors};

type Outcome = Result<(), Box<dyn Error>>;

const FABRICS: [FabricKind; 2] = [FabricKind::SHM, FabricKind::TCP];

/// A trainer, and a service that reaches it over this fabric only.
async fn pair(fabric: FabricKind) -> Result<(Worker, Worker, Peer), Box<dyn Error>> {
    let trainer = Worker::builder("trainer").start().await?;
    let service = Worker::client().require(fabric).start().await?;
    let peer = service.peer_at(trainer.address()).await?;
    Ok((trainer, service, peer))
}

/// A parameter of each type that both know.
#[derive(Module, Debug)]
struct Everything {
    f64: Param<Tensor<1>>,
    f32: Param<Tensor<2>>,
    f16: Param<Tensor<1>>,
    bf16: Param<Tensor<1>>,
    i64: Param<Tensor<1, Int>>,
    i32: Param<Tensor<1, Int>>,
    u8: Param<Tensor<1, Int>>,
    bool: Param<Tensor<1, Bool>>,
    /// Modules in modules have paths.
    layers: Vec<Linear>,
}

fn float<const D: usize>(data: impl Into<TensorData>, dtype: DType) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), Tensor::from_data(data.into(), (&Device::flex(), dtype)))
}

fn int(data: impl Into<TensorData>, dtype: DType) -> Param<Tensor<1, Int>> {
    Param::initialized(ParamId::new(), Tensor::from_data(data.into(), (&Device::flex(), dtype)))
}

impl Everything {
    fn new() -> Self {
        let device = Device::flex();
        Self {
            f64: float([0.1f64, f64::MAX], DType::F64),
            f32: float([[0.1f32, f32::MIN_POSITIVE, 3.0], [2.0, -0.0, f32::MAX]], DType::F32),
            f16: float([f16::from_f32(-2.5), f16::MAX], DType::F16),
            bf16: float([bf16::from_f32(1.5), bf16::MIN, bf16::ONE], DType::BF16),
            i64: int([-5i64, i64::MIN], DType::I64),
            i32: int([-4i32, i32::MAX], DType::I32),
            u8: int([1u8, 255, 3], DType::U8),
            bool: Param::initialized(ParamId::new(), Tensor::from_data([true, false, true], &device)),
            layers: (1..3).map(|width| LinearConfig::new(width, width + 1).init(&device)).collect(),
        }
    }

    /// The same types and shapes with other values.
    fn zeros() -> Self {
        let device = Device::flex();
        Self {
            f64: float([0f64; 2], DType::F64),
            f32: float([[0f32; 3]; 2], DType::F32),
            f16: float([f16::ZERO; 2], DType::F16),
            bf16: float([bf16::ZERO; 3], DType::BF16),
            i64: int([0i64; 2], DType::I64),
            i32: int([0i32; 2], DType::I32),
            u8: int([0u8; 3], DType::U8),
            bool: Param::initialized(ParamId::new(), Tensor::from_data([false; 3], &device)),
            layers: (1..3).map(|width| LinearConfig::new(width, width + 1).init(&device)).collect(),
        }
    }
}

/// Paths, types, shapes and bytes of all parameters.
fn shown<M: Module>(module: &M) -> Result<Vec<String>, Box<dyn Error>> {
    let mut all = Vec::new();
    for tensor in module.collect(None, None, false) {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(|error| error.to_string())?;
        all.push(format!("{name} {dtype:?} {shape:?} {:?}", &bytes[..]));
    }
    Ok(all)
}

/// The address of a parameter's memory.
fn address<const D: usize>(parameter: &Param<Tensor<D>>) -> Result<usize, Box<dyn Error>> {
    let tensor = parameter.val().inner().try_into_primitive::<Flex>();
    Ok(tensor.map_err(|error| format!("{error:?}"))?.bytes().as_ptr().addr())
}

#[tokio::test]
async fn every_type_of_both_arrives_bit_for_bit_over_each_fabric() -> Outcome {
    for fabric in FABRICS {
        let (trainer, service, peer) = pair(fabric).await?;
        let (sent, mut got) = (Everything::new(), Everything::zeros());
        trainer.set("weights").commit(1, named_tensors(trainer.pool(), &sent)?).await?;
        let snapshot = peer.set("weights").fetch().await?;
        let result = got.load_from(&mut SnapshotStore::new(&snapshot))?;
        assert_eq!(shown(&got)?, shown(&sent)?, "{fabric}");
        assert_eq!((result.applied.len(), result.missing.len(), result.unused.len()), (12, 0, 0));
        assert!(snapshot.get("layers.1.weight").is_some(), "names are paths");
        service.shutdown().await;
        trainer.shutdown().await;
    }
    Ok(())
}

#[tokio::test]
async fn a_module_answers_with_the_weights_of_its_version_and_follows() -> Outcome {
    let device = Device::flex();
    for fabric in FABRICS {
        let (trainer, service, peer) = pair(fabric).await?;
        // Nothing has initialised the service's module when the first version comes.
        let mut model = LinearConfig::new(3, 2).init(&device);
        let mut versions = peer.set("weights").follow(Policy::Every);
        let input = Tensor::<2>::from_data([[1f32, -2.0, 3.0]], &device);
        for version in 1..=3 {
            let taught: Linear = LinearConfig::new(3, 2).init(&device);
            trainer.set("weights").commit(version, named_tensors(trainer.pool(), &taught)?).await?;
            let staged = versions.next().await.ok_or("the stream ended")??;
            model.load_from(&mut SnapshotStore::new(&staged.apply()))?;
            let [answer, expected] = [&model, &taught].map(|model| model.forward(input.clone()).into_data());
            assert_eq!(answer, expected, "version {version} over {fabric}");
        }
        service.shutdown().await;
        trainer.shutdown().await;
    }
    Ok(())
}

#[tokio::test]
async fn a_version_that_does_not_fit_changes_nothing_and_names_both() -> Outcome {
    let (trainer, service, peer) = pair(FabricKind::SHM).await?;
    trainer.set("weights").commit(1, named_tensors(trainer.pool(), &Everything::new())?).await?;
    let snapshot = peer.set("weights").fetch().await?;
    let mut store = SnapshotStore::new(&snapshot);

    let mut unlike = Everything::zeros();
    unlike.bf16 = float([bf16::ZERO; 4], DType::BF16);
    let before = shown(&unlike)?;
    let error = unlike.load_from(&mut store).err().ok_or("the shapes of bf16 differ")?;
    assert!(matches!(error, BurnError::Mismatch { .. }), "{error}");
    let text =
        "`bf16` is BF16 [4] in this module, and bf16 [3] in version 1: nothing of the module was changed";
    assert!(error.to_string().starts_with(text), "{error}");
    assert_eq!(shown(&unlike)?, before);

    let mut unlike = Everything::zeros();
    unlike.u8 = int([0i64; 3], DType::I64);
    let before = shown(&unlike)?;
    let error = unlike.load_from(&mut store).err().ok_or("the types of u8 differ")?;
    assert!(error.to_string().contains("`u8` is I64 [3] in this module, and u8 [3]"), "{error}");
    assert_eq!(shown(&unlike)?, before);

    let mut larger = Everything::zeros();
    larger.layers.push(LinearConfig::new(3, 4).init(&Device::flex()));
    let before = shown(&larger)?;
    let error = larger.load_from(&mut store).err().ok_or("the set has no third layer")?;
    assert!(matches!(error, BurnError::Missing { .. }), "{error}");
    assert!(error.to_string().starts_with("version 1 has no tensor `layers.2.weight`"), "{error}");
    assert_eq!(shown(&larger)?, before);

    let error = larger.save_into(&mut store).err().ok_or("a version is overwritten")?;
    assert!(matches!(error, BurnError::ReadOnly), "{error}");
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}

#[tokio::test]
async fn a_store_lists_its_tensors_and_a_part_of_a_module_loads_its_own() -> Outcome {
    let worker = Worker::builder("trainer").start().await?;
    let peer = worker.peer_at(worker.address()).await?;
    let mut tensors = named_tensors(worker.pool(), &LinearConfig::new(2, 3).init(&Device::flex()))?;
    tensors.push(("phase".to_owned(), tensorwire::Tensor::from_values(worker.pool(), &[1], &[[1f32, 2.0]])?));
    worker.set("weights").commit(4, tensors).await?;
    let snapshot = peer.set("weights").fetch().await?;
    let mut store = SnapshotStore::new(&snapshot);

    // The module does not need what burn has no type for.
    let result = LinearConfig::new(2, 3).init(&Device::flex()).load_from(&mut store)?;
    assert_eq!(result.unused, ["phase"]);
    assert_eq!(store.keys()?, ["bias", "phase", "weight"]);
    let error = store.get_tensor("weight").map(drop).err().ok_or("burn has complex numbers")?;
    let text =
        "`phase` has elements of type c64, which burn has not: convert the tensor before it is committed";
    assert_eq!(error.to_string(), text);
    worker.shutdown().await;
    Ok(())
}

#[tokio::test]
async fn bytes_that_are_no_bool_are_refused() -> Outcome {
    #[derive(Module, Debug)]
    struct Mask {
        mask: Param<Tensor<1, Bool>>,
    }
    let worker = Worker::builder("trainer").start().await?;
    let peer = worker.peer_at(worker.address()).await?;
    let tensor = tensorwire::Tensor::from_bytes(worker.pool(), tensorwire::DataType::Bool, &[2], &[1, 7])?;
    worker.set("weights").commit(1, [("mask", tensor)]).await?;
    let snapshot = peer.set("weights").fetch().await?;
    let mut module =
        Mask { mask: Param::initialized(ParamId::new(), Tensor::from_data([false; 2], &Device::flex())) };
    let error = module.load_from(&mut SnapshotStore::new(&snapshot)).err().ok_or("7 is a bool")?;
    assert!(error.to_string().starts_with("`mask` in version 1 has bytes that are no bool"), "{error}");
    worker.shutdown().await;
    Ok(())
}

#[tokio::test]
async fn a_tensor_that_is_not_aligned_or_empty_arrives_for_computing() -> Outcome {
    let (trainer, service, peer) = pair(FabricKind::SHM).await?;
    let sent: Linear = LinearConfig::new(3, 2).init(&Device::flex());
    let mut tensors = named_tensors(trainer.pool(), &sent)?;
    for (_, tensor) in &mut tensors {
        let mut buffer = trainer.pool().try_alloc(tensor.bytes().len() + 1)?;
        buffer[1..].copy_from_slice(tensor.bytes());
        let unaligned = buffer.freeze().slice(1..tensor.bytes().len() + 1).ok_or("it is a part")?;
        *tensor = tensorwire::Tensor::shared(unaligned, tensor.dtype(), tensor.shape())?;
    }
    trainer.set("weights").commit(1, tensors).await?;
    let mut model: Linear = LinearConfig::new(3, 2).init(&Device::flex());
    model.load_from(&mut SnapshotStore::new(&peer.set("weights").fetch().await?))?;
    let input = Tensor::<2>::ones([1, 3], &Device::flex());
    assert_eq!(model.forward(input.clone()).into_data(), sent.forward(input).into_data());

    let tensors = named_tensors(trainer.pool(), &Void::new())?;
    trainer.set("void").commit(1, tensors).await?;
    let mut void = Void::new();
    void.load_from(&mut SnapshotStore::new(&peer.set("void").fetch().await?))?;
    assert_eq!(void.nothing.val().sum().into_scalar::<f32>(), 0.0);
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}

/// A parameter without elements.
#[derive(Module, Debug)]
struct Void {
    nothing: Param<Tensor<2>>,
}

impl Void {
    fn new() -> Self {
        Self { nothing: Param::initialized(ParamId::new(), Tensor::zeros([0, 3], &Device::flex())) }
    }
}

/// 4 MiB of values, so that other allocations do not matter.
const SIDE: usize = 1 << 10;
const BYTES: u64 = (SIDE * SIDE * size_of::<f32>()) as u64;

fn large() -> Linear {
    LinearConfig::new(SIDE, SIDE).with_bias(false).init(&Device::flex())
}

#[tokio::test]
async fn weights_arrive_without_a_copy_and_leave_with_one() -> Outcome {
    for fabric in FABRICS {
        let (trainer, service, peer) = pair(fabric).await?;
        let sent = large();
        drop(sent.weight.val());

        // Out: into the pool, and nowhere else.
        let before = trainer.pool().stats().used_bytes;
        let mut tensors = None;
        let out = allocation_counter::measure(|| tensors = named_tensors(trainer.pool(), &sent).ok());
        assert!(out.bytes_total < BYTES / 16, "{out:?}");
        assert!(trainer.pool().stats().used_bytes - before >= BYTES);
        trainer.set("weights").commit(1, tensors.ok_or("the pool has no room")?).await?;

        // In: the module has the memory into which the tensor arrived.
        let snapshot = peer.set("weights").fetch().await?;
        let mut model = large();
        let mut loaded = None;
        let into = allocation_counter::measure(|| {
            loaded = model.load_from(&mut SnapshotStore::new(&snapshot)).ok();
        });
        assert!(loaded.is_some() && into.bytes_total < BYTES / 16, "{into:?}");
        let arrived = snapshot.get("weight").ok_or("the weight is missing")?.bytes().as_ptr().addr();
        assert_eq!(address(&model.weight)?, arrived, "{fabric}");
        assert_eq!(shown(&model)?, shown(&sent)?);
        service.shutdown().await;
        trainer.shutdown().await;
    }
    Ok(())
}

#[tokio::test]
async fn training_with_weights_of_a_version_leaves_the_version_as_it_is() -> Outcome {
    let (trainer, service, peer) = pair(FabricKind::SHM).await?;
    let device = Device::flex().autodiff();
    let sent: Linear = LinearConfig::new(3, 2).init(&device);
    trainer.set("weights").commit(1, named_tensors(trainer.pool(), &sent)?).await?;
    let snapshot = peer.set("weights").fetch().await?;
    let mut model: Linear = LinearConfig::new(3, 2).init(&device);
    model.load_from(&mut SnapshotStore::new(&snapshot))?;
    assert!(model.weight.is_require_grad(), "it is trained as before");
    let (id, before) = (model.weight.id, shown(&model)?);

    let mut optimiser = SgdConfig::new().init();
    for _ in 0..3 {
        let loss = model.forward(Tensor::<2>::ones([4, 3], &device)).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimiser.step(0.1, model, gradients);
    }
    assert_ne!(shown(&model)?, before, "the model has learnt");
    let mut again: Linear = LinearConfig::new(3, 2).init(&device);
    again.load_from(&mut SnapshotStore::new(&snapshot))?;
    assert_eq!(shown(&again)?, before, "the version has not changed");
    assert_eq!(model.weight.id, id);
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}
